"""Classification and regression of a text or a pair of texts."""
