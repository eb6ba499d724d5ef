"""Tasks: data, loss and score, one family of problems each."""
