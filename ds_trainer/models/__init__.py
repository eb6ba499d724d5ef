"""Models of `transformers`: folders, layers, sizes, and how a model is cut."""
