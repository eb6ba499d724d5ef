"""LayerSkip: decoders whose first layers draft what all of them verify."""
