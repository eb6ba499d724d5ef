"""The models that phases start from and learn from: the recipe's, those of earlier phases, and those made for a run.

A run makes a new model where the recipe has a config for one, and a student or a cut where a phase wants one.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_trainer.cuts.cut import CutResult, check_trained, cut_of, outline_of
from ds_trainer.files.checkpoint_files import MARKER
from ds_trainer.files.reading import content_hash
from ds_trainer.files.writing import write_json
from ds_trainer.models.folders import create_folder, train_tokenizer
from ds_trainer.models.pretrained import identity_of
from ds_trainer.models.student import create_student
from ds_trainer.ranks import distributed
from ds_trainer.recipe.cut_specs import CutSpec
from ds_trainer.recipe.recipe import Phase, Recipe, TokenizerSpec, task_of
from ds_trainer.recipe.technique_specs import Techniques
from ds_trainer.tasks.registry import build_task, training_texts
from ds_trainer.tasks.task import Task

MADE = "starting_models"
"""The folder, in that of a run, of the models that the run makes to start from."""
_INITIAL = "initial_model"


@dataclass
class StartingModels:
    """Gives the model that each phase of a recipe starts from, and its teacher, as folders or hub names.

    A missing model is made in `folder` on rank 0, and again on each host that cannot see rank 0's folder: `start` and
    `techniques` are collective. Take the phases in order, and add the model of each for the later ones.
    """

    recipe: Recipe
    folder: Path
    _of_phases: dict[str, str] = field(default_factory=dict, init=False)

    def add(self, phase: str, model: Path | str) -> None:
        """Let later phases refer to the model of this phase."""
        self._of_phases[phase] = str(model)

    def take_over(self, rehearsed: Path) -> None:
        """Copy the new model of the recipe's config that a rehearsal has made in its folder: it would be the same."""
        made, unmarked = rehearsed / _INITIAL, shutil.ignore_patterns(MARKER)
        if distributed.on_main(made.is_dir):
            self._initial(lambda target: shutil.copytree(made, target, ignore=unmarked, dirs_exist_ok=True))

    def start(self, phase: Phase) -> str:
        """Return the model that the phase starts from, or the student or cut that is made of it."""
        source = self.resolved(phase, phase.start_from)
        if phase.cut is not None:
            return self._cut(phase, phase.cut, source)
        spec, seed = phase.student, self.recipe.seed
        if spec is None:
            return source
        return self._made(
            phase.name,
            lambda: [spec.model_dump(), seed, identity_of(source)],
            lambda target: create_student(spec, source, target, seed),
        )

    def _cut(self, phase: Phase, spec: CutSpec, source: str) -> str:
        """Return the folder of a cut, on which all ranks work together wherever a host lacks it."""
        target, seed = self.folder / phase.name, self.recipe.seed
        task = build_task(task_of(phase, self.recipe), source, self.recipe.cache_dir)
        identity = [spec.model_dump(), seed, identity_of(source), task.key("train"), _token_file_hash(spec)]
        lacking = distributed.numbers_of_all([int(not _is_made(target, identity))])
        if any(count for (count,) in lacking):
            cut = self._cut_folder(phase, task, source, spec)
            self._made(phase.name, lambda: identity, cut.save)
        return str(target)

    def _cut_folder(self, phase: Phase, task: Task, source: str, spec: CutSpec) -> CutResult:
        distributed.info(f"{phase.name}: cutting {source}")
        cut = cut_of(task, source, spec, self.recipe.seed)
        distributed.info(f"{phase.name}: {cut.summary}")
        return cut

    def techniques(self, phase: Phase) -> Techniques:
        """Return the techniques of a phase, with folders or hub names for the models that they name; collective."""
        named = phase.techniques.models.items()
        return phase.techniques.with_models({place: self.resolved(phase, model) for place, model in named})

    def resolved(self, phase: Phase, reference: str) -> str:
        """Return the folder or hub name that a phase's reference such as "@previous" stands for; collective."""
        if not reference.startswith("@"):
            return reference
        earlier = self.recipe.earlier(phase, reference)
        return self._of_phases[earlier.name] if earlier else self.recipe.model.name_or_path or self._initial()

    def _initial(self, create: Callable[[Path], object] | None = None) -> str:
        """Return the folder of a new model of the recipe's config, its tokenizer trained on the first phase's text.

        `create` makes it in another way.
        """
        config, seed = self.recipe.model.config, self.recipe.seed
        assert config is not None, "read_train_job saw to it"
        spec = self.recipe.model.tokenizer or TokenizerSpec()
        task = self.recipe.phases[0].task or self.recipe.task

        def train(target: Path) -> None:
            tokenizer = train_tokenizer(training_texts(task), spec.vocab_size, spec.lowercase)
            create_folder(config, tokenizer, target, seed)

        return self._made(_INITIAL, lambda: [config, spec.model_dump(), task.model_dump(), seed], create or train)

    def _made(self, name: str, identity: Callable[[], Any], build: Callable[[Path], object]) -> str:
        target = self.folder / name
        distributed.on_each_host(lambda: _make(target, identity(), build))
        return str(target)


class RehearsedModels(StartingModels):
    """Makes the models of a rehearsal, when no phase has trained yet: of a cut only about its shape."""

    def _cut_folder(self, phase: Phase, task: Task, source: str, spec: CutSpec) -> CutResult:
        if self.recipe.earlier(phase, phase.start_from) is None:  # otherwise an earlier phase will have trained it
            check_trained(task, source, spec)
        return outline_of(task, source, spec)


class MadeModels(StartingModels):
    """Finds the starting models that a run has made, in its folder, and makes none."""

    def _cut(self, phase: Phase, spec: CutSpec, source: str) -> str:
        return str(self.folder / phase.name)

    def _made(self, name: str, identity: Callable[[], Any], build: Callable[[Path], object]) -> str:
        return str(self.folder / name)


def _make(target: Path, identity: Any, build: Callable[[Path], object]) -> None:
    """Build a model in a folder, unless a whole one of the same identity is there; its marker is written last."""
    if _is_made(target, identity):
        return
    marker = target / MARKER
    marker.unlink(missing_ok=True)
    for stale in target.glob("*.safetensors*"):
        stale.unlink()
    build(target)
    write_json(marker, identity)


def _is_made(target: Path, identity: Any) -> bool:
    marker = target / MARKER
    return marker.is_file() and bool(json.loads(marker.read_text(encoding="utf-8")) == identity)


def _token_file_hash(spec: CutSpec) -> str | None:
    """Return a hash of the file that lists the tokens to keep; None without one."""
    file = spec.vocabulary and spec.vocabulary.file
    return content_hash(file).hex() if file else None
