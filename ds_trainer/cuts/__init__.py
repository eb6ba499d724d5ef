"""Cuts of a trained model from a calibration set: what is removed, and how the rest is refitted."""
