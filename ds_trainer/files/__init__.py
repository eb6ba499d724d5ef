"""Files: read within bounds, written whole, kept in a run's folder, and shown without secrets."""
