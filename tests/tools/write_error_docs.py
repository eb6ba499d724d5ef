"""Write docs/errors.md: every message with an exit code, read from the sources, which are parsed and not run.

A message is the text of an error of `ranks/failures.py`, or one of the `mistakes` that a command raises together. Where
it is made elsewhere, it is looked up: in the values of a name, in the parts of a list, in what a function returns.

python tests/tools/write_error_docs.py
"""

import ast
import pathlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from ds_trainer.ranks import failures

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errors.md"
CURES = {
    "0": "",
    "1": "Read the end of the traceback. Errors of the disk, or of permissions, have one line and no traceback.",
    "2": "Change what the message names. Most mistakes are found before anything is trained, and all of them at once.",
    "3": "Change what the message names, and give `--resume`, which goes on from the last checkpoint.",
    "4": "Look after the rank and the host that the message names, and give `--resume`.",
    "5": "Give `--resume`, which goes on at the same step.",
    "6": "Take the cure that the message names, and give `--resume`.",
    "7": "The message has the reason of every candidate.",
    "128 + n": "Give `--resume`: the steps after the last checkpoint are lost.",
}
HEAD = """# Every message with an exit code

`tests/tools/write_error_docs.py` writes this page from the sources. Search it for a piece of your message in which
there is no name and no number of yours: here `...` stands for these. A message that is made of several parts is listed
by its parts. What is said of single keys of an engine file is in [engine_files.md](engine_files.md); messages of
Python, torch, pydantic and DeepSpeed are not listed.

| exit code | meaning | what to do |
|---|---|---|
"""
CODES = {name: kind.exit_code for name, kind in vars(failures).items() if hasattr(kind, "exit_code")}
CODES |= dict.fromkeys(("DamagedCheckpointError", "NothingToCutError", "ShrunkSizesError", "ArgumentTypeError"), 2)
"""The exit code of each error: those of `failures.py`, and those that are a `UserError` or become one."""
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "ds_trainer").rglob("*.py"))}
PLACES = {node: path for path, tree in TREES.items() for node in ast.walk(tree)}
FUNCTIONS = defaultdict(list)
for function in (node for node in PLACES if isinstance(node, ast.FunctionDef)):
    FUNCTIONS[function.name].append(function)
PASSING = ("join", "fromkeys", "list", "Mistakes", "values")
"""Calls whose texts are those of their arguments, or of the object whose method they are."""


@cache
def below(function: ast.AST) -> list[ast.AST]:
    return list(ast.walk(function))


def rendered(node: ast.expr) -> str:
    """Return a text with three dots in place of each value."""
    if isinstance(node, ast.BinOp):
        return rendered(node.left) + rendered(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(rendered, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "..."


def values_of(name: str, scope: ast.AST) -> Iterator[ast.AST | None]:
    """Yield what a function assigns, adds or appends to a name."""
    for node in below(scope):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(getattr(getattr(target, "value", target), "id", "") == name for target in targets):
                yield node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            yield from node.args if getattr(node.func.value, "id", "") == name else ()


def results_of(function: ast.AST) -> Iterator[ast.AST | None]:
    """Yield what a function returns or yields."""
    for node in below(function):
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
            yield node.value


def texts(node: ast.AST | None, scope: ast.AST, depth: int = 0) -> Iterator[ast.expr]:
    """Yield the texts that an expression, in the function `scope`, may be made of."""
    if depth > 12 or node is None:
        return
    parts: list[ast.AST | None] = []
    is_text = isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and any(map(str.isalpha, rendered(node)))
    if is_text:
        yield node
    if isinstance(node, ast.JoinedStr):
        parts = [value.value for value in node.values if isinstance(value, ast.FormattedValue)]
    elif isinstance(node, ast.BinOp) and not is_text:
        parts = [node.left, node.right]
    elif isinstance(node, ast.IfExp):
        parts = [node.body, node.orelse]
    elif isinstance(node, ast.BoolOp):
        parts = [*node.values]
    elif isinstance(node, ast.List | ast.Tuple):
        parts = [*node.elts]
    elif isinstance(node, ast.Starred):
        parts = [node.value]
    elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp):
        parts = [getattr(node, "elt", None) or node.value]
    elif isinstance(node, ast.Name):
        parts = [*values_of(node.id, scope)]
    elif isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        known = [] if name in PASSING else FUNCTIONS.get(name, [])
        own = [function for function in known if PLACES[function] == PLACES[node]]
        for function in own or known:
            for result in results_of(function):
                yield from texts(result, function, depth + 1)
        parts = [getattr(node.func, "value", None), *node.args] if name in PASSING else []
    for part in parts:
        yield from texts(part, scope, depth + 1)


def messages() -> Iterator[tuple[int, ast.expr]]:
    """Yield every text with its exit code, some more than once."""
    for function in (function for functions in FUNCTIONS.values() for function in functions):
        for node in below(function):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in CODES:
                    yield from ((CODES[name], text) for text in texts(node.args[0], function))
        mistakes = [*values_of("mistakes", function), *(results_of(function) if "mistake" in function.name else ())]
        yield from ((2, text) for value in mistakes for text in texts(value, function))


def page() -> str:
    """Return the page: the table of exit codes, then the messages by code and by file, in the order of the lines."""
    rows = [line.strip("| ").split(" | ") for line in (failures.__doc__ or "").splitlines() if " | " in line][1:]
    lines = [HEAD + "\n".join(f"| {code} | {meaning} | {CURES[code]} |" for code, meaning in rows)]
    listed = defaultdict(set)
    for code, node in messages():
        text = rendered(node).strip().replace("\n", " / ")
        if sum(map(str.isalpha, text)) > 8 and " " in text:
            listed[code, PLACES[node]].add((node.lineno, text))
    previous = None
    for code, path in sorted(listed):
        lines += [f"\n## Exit code {code}"] * (code != previous) + [f"\n### {path.relative_to(ROOT)}\n"]
        texts_of_file = dict.fromkeys(text for _, text in sorted(listed[code, path]))
        lines += [f"- `` {text} ``" if "`" in text else f"- `{text}`" for text in texts_of_file]
        previous = code
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
