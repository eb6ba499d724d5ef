"""The embedded data: which package does this docstring document?

The texts are the first paragraphs, of 5 to 60 words, of the docstrings of torch, transformers, numpy, deepspeed and the
standard library: real text that every machine has. They are read from the source files, without importing them. The
rows depend on the installed versions alone, and not on where these are installed.
"""

import ast
import contextlib
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
_SKIPPED = {"__pycache__", "_vendor", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages"}
_SKIPPED |= {"dist-packages", "test", "tests", "third_party", "turtledemo", "vendor"}
"""Folders of tests and of other packages."""
_GIVEAWAY = re.compile(
    r"\b\w*(?:deepspeed|hugging ?face|numpy|python|pytorch|torch|transformers|ndarray)\w*\b|\bnp\b",
    re.IGNORECASE,
)
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache(maxsize=1)
def extracted() -> dict[str, list[tuple[str, str]]]:
    """Return (text, package) pairs of the splits "train" and "validation", shuffled.

    All texts of a source file go to the same split, and no text is in both. The result is cached, since the extraction
    takes seconds.
    """
    pairs: dict[str, list[tuple[bytes, str, str]]] = {"train": [], "validation": []}
    gc.disable()  # syntax trees hold no cycles, and once torch is loaded the search for them takes 10 of 16 seconds
    try:
        by_package = {package: list(_package_texts(package)) for package in PACKAGES}
    finally:
        gc.enable()
    owners = Counter(text for texts in by_package.values() for _, text in texts)
    for package, texts in by_package.items():
        for split, text in texts:
            if owners[text] == 1:  # a text of two packages has no right answer
                pairs[split].append((_hash(text), text, package))
    return {split: [(text, package) for _, text, package in sorted(hashed)] for split, hashed in pairs.items()}


def fingerprint(split: str) -> str:
    """Return the installed versions. Hashing thousands of source files would cost as much as the extraction."""
    others = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES if name != "python"]
    return f"docstrings {_VERSION}, {split}: python {platform.python_version()}, {', '.join(others)}"


def _package_texts(package: str) -> Iterator[tuple[str, str]]:
    """Yield (split, text) for at most `CLASS_CAP` distinct texts of a package, its files sorted by their hashes."""
    if package == "python":
        root = Path(sysconfig.get_paths()["stdlib"])
    else:  # this imports nothing, since the package is at the top level
        root = Path(str(getattr(importlib.util.find_spec(package), "origin", ""))).parent
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("test_")]
    seen: set[str] = set()
    for digest, path in sorted((_hash(path.relative_to(root).as_posix()), path) for path in files):
        split = "validation" if digest[-1] < 256 * VALIDATION_SHARE else "train"
        for text in _first_paragraphs(path):
            if text not in seen:
                seen.add(text)
                yield split, text
            if len(seen) == CLASS_CAP:
                return


def _first_paragraphs(path: Path) -> Iterator[str]:
    source = path.read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return
    with warnings.catch_warnings(), contextlib.suppress(SyntaxError, ValueError):
        warnings.simplefilter("ignore")  # about invalid escape sequences in their code
        for node in _documented(ast.parse(source)):
            # the first paragraph in one line; names of packages are masked, since they would give the answer away
            paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            text = _GIVEAWAY.sub("this", paragraph)
            if len(text.split()) in _WORDS:
                yield text


def _documented(node: _Documented) -> Iterator[_Documented]:
    """Yield a module, its classes and functions, and the methods; nothing inside a function or a condition."""
    yield node
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, _Documented):
                yield from _documented(child)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
