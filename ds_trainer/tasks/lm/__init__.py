"""Language modelling, masked or causal."""
