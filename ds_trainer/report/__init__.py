"""What a run shows of itself: the log, the page, and the figures."""
