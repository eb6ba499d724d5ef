"""`launch/tune.py`: find the settings under which a phase trains fastest on this machine. Loads no torch.

Read `tune.py` first.
"""
