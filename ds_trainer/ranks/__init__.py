"""Ranks: who they are, how they speak, stop and fail."""
