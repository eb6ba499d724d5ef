"""The rules of the architecture: imports run one way between packages, and files, functions and packages stay small."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from support.launching import ROOT, run_python

PACKAGE = ROOT / "ds_trainer"
FILES = sorted(PACKAGE.rglob("*.py"))
ORDER = ["ranks", "files", "recipe", "models", "tasks", "techniques", "cuts", "engine", "report", "deploy", "run"]
ORDER += ["tune", "cli"]
"""The packages from the bottom to the top. A package imports only those before it, and itself."""
MOST_LINES = 15_646
"""The lines of code that `ds_trainer/` may have in all. An issue raises it only by what it adds."""


def imports_of(path: Path) -> set[str]:
    """The packages that a file imports, also inside functions and for type checks."""
    packages: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            if module.startswith("ds_trainer."):
                packages.add(module.split(".")[1])
    return packages


def lines_of_code(path: Path) -> int:
    """How many lines of a file hold code: neither blank, nor a comment, nor part of a docstring (a constant's too)."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, node.end_lineno + 1))
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_imports_run_one_way():
    """A module imports only packages below its own, or its own; no module but the public API lies at the root."""
    for path in FILES:
        if path != PACKAGE / "__init__.py":  # which hands on names of all packages, each imported when it is asked for
            package = path.relative_to(PACKAGE).parts[0]
            assert imports_of(path) & {*ORDER} <= {*ORDER[: ORDER.index(package) + 1]}, path


@pytest.mark.parametrize("package", ["run", "engine", "report"])
def test_the_core_names_no_technique(package):
    """What it needs of one is a hook, which a plugin has as well; `scoring.py` runs the exits of a model folder."""
    for path in (PACKAGE / package).rglob("*.py"):
        named = re.findall(r"ds_trainer\.techniques\.(\w+)", path.read_text())
        assert {*named} <= {"registry", "technique"} or path.name == "scoring.py", path


def test_files_and_functions_stay_small():
    """No file has more than 450 lines, no function more than 90, and the `__init__` of a package only a docstring."""
    for path in FILES:
        text = path.read_text()
        tree = ast.parse(text)
        assert text.count("\n") <= 450, path
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert [f.name for f in functions if f.end_lineno - f.lineno + 1 > 90] == [], path
        if path.name == "__init__.py" and path.parent != PACKAGE:
            assert [type(node) for node in tree.body] == [ast.Expr], path


def test_the_library_stays_within_its_size():
    """What the library grows by is a decision, taken here."""
    assert sum(map(lines_of_code, FILES)) <= MOST_LINES


def test_techniques_and_tasks_do_not_know_each_other():
    """No technique imports another one, nor a family of tasks; no family imports another."""
    for kind in ("techniques", "tasks"):
        families = [path for path in (PACKAGE / kind).iterdir() if path.is_dir() and path.name != "__pycache__"]
        for family in families:
            text = "".join(path.read_text() for path in family.rglob("*.py"))
            others = [f"ds_trainer.{kind}.{other.name}." for other in families if other != family]
            others += [
                f"ds_trainer.tasks.{name}."
                for name in ("text", "squad", "lm", "token", "embedding", "rerank")
                if kind == "techniques"
            ]
            assert [other for other in others if other in text] == []


def test_commands_are_checked_without_torch():
    """Importing the package or a module of `cli` loads neither torch nor what loads it, but for plugins, which need it.

    The public names are there before any is used, also for type checkers; another name is an AttributeError.
    """
    own = [path.stem for path in (PACKAGE / "cli").glob("*.py") if path.stem not in ("__init__", "plugins")]
    code = f"import sys, ds_trainer as d; [__import__('ds_trainer.cli.' + name) for name in {own!r}]; "
    code += "print({'torch', 'deepspeed', 'transformers'} & set(sys.modules), 'train' in dir(d), hasattr(d, 'x'))"
    done = run_python("-c", code)
    assert done.stdout.strip() == "set() True False", done.stderr
    assert (PACKAGE / "py.typed").exists()


def test_no_test_module_imports_another():
    """What tests share is in `tests/support`."""
    for path in (ROOT / "tests").rglob("*.py"):
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom | ast.Import)
        ]
        names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert not {name for name in names if name.split(".")[-1].startswith("test_")}, path
