"""What a run shows of its command and files, without the secrets in them.

Found by the names of what holds them, in addresses, by the form that the keys of some services have, and where they are
what a variable of the environment with such a name holds. A secret of no such kind is not found.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from functools import lru_cache
from typing import Any

HIDDEN = "REDACTED"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET = re.compile(r"passw(or)?d|passphrase|secret|credential|(api|access|private)_?key")
_TOKEN = re.compile(r"(?:^|_)([a-z]*?)_?token(?![a-z])(?!_(?:ids?|types?|counts?)(?:_|$))")
_TOKENS = re.compile(r"(?:^|_)(?:api|auth|access|bearer|hf|hub)_?tokens(?:_|$)")
_OF_TEXTS = frozenset(("pad", "bos", "eos", "unk", "sep", "cls", "mask", "special", "image", "audio", "video"))
"""Tokens of these kinds are words to a model: `pad_token` is no secret."""

_LOGIN = re.compile(
    r"""(?:(?<=http)|(?<=https))://[^\s/"']+@|(?<=[a-z0-9+.-])://[^\s/:@"']*:[^\s/"']+@""", re.IGNORECASE
)
_MAYBE_SECRET = re.compile(r"passw|passphrase|secret|credential|key|token", re.IGNORECASE)
# Each of these begins at one character, and names are looked for backwards or are bounded: linear in any text.
_JSON_KEY = re.compile(r'"((?:[^"\\]|\\.){0,100})"\s{0,20}:\s{0,20}(?=["\w.+-])')
_IS = re.compile(r"(?<=\w) is ")
_EQUALS = re.compile(r"(?<=\w)=")
_NAME_BACKWARDS = re.compile(r"[\w.*-]*")
_MOST_OF_A_NAME = 200
_CLOSED_BRACKETS = re.compile(r"[\]}](?=[:;,]|$)", re.MULTILINE)
_STRINGS = {'"': re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL), "'": re.compile(r"'[^']*'")}
_JSON_WORD = re.compile(r"[-\w.+]*")
_TOLD_WORD = re.compile(r"""[^\s"'\[{:;,]+(?=[:;,])""")
_ASSIGNED_WORD = re.compile(r"""[^\s&"',;]+""")
_OF_SERVICES = re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16}|glpat-[\w-]{20,})")
_LEAST_LENGTH = 8
"""Of a variable's value that is looked for: shorter ones are words."""


def redacted(value: Any) -> Any:
    """The JSON value with `HIDDEN` in place of every secret; a new one, the given one stays as it is.

    Secrets are what is under a key such as `api_key`, `hf_token` or `password`, at any depth, also as `key=value` and
    as JSON inside of a text; and who logs in at an address, as in `https://user:password@host`. A text under "command"
    is taken apart as a shell does, and has secrets as `--key value`, too.
    """
    if isinstance(value, dict):
        return {key: _of_key(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return _text(value) if isinstance(value, str) else value


def _of_key(key: str, value: Any) -> Any:
    if _is_secret(key):
        return value if value is None or isinstance(value, bool) or value == "" else HIDDEN
    return _command(value) if key == "command" and isinstance(value, str) else redacted(value)


def _is_secret(key: str) -> bool:
    name = "_".join(_WORDS.findall(key)).lower()
    if _SECRET.search(name) or _TOKENS.search(name):
        return True
    return any(found[1] not in _OF_TEXTS for found in _TOKEN.finditer(name))


def _command(text: str) -> str:
    """A command line, as it was where it holds no secret."""
    try:
        parts = shlex.split(text)
    except ValueError:  # quotes that do not close
        return _text(text)
    shown = [_argument(part) for part in parts]
    for index, flag in enumerate(parts[:-1]):
        if flag.startswith("-") and "=" not in flag and _is_secret(flag) and not parts[index + 1].startswith("--"):
            shown[index + 1] = HIDDEN
    return text if shown == parts else shlex.join(shown)


def _argument(text: str) -> str:
    """An argument: PATH=JSON, JSON, or anything else."""
    path, equals, given = text.partition("=")
    if equals and re.fullmatch(r"[\w.*-]+", path):
        return f"{path}={HIDDEN if _is_secret_path(path) else _json_or_text(given)}"
    return _json_or_text(text)


def _json_or_text(text: str) -> str:
    try:
        value = json.loads(text)
        shown = redacted(value)
    except (ValueError, RecursionError):
        return _text(text)
    return text if shown == value else json.dumps(shown)


def _text(text: str) -> str:
    for value in _of_environment():
        text = text.replace(value, HIDDEN)
    text = _OF_SERVICES.sub(HIDDEN, text)
    text = _LOGIN.sub(f"://{HIDDEN}@", text)
    if not _MAYBE_SECRET.search(text):
        return text
    text = _hidden_after(_JSON_KEY, lambda found: _is_secret(found[1]), _end_in_json, f'"{HIDDEN}"', text)
    text = _hidden_after(_IS, _is_secret_before, _end_of_told, HIDDEN, text)
    return _hidden_after(_EQUALS, _is_secret_before, _end_of_assigned, HIDDEN, text)


def _hidden_after(
    mark: re.Pattern[str],
    is_secret: Callable[[re.Match[str]], bool],
    end: Callable[[str, int], int],
    instead: str,
    text: str,
) -> str:
    """The text with something instead of each value that follows on the mark of a secret, up to its `end`."""
    parts, done, at = [], 0, 0
    while found := mark.search(text, at):
        at = found.end()
        if is_secret(found) and (stop := end(text, at)) > at:
            parts += [text[done:at], instead]
            done = at = stop
    return "".join([*parts, text[done:]])


def _is_secret_before(found: re.Match[str]) -> bool:
    """Whether the name that ends where the mark begins is that of a secret; of a long one, its end."""
    before = found.string[max(0, found.start() - _MOST_OF_A_NAME) : found.start()]
    name = _NAME_BACKWARDS.match(before[::-1])
    return name is not None and _is_secret_path(name[0][::-1])


def _end_in_json(text: str, at: int) -> int:
    return _end_of_string(text, at, len(text)) if text[at] == '"' else _end_of(_JSON_WORD, text, at)


def _end_of_told(text: str, at: int) -> int:
    """As this library's own messages show a value: JSON, or one word, with what ends a clause behind it."""
    newline = text.find("\n", at)
    line_end = len(text) if newline < 0 else newline
    first = text[at : at + 1]
    if first in _STRINGS:
        return _end_of_string(text, at, line_end)
    if first in ("[", "{"):
        closed = _CLOSED_BRACKETS.search(text, at, line_end)
        return closed.end() if closed else line_end
    return _end_of(_TOLD_WORD, text, at)


def _end_of_assigned(text: str, at: int) -> int:
    return _end_of_string(text, at, len(text)) if text[at : at + 1] in _STRINGS else _end_of(_ASSIGNED_WORD, text, at)


def _end_of_string(text: str, at: int, otherwise: int) -> int:
    """Where the string that begins here ends; `otherwise` where it is not closed, as in a text that was cut."""
    closed = _STRINGS[text[at]].match(text, at)
    return closed.end() if closed else otherwise


def _end_of(word: re.Pattern[str], text: str, at: int) -> int:
    found = word.match(text, at)
    return found.end() if found else at


@lru_cache(1024)
def _is_secret_path(path: str) -> bool:
    return any(map(_is_secret, path.split(".")))


def _of_environment() -> list[str]:
    """The secrets among the variables, longest first: one may be a part of another."""
    found = {value for name, value in os.environ.items() if len(value) >= _LEAST_LENGTH and _is_secret(name)}
    return sorted(found, key=len, reverse=True)
