"""Write a part of a page between two markers, `<!-- NAME:begin -->` and `<!-- NAME:end -->`, each in its own line."""

import pathlib


def write_between(page: pathlib.Path, name: str, text: str) -> None:
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name}:begin -->\n")
    _, end, after = rest.partition(f"<!-- {name}:end -->")
    if not end:
        raise ValueError(f"{page} has no <!-- {name}:begin --> and <!-- {name}:end -->: add both, each in its own line")
    page.write_text(before + begin + text + end + after, encoding="utf-8")
