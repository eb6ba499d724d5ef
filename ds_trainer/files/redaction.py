"""Hide secrets in what a run shows of its command and files.

A secret is recognised by the name of what holds it (`api_key`, `hf_token`, `password`), as a login in a URL, by the
form of the keys of some services, and as the value of an environment variable with such a name. Any other is shown.

Every pattern begins at the start of a name or at a fixed character, so that the time is linear in the text's length.
"""

import contextlib
import json
import os
import re
from typing import Any

HIDDEN = "REDACTED"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET = re.compile(
    r"passw(or)?d|passphrase|secret|credential|(api|access|private)_?key"
    r"|(api|auth|access|bearer|hf|hub)_?tokens(_|$)"
    r"|token(?![a-z])(?!_(id|type|count|index|embed|dim|len|size|drop|class))"  # `token_type_ids` is no secret
)
_TEXT_TOKEN = re.compile(r"(pad|bos|eos|unk|sep|cls|mask|special|image|audio|video)_?token")
"""Tokens of these kinds are words to a model: `pad_token` is no secret."""

_LOGIN = re.compile(
    r"""(?:(?<=http)|(?<=https))://[^\s/"']+@|(?<=[a-z0-9+.-])://[^\s/:@"']*:[^\s/"']+@""", re.IGNORECASE
)
_SERVICE_KEY = re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}|glpat-[\w-]{20,})")
_MIN_VALUE = 8
"""Shorter values of environment variables are ordinary words, and are not looked for."""

_MARK = re.compile(r"""(?<![\w.*-])([\w.*-]+)("\s{0,20}:\s{0,20}| is |=| (?!-))""")
"""A name, and what stands before its value: in JSON, in messages of this library, in assignments, and after a flag."""
_LITERAL = r""""(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?"""  # one that is not closed, in a text that was cut, ends with its line
_BRACKETS = r"[\[{](?:.*[\]}]|.*)"  # up to the last bracket of the line, for what is no whole JSON value
_VALUES = {
    '"': (re.compile(rf"{_LITERAL}|{_BRACKETS}|[-\w.+]+"), f'"{HIDDEN}"'),
    "i": (re.compile(rf"{_LITERAL}|{_BRACKETS}|[^\s\"'\[{{:;,]+(?=[:;,])"), HIDDEN),
    "=": (re.compile(rf"{_LITERAL}|[^\s&\"',;]+"), HIDDEN),
    "": (re.compile(rf"{_LITERAL}|[^\s\"']+"), HIDDEN),
}
"""The value after each mark, by its first character, and what replaces it."""
_QUOTED = {"'": re.compile(r"[^'\n]+"), '"': re.compile(r'[^"\n]+')}
"""The value of an assignment that is quoted as a whole, as a shell has it."""


def redacted(value: Any) -> Any:
    """Return a copy of a JSON value in which `HIDDEN` replaces every secret."""
    if isinstance(value, dict):
        return {key: _hidden(item) if _is_secret(str(key)) else redacted(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return _text(value) if isinstance(value, str) else value


def _hidden(value: Any) -> Any:
    """Hide a value; that there is none is no secret."""
    return value if value is None or isinstance(value, bool) or value == "" else HIDDEN


def _is_secret(path: str) -> bool:
    """Whether a name, or a part of a dotted path, is that of a secret."""
    names = ["_".join(_WORDS.findall(part)).lower() for part in path.split(".")]
    return any(_SECRET.search(name) and not _TEXT_TOKEN.search(name) for name in names)


def _text(text: str) -> str:
    values = {value for name, value in os.environ.items() if len(value) >= _MIN_VALUE and _is_secret(name)}
    for value in sorted(values, key=len, reverse=True):  # one may be a part of another
        text = text.replace(value, HIDDEN)
    text = _LOGIN.sub(f"://{HIDDEN}@", _SERVICE_KEY.sub(HIDDEN, text))
    parts, done = [], 0
    for name in _MARK.finditer(text):
        if name.start() < done or not _is_secret(name[1]):
            continue  # a name inside of a hidden value is passed over
        mark = name[2].strip()[:1]
        if not mark and not name[1].startswith("-"):
            continue  # a word, and no flag
        pattern, replacement = _VALUES[mark]
        if mark == "=" and name.start():
            pattern = _QUOTED.get(text[name.start() - 1], pattern)
        if end := _end_of_value(text, name.end(), pattern):
            parts += [text[done : name.end()], replacement]
            done = end
    return "".join([*parts, text[done:]])


def _end_of_value(text: str, start: int, pattern: re.Pattern[str]) -> int | None:
    """Return the end of the value at `start`; None if there is no value. A JSON list or object ends at its bracket."""
    if text[start : start + 1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.JSONDecoder().raw_decode(text, start)[1]
    return matched.end() if (matched := pattern.match(text, start)) else None
