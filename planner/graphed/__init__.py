"""Mechanism "graph": the captured graph runs in place of the model's Python; backward runs again what was dropped."""
