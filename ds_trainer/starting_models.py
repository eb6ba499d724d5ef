"""What phases start from and learn from: the recipe's model, what other phases leave, and what a run makes itself.

A run makes a new model where the recipe has a config for one, and a student where a phase asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_trainer.config.recipe import Phase, Recipe, TokenizerSpec
from ds_trainer.files.checkpoint_files import MARKER
from ds_trainer.models.folders import create_folder, folder_hash, train_tokenizer
from ds_trainer.models.student import create_student
from ds_trainer.ranks import distributed
from ds_trainer.tasks.registry import training_texts

MADE = "starting_models"
"""The folder, in that of a run, of the models that the run makes to start from."""
_INITIAL = "initial_model"


@dataclass(frozen=True)
class StartingModels:
    """Folders and hub names by phase; new ones are made in `folder`, on every host that does not see rank 0's.

    `left` is what each phase so far has left, by name, in order. Every rank must ask.
    """

    recipe: Recipe
    folder: Path
    left: dict[str, str] = field(default_factory=dict)

    def start(self, phase: Phase) -> str:
        """What the phase starts from: a model, or the student made of it."""
        source = self._resolved(phase.start_from)
        spec = phase.student
        if spec is None:
            return source
        seed = self.recipe.seed

        def identity() -> list[Any]:
            return [spec.model_dump(), seed, folder_hash(Path(source)) if Path(source).is_dir() else source]

        return self._made(phase.name, identity, lambda target: create_student(spec, source, target, seed))

    def teacher(self, phase: Phase) -> str | None:
        distill = phase.techniques.distill
        return self._resolved(distill.teacher) if distill else None

    def teacher_is_to_come(self, phase: Phase) -> bool:
        """Whether another phase makes the teacher; else it is there from the start."""
        distill = phase.techniques.distill
        return distill is not None and self._is_left_by_a_phase(distill.teacher)

    def _is_left_by_a_phase(self, reference: str) -> bool:
        name = reference.removeprefix("@")
        return reference.startswith("@") and (name in self.left or (name == "previous" and bool(self.left)))

    def _resolved(self, reference: str) -> str:
        if not reference.startswith("@"):
            return reference
        if self._is_left_by_a_phase(reference):
            name = reference.removeprefix("@")
            return self.left[name] if name in self.left else list(self.left.values())[-1]
        return self.recipe.model.name_or_path or self._initial()

    def _initial(self) -> str:
        """The folder of a new model from the recipe's config, its tokenizer trained on the first phase's text."""
        config, seed = self.recipe.model.config, self.recipe.seed
        assert config is not None, "read_job saw to it"
        spec = self.recipe.model.tokenizer or TokenizerSpec()
        task = self.recipe.phases[0].task or self.recipe.task

        def create(target: Path) -> None:
            tokenizer = train_tokenizer(training_texts(task), spec.vocab_size, spec.lowercase)
            create_folder(config, tokenizer, target, seed)

        return self._made(_INITIAL, lambda: [config, spec.model_dump(), task.model_dump(), seed], create)

    def _made(self, name: str, identity: Callable[[], Any], build: Callable[[Path], None]) -> str:
        target = self.folder / name
        distributed.on_each_host(lambda: _make(target, identity(), build))
        return str(target)


class MadeModels(StartingModels):
    """Those of an earlier run: what it made is found, and nothing is made."""

    def _made(self, name: str, identity: Callable[[], Any], build: Callable[[Path], None]) -> str:
        return str(self.folder / name)


def _make(target: Path, identity: Any, build: Callable[[Path], None]) -> None:
    """Build what is not there, not whole, or made of something else; its marker is written last."""
    marker = target / MARKER
    if marker.is_file() and json.loads(marker.read_text(encoding="utf-8")) == identity:
        return
    marker.unlink(missing_ok=True)
    for stale in target.glob("*.safetensors*"):
        stale.unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    build(target)
    marker.write_text(json.dumps(identity), encoding="utf-8")
