"""The words of the labelled CSV task that most tests train on, by their label."""

WORDS = {"fruit": "apple pear plum fig", "tool": "hammer saw drill file", "bird": "wren crow finch owl"}
