"""The words of the labelled CSV task that most tests train on, by their label, and their tags as entities."""

WORDS = {"fruit": "apple pear plum fig", "tool": "hammer saw drill file", "bird": "wren crow finch owl"}


def tag_of(word: str) -> str:
    """The word of a label is an entity of that kind."""
    return next((f"B-{kind}" for kind, words in WORDS.items() if word in words.split()), "O")
