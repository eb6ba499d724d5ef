"""The embedded data: which package does this docstring document?

First paragraphs, of 5 to 60 words, of the docstrings of torch, transformers, numpy, deepspeed and the standard
library, read from their source files: real text that every machine has. Nothing is imported from them. The rows
depend on the installed versions alone, not on where they are installed.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.text.readers import DOCSTRING_PACKAGES, TextRow, TextRows

CLASS_CAP = 4000
VALIDATION_SHARE = 0.15
_WORDS = range(5, 61)
_VERSION = 1
_NOT_ITS_OWN = {
    "__pycache__", "_vendor", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages",
    "test", "tests", "third_party", "turtledemo", "vendor",
}  # fmt: skip
_GIVEAWAY = re.compile(
    r"\b\w*(?:deepspeed|hugging ?face|numpy|python|pytorch|torch|transformers|ndarray)\w*\b|\bnp\b",
    re.IGNORECASE,
)
_MASK = "this"
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class DocstringSource:
    """Rows of the embedded data, split by file: no file and no text is in both splits."""

    def rows(self, split: str) -> TextRows:
        assert split in ("train", "validation"), split
        return TextRows(list(_extracted()[split]), "docstrings of the installed packages")

    def fingerprint(self, split: str) -> str:
        """The versions installed; reading some thousand source files for a hash would cost as much as the rows."""
        others = [f"{name} {importlib.metadata.version(name)}" for name in DOCSTRING_PACKAGES if name != "python"]
        return f"docstrings {_VERSION}, {split}: python {platform.python_version()}, {', '.join(others)}"


@lru_cache(maxsize=1)
def _extracted() -> dict[str, tuple[TextRow, ...]]:
    """Both splits, shuffled; the tokenizer and two splits ask for them, and it takes seconds."""
    rows: dict[str, list[tuple[bytes, TextRow]]] = {"train": [], "validation": []}
    with _without_garbage_collection():
        texts = {package: list(_package_texts(package)) for package in DOCSTRING_PACKAGES}
    owners = Counter(text for found in texts.values() for _, text in found)
    for package, found in texts.items():
        for split, text in found:
            if owners[text] == 1:  # what two packages say is a question without an answer
                rows[split].append((_hash(text), TextRow((text,), package, 0)))
    return {split: tuple(row for _, row in sorted(hashed)) for split, hashed in rows.items()}


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Syntax trees hold no cycles, and looking for some beside torch and transformers costs 10 of 16 seconds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _package_texts(package: str) -> Iterator[tuple[str, str]]:
    """(split, text): the distinct texts of a package, at most `CLASS_CAP`, its files in the order of their hashes."""
    root = _root(package)
    files = ((_hash(path.relative_to(root).as_posix()), path) for path in _source_files(root))
    seen: set[str] = set()
    for digest, path in sorted(files):
        split = "validation" if digest[-1] < 256 * VALIDATION_SHARE else "train"
        for text in _first_paragraphs(path):
            if text not in seen:
                seen.add(text)
                yield split, text
            if len(seen) == CLASS_CAP:
                return


def _root(package: str) -> Path:
    if package == "python":
        return Path(sysconfig.get_paths()["stdlib"])
    found = importlib.util.find_spec(package)  # of a top-level package: imports nothing
    if found is None or not found.submodule_search_locations:
        raise UserError(f'the task "docstrings" reads the source of {package}, which is not installed')
    return Path(found.submodule_search_locations[0])


def _source_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():
            if path.name not in _NOT_ITS_OWN and not path.is_symlink():
                yield from _source_files(path)
        elif path.suffix == ".py" and not path.name.startswith("test_"):
            yield path


def _first_paragraphs(path: Path) -> Iterator[str]:
    source = path.read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # others' invalid escape sequences
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in _documented(tree):
        text = _normalised(ast.get_docstring(node) or "")
        if len(text.split()) in _WORDS:
            yield text


def _documented(node: _Documented) -> Iterator[_Documented]:
    """The module, its classes and functions, and theirs; not what stands inside a function or a condition."""
    yield node
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, _Documented):
                yield from _documented(child)


def _normalised(docstring: str) -> str:
    """The first paragraph on one line. Names of the packages are masked, or the question would hold its answer."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return _GIVEAWAY.sub(_MASK, paragraph)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
