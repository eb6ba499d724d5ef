"""Write the table of docs/engine_files.md from keys.json and verdicts.json of ds_trainer/engine.

python tests/tools/write_engine_docs.py
"""

import pathlib
from collections.abc import Iterator

from ds_trainer.engine.keys import key_table
from ds_trainer.engine.verdicts import verdict_table

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "engine_files.md"
HEAD = "| key | what becomes of it |\n|---|---|\n"


def verdict(path: str) -> str:
    """Say whether a key is honoured, honoured with something beside it, or refused, and what to do instead."""
    refused = verdict_table()["refused"]
    if path in refused:
        return f"refused: {refused[path]}"
    needs = [need["words"] for need in verdict_table()["needs"] if path in need["keys"]]
    return f"honoured with {'; and with '.join(needs)}" if needs else "honoured"


def paths() -> Iterator[str]:
    """Every key at the top, DeepSpeed's deleted ones too, and below it those of another verdict than their block's."""
    known, removed = key_table()["keys"], key_table()["removed"]
    special = {*verdict_table()["refused"], *(key for need in verdict_table()["needs"] for key in need["keys"])}
    for key in sorted({*known, *(path for path in removed if "." not in path)}):
        yield key
        yield from sorted(path for path in special if path.startswith(f"{key}."))


def table() -> str:
    return HEAD + "".join(f"| `{path}` | {verdict(path)} |\n" for path in paths())


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text[: text.index(HEAD)] + table(), encoding="utf-8")
