"""Choosing what to drop."""
