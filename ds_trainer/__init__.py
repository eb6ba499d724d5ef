"""Make transformer models small and fast: pruning, early exit and distillation, trained on DeepSpeed."""

__version__ = "0.1.0"
