"""Techniques: one paper, one object, layered on any task."""
