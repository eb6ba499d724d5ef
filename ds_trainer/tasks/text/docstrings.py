"""The embedded data: which package does this docstring document?

First paragraphs, of 5 to 60 words, of the docstrings of torch, transformers, numpy, deepspeed and the standard
library, read from their source files: real text that every machine has. Nothing is imported from them. The rows
depend on the installed versions alone, not on where they are installed.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

PACKAGES = ("deepspeed", "numpy", "python", "torch", "transformers")
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
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache(maxsize=1)
def extracted() -> dict[str, list[tuple[str, str]]]:
    """Return (text, package) pairs of the splits "train" and "validation", shuffled.

    The splits are parted by file: no file and no text is in both. Extraction takes seconds, so that it is done once.
    """
    pairs: dict[str, list[tuple[bytes, str, str]]] = {"train": [], "validation": []}
    gc.disable()  # syntax trees hold no cycles, and looking for some costs 10 of 16 seconds beside torch
    try:
        by_package = {package: list(_package_texts(package)) for package in PACKAGES}
    finally:
        gc.enable()
    owners = Counter(text for texts in by_package.values() for _, text in texts)
    for package, texts in by_package.items():
        for split, text in texts:
            if owners[text] == 1:  # a text of two packages would be a question without an answer
                pairs[split].append((_hash(text), text, package))
    return {split: [(text, package) for _, text, package in sorted(hashed)] for split, hashed in pairs.items()}


def fingerprint(split: str) -> str:
    """Return the installed versions: reading thousands of source files for a hash would cost as much as the rows."""
    others = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES if name != "python"]
    return f"docstrings {_VERSION}, {split}: python {platform.python_version()}, {', '.join(others)}"


def _package_texts(package: str) -> Iterator[tuple[str, str]]:
    """Yield (split, text): at most `CLASS_CAP` distinct texts of a package, its files in the order of their hashes."""
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
    spec = importlib.util.find_spec(package)  # of a top-level package: imports nothing
    folders = spec and spec.submodule_search_locations
    assert folders, "this library depends on all of them"
    return Path(folders[0])


def _source_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_ITS_OWN]
        yield from (Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("test_"))


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
        # the first paragraph on one line, the packages' names masked: the question would hold its answer
        paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        text = _GIVEAWAY.sub("this", paragraph)
        if len(text.split()) in _WORDS:
            yield text


def _documented(node: _Documented) -> Iterator[_Documented]:
    """Yield the module, its classes and functions, and theirs; not those inside a function or a condition."""
    yield node
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, _Documented):
                yield from _documented(child)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
