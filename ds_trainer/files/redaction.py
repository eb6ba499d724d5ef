"""Hide secrets in what a run shows of its command and files.

A secret is recognised by the name of what holds it (`api_key`, `hf_token`, `password`), as a login in a URL, by the
form of the keys of some services, and as the value of an environment variable with such a name. Any other is shown.

Every pattern begins at the start of a name or at a fixed character, so that the time is linear in the text's length.
"""

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

_MARK = re.compile(r"""(?<![\w.*-])([\w.*-]+)(["']\s{0,20}:\s{0,20}| is (?=["'\[{]|[^\s:;,]+[:;,])|=| (?!-))""")
"""A name, and what stands before its value: in JSON, in messages of this library, in assignments, and after a flag."""
_VALUE = re.compile(r""""(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|[\[{].*|[^\s"',;&]*[^\s"',;:&]""")
"""A quoted text, of which the end may be missing; a list or an object to the end of its line; or a word."""


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
        is_named = name[2] != " " or name[1].startswith("-")  # two words, unless the first is a flag, are no assignment
        if name.start() < done or not (is_named and _is_secret(name[1])):
            continue  # a name inside of a hidden value is passed over
        if given := _VALUE.match(text, name.end()):
            parts += [text[done : name.end()], HIDDEN]
            done = given.end()
    return "".join([*parts, text[done:]])
