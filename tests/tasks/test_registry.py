"""The table of families: what it holds, and that a task from outside needs one entry in it."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any, Literal

import pytest
from support.csv_files import write_csv
from support.launching import run_python
from transformers import BertConfig, BertModel

from ds_trainer.models.folders import train_tokenizer
from ds_trainer.recipe import recipe
from ds_trainer.recipe.task_specs import FAMILIES, Family, TaskBase, TextSpec
from ds_trainer.tasks.registry import build_task, check_data_files, training_texts
from ds_trainer.tasks.task import Task
from ds_trainer.tasks.text.text_task import TextTask


class ReversedSpec(TextSpec):
    """Labelled text, read backwards."""

    name: Literal["reversed"] = "reversed"
    twice: bool = False


class ReversedTask(TextTask):
    """A task of the user's own."""

    def __init__(self, spec: ReversedSpec, tokenizer: Any, source: str | Path, cache_dir: Path) -> None:
        super().__init__(
            TextSpec(**spec.model_dump(exclude={"name", "twice"}), name="text"), tokenizer, source, cache_dir
        )


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    def rebuild() -> None:
        for model in (recipe.TaskParser, recipe.Phase, recipe.Recipe):
            model.model_rebuild(force=True)

    monkeypatch.setitem(FAMILIES, "reversed", Family(ReversedSpec, ReversedTask, names=("reversed",)))
    rebuild()
    yield
    monkeypatch.undo()
    rebuild()


@pytest.mark.usefixtures("_registered")
def test_a_task_from_outside_needs_one_entry(tmp_path: Path) -> None:
    """Its spec is parsed as strictly as any other, in a recipe too, and its task is built and collates."""
    fields = write_csv(tmp_path, [1, 2, 1, 2, 2, 1]).model_dump(exclude={"name"})
    spec = recipe.parse_task({"name": "reversed", "twice": True, **fields})
    assert isinstance(spec, ReversedSpec)
    with pytest.raises(ValueError, match=r'task\.twise: unknown key; did you mean "twice"'):
        recipe.parse_task({"name": "reversed", "twise": True})
    whole = {"task": {"name": "reversed", **fields}, "phases": [{"max_steps": 1}]}
    assert isinstance(recipe.parse_recipe(whole).task, ReversedSpec)
    assert check_data_files(spec) == []
    assert training_texts(spec)[:2] == ["it rains", "it is wet"]
    config = BertConfig(vocab_size=99, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertModel(config).save_pretrained(tmp_path / "model")
    train_tokenizer(["it rains", "why is it so wet"], 90, True).save_pretrained(str(tmp_path / "model"))
    task = build_task(spec, tmp_path / "model", tmp_path / "cache")
    assert isinstance(task, ReversedTask)
    assert task.collate(task.examples("train"), [0, 1]).labels.tolist() == [0, 1]


def test_every_family_is_complete() -> None:
    """Each name of the table can be imported, and no task name selects two families."""
    code = (
        "import pkgutil; from ds_trainer.recipe.task_specs import FAMILIES\n"
        "modules = [pkgutil.resolve_name(entry.data) for entry in FAMILIES.values()]\n"
        "[(each.records, each.training_texts) for each in modules]\n"
        "import sys; print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "set()", done.stderr
    assert all(issubclass(pkgutil.resolve_name(entry.task), Task) for entry in FAMILIES.values())
    names = [name for entry in FAMILIES.values() for name in entry.names]
    assert len(set(names)) == len(names)
    assert all(issubclass(entry.spec, TaskBase) for entry in FAMILIES.values())
