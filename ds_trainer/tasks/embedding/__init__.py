"""Vectors of texts: embedding models."""
