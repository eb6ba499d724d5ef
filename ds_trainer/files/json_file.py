"""Read a JSON object as DeepSpeed reads its own: Hjson, so comments and trailing commas are fine, duplicate keys not.

Every error names the file and, for mistakes of syntax, the line and the column. This module loads neither torch nor
DeepSpeed.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import hjson

from ds_trainer.files.messages import cut, kind_of, listed
from ds_trainer.files.reading import read_file
from ds_trainer.ranks.failures import UserError

_MOST_BYTES = 2**20


def read_json(path: str | Path, role: str) -> dict[str, Any]:
    """Read the object in a file, or raise UserError; `role` names the file in errors, e.g. "the recipe"."""
    name = f"{role} {path}"
    return parse_json(read_file(Path(path), name, _MOST_BYTES), name)


def parse_json(raw: bytes, name: str) -> dict[str, Any]:
    """Parse an object, or raise UserError with its `name`."""
    data = _parsed(raw, name)
    if not isinstance(data, dict):
        raise UserError(f"{name} holds {kind_of(data)}: it must be an object, {{...}}")
    if mistake := value_mistake(data):
        raise UserError(f"{name} {mistake}")
    return data


def value_mistake(data: Any) -> str | None:
    """Say why a value could not be written back as JSON or be used as a path; None where it can."""
    try:
        text = json.dumps(data, allow_nan=False, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        return "holds half a surrogate pair, which is no character"
    except RecursionError:
        return "is nested too deeply"
    except ValueError:
        return "holds a number that JSON has not: NaN, Infinity, or one of thousands of digits"
    return "holds a NUL character" if "\\u0000" in text else None


def _parsed(raw: bytes, name: str) -> Any:
    try:
        text = raw.decode("utf-8-sig")
        if not text.strip():
            raise UserError("it is empty: it must be an object, {...}")
        return hjson.loads(text, object_pairs_hook=_without_duplicates)
    except UserError as error:
        cause = str(error)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        cause = f"line {line} is not UTF-8: save it as UTF-8"
    except hjson.HjsonDecodeError as error:
        cause = f"{cut(error.msg, 200)} at line {error.lineno}, column {error.colno}"
    except (IndexError, RecursionError, OverflowError, ValueError) as error:
        # Hjson raises an IndexError at an end where it expects none; Python reads no number of thousands of digits
        causes = {IndexError: "it ends inside a comment or a text", RecursionError: "it is nested too deeply"}
        cause = causes.get(type(error), "a number is too large")
    raise UserError(f"{name} is not JSON: {cause}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1):
        raise UserError(f"it has {listed(twice)} twice in one section: keep one")
    return dict(pairs)
