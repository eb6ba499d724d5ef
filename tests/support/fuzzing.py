"""Broken and hostile input, and the rule for all of it: taken, or refused once in our own words, with exit code 2.

The strategies spoil a sound value or file, so that it gets past the first check.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from ds_trainer.cli.command import run_command

NOISE = re.compile(
    r"<class |Traceback|object at 0x|NoneType|Errno|embedded null|not supported between|unhashable|"
    r"index out of range|invalid literal|PosixPath|errors\.pydantic|KeyError"
)
"""What Python says to programmers, apart from its reasons why a text is no JSON or no UTF-8."""
TIMES = float(os.environ.get("FUZZ_TIMES", "1"))
"""How many times as many inputs as by default; with more than one time they are drawn anew in every run."""

RAW = {"@digits@": "9" * 100_000, "@huge@": "1e400", "@nan@": "NaN", "@python@": "None"}
"""JSON that `json.dumps` does not write, by the text that stands for it."""
TEXTS = ["", "auto", "a\nb", "\u202egnp", "/dev/zero", "/", "../../x", "/etc/passwd", "~nobody/x"]
TEXTS += ["@", "@model", "*", "[", "**", "1e999", "nan", "x" * 300, "x/" * 3000, "x" * 100_000, "%s%n", "<b>", "squad"]
NUMBERS = [0, -1, 1, 3, 2**31, 2**63, 2**64, 10**12, 10**400, -(10**400), -0.0, 0.5, -1.5, 1e-320, 1e308]
OTHERS = [None, True, [], {}, [[]], [None], {"": 1}, {"name": "x"}, [0] * 50, {f"k{n}": n for n in range(30)}]
PIECES = [b"", b"\xff", b"\xef\xbb\xbf", b"\n", b"\r", b"\t", b'"', b"[", b"}", b",", b"nan"]
PIECES += [b"//", b"\xe2\x80\xa8", b"NaN", b"1e999", b"9" * 5000, b"x" * 100_000, b'"' * 5001]
NOISY = st.binary(max_size=200) | st.text(max_size=80).map(lambda text: text.encode(errors="surrogatepass"))


def fuzzed(count: int) -> settings:
    """This number of inputs, the same ones in every run."""
    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    quiet = {"deadline": None, "database": None, "print_blob": False, "suppress_health_check": list(HealthCheck)}
    return settings(max_examples=max(1, int(count * TIMES)), derandomize=TIMES == 1, phases=phases, **quiet)


def refusal(command: Callable[[Sequence[str]], object], arguments: Sequence[str], *names: str) -> str:
    """Run a command, hold the rule, and return its message, "" where the input was taken.

    The message has one of the names, if any are given.
    """
    err, log, started = io.StringIO(), logging.getLogger("ds_trainer"), time.process_time()
    before, log.handlers = (log.handlers[:], log.level, log.propagate), []
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = run_command(lambda words: command(words) and None, arguments)
    except SystemExit as ending:  # --help
        code = ending.code or 0
    finally:
        log.handlers, log.level, log.propagate = before
    assert time.process_time() - started < 5
    assert code in (0, 2), err.getvalue()
    message = err.getvalue()[err.getvalue().index("error: ") :] if code else ""
    assert not NOISE.search(message), message
    assert not names or not code or any(name in message for name in names), f"none of {names}: {message}"
    return message


def values(known: Sequence[str] = ()) -> st.SearchStrategy[Any]:
    """A value for any place of a JSON file; `known` are texts that mean something there."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    any_json = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner))
    return st.one_of(*map(st.sampled_from, (TEXTS, NUMBERS, OTHERS, [*RAW, *known])), any_json).map(copy.deepcopy)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field and element of a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key)
        yield from places(inner, (*path, key))


def as_json(value: Any) -> bytes:
    """The file, with what `json.dumps` does not write put in."""
    text = json.dumps(value)
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text.encode(errors="surrogatepass")


@st.composite
def spoilt_json(draw: st.DrawFn, value: Any, known: Sequence[str] = ()) -> bytes:
    """A JSON file with one to three places changed, and sometimes its text too."""
    root = [copy.deepcopy(value)]
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from([*places(root)] or [(0,)]))
        owner: Any = root
        for part in way:
            owner = owner[part]
        change = draw(st.sampled_from(["replace", "replace", "drop", "wrap", "rename"]))
        if change == "drop" and way:
            del owner[last]
        elif change == "wrap":
            owner[last] = draw(st.sampled_from([[owner[last]], {"name": owner[last]}, str(owner[last])]))
        elif change == "rename" and isinstance(owner, dict):
            owner[draw(st.sampled_from([*known, *TEXTS]))] = owner.pop(last)
        else:
            owner[last] = draw(values(known))
    return draw(st.just(as_json(root[0])) | spoilt_bytes(as_json(root[0])))


@st.composite
def spoilt_bytes(draw: st.DrawFn, raw: bytes) -> bytes:
    """A file that is cut, doubled, with pieces put in or taken out, or saved in another encoding."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(raw)))
        end = start + draw(st.sampled_from([0, 0, 1, 5, 40, len(raw)]))
        raw = raw[:start] + draw(st.sampled_from([*PIECES, raw[start:end] * 2]) | NOISY) + raw[end:]
    encoding = draw(st.sampled_from([*["utf-8"] * 9, "utf-16", "utf-16-le", "latin-1", "utf-8-sig", "cp500"]))
    return raw if encoding == "utf-8" else raw.decode("utf-8", "replace").encode(encoding, "replace")
