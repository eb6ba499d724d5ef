"""DeepSpeed's engine: its file, its start and stop, its parameter groups, and its checkpoints."""
