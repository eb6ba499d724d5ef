"""Pruning: movement, magnitude, threshold and L0, of weights, blocks, heads and neurons."""
