"""Measuring a training step."""
