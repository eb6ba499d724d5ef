"""The architecture's own rules: imports run one way, files and functions stay small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from launching import ROOT

PACKAGE = ROOT / "ds_trainer"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each layer may import those after it, and its own.
LAYERS = [
    {"run", "scoring", "benchmark"},
    {"joining"},
    {"checkpoint_model"},
    {"loop", "starting_models"},
    {"student"},
    {
        "engine",
        "numerics",
        "histograms",
        "run_status",
        "export",
        "export_folder",
        "foreign_folders",
        "onnx_file",
        "checkpoint",
        "checkpoint_scores",
        "report",
        "evaluate",
        "objective",
        "optim",
        "exit_evaluation",
        "exit_curves",
        "latency",
        "benchmark_backends",
        "benchmark_page",
        "benchmark_settings",
        "figure",
        "plots",
        "size_plots",
        "report_page",
        "run_files",
        "matrices",
        "serving",
    },
    {"techniques", "tasks"},
    {"shrink"},
    {"flops", "timing", "models", "data", "losses", "compact", "universal", "universal_form", "loading", "memory"},
    {"machine"},
    {"shrunk_model"},
    {"benchmark_command", "evaluate_command", "export_command"},
    {"command"},
    {"task_files"},
    {
        "engine_file",
        "engine_blocks",
        "engine_keys",
        "engine_verdicts",
        "compression_block",
        "exit_command",
        "readers",
        "sources",
        "tabular",
        "squad_file",
        "lm_text",
        "run_folder",
        "checkpoint_files",
        "saved_checkpoint",
        "model_folder",
        "write_places",
        "debugging",
        "hostfile",
        "doctor",
        "doctor_checks",
        "doctor_remote",
        "doctor_probe",
        "doctor_rank",
        "redaction",
        "settings",
    },
    {"recipe", "json_file"},
    {"task_specs", "technique_specs"},
    {"exit_specs", "prune_specs"},
    {"fields", "interrupts", "launcher", "rank_watch", "stopping", "trust", "messages", "whole_file"},
    {"schedules"},
    {"distributed"},
    {"attempts", "failures"},
]
# What checks a command, and all below it, is loaded before torch.
BEFORE_TORCH = tuple(
    sorted(set().union(*LAYERS[LAYERS.index({"benchmark_command", "evaluate_command", "export_command"}) :]))
)


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """The package's modules that a file imports when it is loaded."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        for inner in ast.walk(node) if isinstance(node, ast.ImportFrom | ast.Import) else ():
            if isinstance(inner, ast.ImportFrom) and inner.module and inner.module.startswith("ds_trainer"):
                parts = inner.module.split(".")[1:]
                found |= {parts[0]} if parts else {alias.name for alias in inner.names}
    return found


def rank_of(module: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if module in layer)


@pytest.mark.parametrize(
    "path", [f for f in FILES if f.name != "__init__.py" or f.parent != PACKAGE], ids=lambda p: p.stem
)
def test_imports_run_one_way(path):
    """A module imports only layers below its own, or its own layer."""
    wrong = {other for other in imports_of(path) if rank_of(other) < rank_of(module_of(path))}
    assert wrong == set()


def test_techniques_and_tasks_do_not_know_each_others_members():
    """No technique imports another one or a task family; no task imports a technique. Model folders are everyone's."""
    shared = {"technique", "masked", "selection", "teacher", "teacher_cache", "__init__"}
    shared |= {"exit_policy", "exit_heads", "early_exit"}
    shared |= {"grains", "masks", "decisions", "costs", "plans"}
    for path in (PACKAGE / "techniques").glob("*.py"):
        names = {n.module for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom) and n.module}
        own = {name.rsplit(".", 1)[1] for name in names if name.startswith("ds_trainer.techniques.")}
        if path.stem != "__init__":
            assert own <= shared
        assert {name for name in names if name.startswith("ds_trainer.tasks.")} <= {
            "ds_trainer.tasks.task",
            "ds_trainer.models.pretrained",
        }
    for path in (PACKAGE / "tasks").glob("*.py"):
        assert "ds_trainer.techniques" not in path.read_text()


def test_checks_load_neither_torch_nor_deepspeed():
    """What checks a command can be imported without them."""
    from launching import run_python

    heavy = {"torch", "deepspeed", "transformers"}
    code = f"import sys; [__import__('ds_trainer.' + m) for m in {BEFORE_TORCH!r}]; print({heavy!r} & set(sys.modules))"
    done = run_python("-c", code)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_and_functions_stay_small(path):
    """No file over 450 lines, no function over 60."""
    text = path.read_text()
    assert text.count("\n") <= 450
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    assert [f.name for f in functions if f.end_lineno - f.lineno + 1 > 60] == []
