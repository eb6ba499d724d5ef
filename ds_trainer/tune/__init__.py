"""`launch/tune.py`: search for the settings under which a phase trains fastest, or a recipe scores best.

Read `search.py` first. A trial is an ordinary run of `launch/train.py`.
"""
