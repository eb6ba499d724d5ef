"""Documents of queries, ranked by a cross-encoder."""
