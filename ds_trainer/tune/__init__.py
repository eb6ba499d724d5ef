"""`launch/tune.py`: search for the settings under which a phase trains fastest, or a recipe scores best.

No torch is loaded here. Read `search.py` first.
"""
