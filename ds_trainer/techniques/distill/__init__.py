"""Distillation from a frozen teacher."""
