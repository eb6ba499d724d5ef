"""Cuts of a trained model from a calibration set: what is removed, and how what is kept makes up for it."""
