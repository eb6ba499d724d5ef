"""Broken and hostile input, and the rule for all of it: taken, or told once in a short message, with exit code 2.

`Rule.outcome` runs one input and holds the rule. The strategies give JSON values, files and command lines that are
wrong in every way that came to mind; each is made of a sound one, so that it gets past the first check.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from ds_trainer.cli.command import run_command

MOST_CHARACTERS = 4000
"""Of a message: the user is to read it, whatever stands in the file."""
MOST_SECONDS = 5.0
"""Of the processor's time, for one input."""
HANGING = 60
"""Seconds after which an input hangs."""
NOISE = re.compile(
    r"<class |Traceback|object at 0x|NoneType|Errno|embedded null|not supported between|unhashable|"
    r"index out of range|invalid literal|PosixPath|errors\.pydantic|KeyError"
)
"""What Python says to programmers, apart from its reasons why a text is no JSON or no UTF-8."""

EXAMPLES = float(os.environ.get("FUZZ_TIMES", "1"))
"""How many times as many inputs as by default; with more than one time they are drawn anew in every run."""


def fuzzed(count: int) -> settings:
    """So many inputs, the same ones in every run."""
    return settings(
        max_examples=max(1, int(count * EXAMPLES)),
        derandomize=EXAMPLES == 1,
        deadline=None,
        database=None,
        print_blob=False,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def skip_unless_whole(request: pytest.FixtureRequest) -> None:
    """Skip a test that counts what the others of its module did, where only some of them are run."""
    run = {getattr(item, "originalname", "") for item in request.session.items if item.path == request.path}
    if missing := {name for name in vars(request.module) if name.startswith("test_")} - run:
        pytest.skip(f"{len(missing)} of the tests whose inputs are counted are not run")


class _HangsError(BaseException):
    """Not an Exception, so that nobody catches it on the way."""


class Rule:
    """Runs inputs, holds the rule for each, and counts them: `taken`, `told`."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.told: Counter[str] = Counter()

    def outcome(
        self, kind: str, command: Callable[[Sequence[str]], object], arguments: Sequence[str], *names: str
    ) -> str:
        """Return the message about an input, "" where it was taken; it must hold one of the names, if any are given."""
        err, started = io.StringIO(), time.process_time()
        with _must_end(), _own_log(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            try:
                code = run_command(lambda words: command(words) and None, arguments)
            except SystemExit as ending:  # --help
                code = ending.code or 0
        seconds = time.process_time() - started
        assert seconds < MOST_SECONDS, f"{seconds:.1f} s"
        assert code in (0, 2), err.getvalue()
        if code == 0:
            self.taken[kind] += 1
            return ""
        self.told[kind] += 1
        message = err.getvalue()[err.getvalue().index("error: ") :]
        assert len(message) < MOST_CHARACTERS, f"{len(message)} characters: {message[:300]}"
        assert not NOISE.search(message), message
        assert not names or any(name in message for name in names), f"none of {names}: {message}"
        return message


@contextlib.contextmanager
def _own_log() -> Iterator[None]:
    """A command sets up the library's log for a process of its own: leave it to the next test as it was."""
    log = logging.getLogger("ds_trainer")
    before = (log.handlers[:], log.level, log.propagate)
    log.handlers = []
    try:
        yield
    finally:
        log.handlers, log.level, log.propagate = before


@contextlib.contextmanager
def _must_end() -> Iterator[None]:
    def stop(_signal: int, _frame: Any) -> None:
        raise _HangsError(f"still running after {HANGING} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANGING)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# What a process does to the file system, by Python's own audit events

_WRITES = {
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod"),
    *("shutil.rmtree", "shutil.move", "shutil.copyfile", "subprocess.Popen", "os.system", "socket.connect"),
}
_watched: list[list[str]] = []


def _audit(event: str, details: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event == "open":
        path, _, flags = details
        wrote = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        # an import on the way may write its bytecode
        if not wrote or not isinstance(path, str | bytes) or "__pycache__" in os.fsdecode(path):
            return
    elif event not in _WRITES:
        return
    place = details[0]
    name = os.path.abspath(os.fsdecode(place)) if isinstance(place, str | bytes | os.PathLike) else repr(place)
    if "__pycache__" not in name:
        _watched[-1].append(name)


sys.addaudithook(_audit)


@contextlib.contextmanager
def written() -> Iterator[list[str]]:
    """The absolute path of all that is written, made, moved or deleted meanwhile; processes and connections, too."""
    _watched.append([])
    try:
        yield _watched[-1]
    finally:
        _watched.pop()


# Values

RAW = {"@deep@": "[" * 10_000 + "]" * 10_000, "@deeper@": '{"a":' * 10_000 + "1" + "}" * 10_000, "@cut@": '"'}
RAW |= {"@half deep@": "[" * 400 + "]" * 400, "@digits@": "9" * 100_000, "@huge@": "1e400", "@nan@": "NaN"}
RAW |= {"@infinity@": "-Infinity", "@half a pair@": '"\\ud800"', "@python@": "None", "@no quotes@": "text, no quotes"}
"""JSON that `json.dumps` does not write, by the text that stands for it."""

TEXTS = ["", " ", "a", "auto", "\x00", "a\nb", "\u202egnp", "\ud800", "e\u0301", "\ufeff", "/dev/zero", "/", "../../x"]
TEXTS += ["/etc/passwd", "~nobody-of-that-name/x", "@", "@model", "@previous", "*", "[", "**", "?", "1e999", "nan"]
TEXTS += ["null", "x" * 300, "x/" * 3000, "x" * 100_000, "{}", "%s%n", "${HOME}", "<b>", "text", "squad", "mlm", "true"]
NUMBERS = [
    *(0, -1, 1, 2, 3, 7, 2**31, 2**63, 2**64, 10**12, 10**18, 10**400, -(10**400), 10**4000),
    *(0.0, -0.0, 0.5, 1.0, -1.5, 1e-320, 1e308, -1e308, 1e18),
]
OTHERS = [
    *(None, True, False, [], {}, [[]], [None], [0], [{}], ["x"], {"": 1}, {"name": "x"}, {"a": {"b": {"c": 1}}}),
    *([0] * 5000, ["x" * 50] * 500, {f"k{n}": n for n in range(3000)}, list(range(1, 3000))),
]


def values(known: Sequence[str] = ()) -> st.SearchStrategy[Any]:
    """A value for any place of a JSON file; `known` are texts that mean something there."""
    any_json = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([*known, "x"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*known, "x"]), inner, max_size=3),
        max_leaves=6,
    )
    known = [*known, "x"]
    fixed = (TEXTS, NUMBERS, OTHERS, list(RAW), known)
    return st.one_of(*map(st.sampled_from, fixed), any_json).map(copy.deepcopy)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from _places(inner, (*path, key))


def _spoil(data: st.DataObject, root: list[Any], known: Sequence[str]) -> None:
    """Change one place of the only value of `root`."""
    places = [place for place in _places(root) if place]
    *way, last = data.draw(st.sampled_from(places), "place")
    owner: Any = root
    for part in way:
        owner = owner[part]
    found = owner[last]
    change = data.draw(st.sampled_from(["replace", "replace", "drop", "twice", "wrap", "retype", "add", "rename"]))
    if change == "replace":
        owner[last] = data.draw(values(known), "value")
    elif change == "drop" and owner is not root:
        del owner[last]
    elif change == "twice" and isinstance(owner, list) and owner is not root:
        owner.insert(last, copy.deepcopy(found))
    elif change == "wrap":
        owner[last] = data.draw(st.sampled_from([[found], {"name": found}, {last: found}, [found, found]]))
    elif change == "retype":
        owner[last] = _retyped(found)
    elif change == "add" and isinstance(found, dict):
        found[data.draw(st.sampled_from([*known, *TEXTS]), "key")] = data.draw(values(known), "value")
    elif change == "rename" and isinstance(owner, dict):
        owner[data.draw(st.sampled_from([*known, *TEXTS]), "key")] = owner.pop(last)


def _retyped(value: Any) -> Any:
    if isinstance(value, dict):
        return [[key, inner] for key, inner in value.items()]
    if isinstance(value, list):
        return dict(enumerate(map(str, value)))
    return [value] if isinstance(value, str) else str(value)


def spoilt(data: st.DataObject, value: Any, known: Sequence[str] = ()) -> Any:
    """A copy with one to three places changed."""
    root = [copy.deepcopy(value)]
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        _spoil(data, root, known)
    return root[0]


def as_json(value: Any, indent: int | None = None, ascii_only: bool = True) -> str:
    """The text, with what JSON cannot say put in."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text


def json_bytes(data: st.DataObject, value: Any, known: Sequence[str] = ()) -> bytes:
    """A JSON file: some of its values spoilt, or its text, or both; one in ten is not made of it at all."""
    how = data.draw(st.sampled_from(["values"] * 5 + ["bytes"] * 3 + ["both", "random"]), "how")
    if how == "random":
        return data.draw(noise(), "bytes")
    value = spoilt(data, value, known) if how in ("values", "both") else value
    raw = as_json(value, data.draw(st.sampled_from([None, 2])), data.draw(st.booleans())).encode(errors="surrogatepass")
    return spoilt_bytes(data, raw) if how in ("bytes", "both") else raw


# Bytes

PIECES = [b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf0\x9f", b"\xef\xbb\xbf", b"\n", b"\r\n", b"\t", b'"', b"'"]
PIECES += [
    b"[",
    b"]",
    b"{",
    b"}",
    b":",
    b",",
    b"\\",
    b"\\u",
    b"//",
    b"/*",
    b"#",
    b"'''",
    b"\x0c",
    b"\xe2\x80\xa8",
    b"NaN",
]
PIECES += [b"-", b"9" * 5000, b"[" * 10_000, b'{"a":' * 10_000, b"x" * 100_000, b'"a":1,"a":2,', b"\n" * 5000, b"1e400"]
PIECES += [b'"' * 5001, b"PAR1", b"\x1f\x8b"]


def noise() -> st.SearchStrategy[bytes]:
    """Bytes that were never a file of ours."""
    return st.binary(max_size=200) | st.text(max_size=80).map(lambda text: text.encode(errors="surrogatepass"))


def spoilt_bytes(data: st.DataObject, raw: bytes) -> bytes:
    """Cut, doubled, with pieces put in, or saved in another encoding."""
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        at = data.draw(st.integers(0, max(0, len(raw))), "at")
        to = min(len(raw), at + data.draw(st.sampled_from([1, 2, 5, 40, 400]), "length"))
        change = data.draw(st.sampled_from(["cut", "drop", "twice", "put", "put", "replace", "encoding", "lines"]))
        piece = data.draw(st.sampled_from(PIECES) | noise(), "piece") if change in ("put", "replace") else b""
        if change == "cut":
            raw = raw[:at]
        elif change == "drop":
            raw = raw[:at] + raw[to:]
        elif change == "twice":
            raw = raw[:to] + raw[at:]
        elif change in ("put", "replace"):
            raw = raw[:at] + piece + raw[to if change == "replace" else at :]
        elif change == "encoding":
            name = data.draw(st.sampled_from(["utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig", "cp500"]))
            raw = raw.decode("utf-8", "replace").encode(name, "replace")
        else:
            raw = raw.replace(b"\n", data.draw(st.sampled_from([b"\r\n", b"\r", b"\n\n", b" ", b"\xc2\x85"])))
    return raw


# Files that are none

ODD_FILES = ["empty", "folder", "fifo", "/dev/zero", "/dev/null", "dangling", "loop", "to a fifo", "vast", "gone"]


def odd_file(place: Path, kind: str) -> Path:
    """Make what stands in place of a file: none of it may be read, or not whole."""
    if kind == "empty":
        place.write_bytes(b"")
    elif kind == "folder":
        place.mkdir()
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "to a fifo":
        os.mkfifo(place.with_name("pipe"))
        place.symlink_to("pipe")
    elif kind == "loop":
        place.symlink_to(place.name)
    elif kind == "vast":  # takes no room on disk
        with place.open("wb") as file:
            file.truncate(2**43)
    elif kind != "gone":
        place.symlink_to("nowhere" if kind == "dangling" else kind)
    return place


ODD_NAMES = ["x" * 300, "x/" * 3000, "a\nb", "../..", ".", "", "\ud800", "a\x00b", "~nobody-of-that-name", "\x1b[31m"]
"""Names of files and folders, as a recipe may give them."""


def for_a_command_line(text: str) -> str:
    """As the system hands it over: no NUL, and of surrogates only those that stand for bytes."""
    return os.fsdecode(text.replace("\0", "").encode("utf-8", "replace"))
