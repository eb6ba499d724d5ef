"""Make the model folder of a checkpoint: the one that its run would have exported at that step.

No engine is started: it would need the ranks and the precision of the run, only to return weights that the files hold
as well. The weights are read from the files, and exported as at the end of a run (`deploy/export.py`), so that the
folder has the same bits for every ZeRO stage and number of ranks. One process does all of it.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_trainer.deploy.export import export_state_dict
from ds_trainer.engine.saved_states import weights_of
from ds_trainer.files.checkpoint_files import DamagedCheckpointError, damage_of
from ds_trainer.files.run_folder import kept_from_runs
from ds_trainer.models.folders import model_mistakes
from ds_trainer.ranks.failures import UserError, raise_mistakes
from ds_trainer.ranks.joining import silence_transformers
from ds_trainer.ranks.stopping import leaving
from ds_trainer.recipe.jobs import DTYPES
from ds_trainer.recipe.saved_checkpoint import SavedCheckpoint
from ds_trainer.recipe.schedules import steps_of
from ds_trainer.recipe.technique_specs import Techniques
from ds_trainer.recipe.trust import trust_in_force
from ds_trainer.run.phase import PhaseModel
from ds_trainer.run.starting_models import MADE, MadeModels
from ds_trainer.tasks.registry import build_task
from ds_trainer.techniques.registry import build_techniques
from ds_trainer.techniques.technique import PhaseLength, Technique


@contextlib.contextmanager
def model_of(saved: SavedCheckpoint, cache_dir: str | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Make the model folder of a checkpoint for as long as the context lasts; yield it and the export's report."""
    silence_transformers()
    with leaving(), tempfile.TemporaryDirectory(prefix="ds_trainer-") as aside:
        folder = Path(aside, saved.path.name)
        yield folder, export_checkpoint(saved, cache_dir, folder)


def export_checkpoint(saved: SavedCheckpoint, cache_dir: str | None, folder: Path) -> dict[str, Any]:
    """Write the model folder that the run would have exported at the checkpoint's step; return the export's report.

    Raises UserError where the checkpoint is damaged, a run is writing beside it, or the model that its phase started
    from is missing.
    """
    phase, state = saved.phase, saved.position
    step, total, identity = state["step"], state["total"], state["identity"]
    with kept_from_runs(saved.run):
        if damage := damage_of(saved.path, saved.sums):
            raise DamagedCheckpointError(f"{saved.path} is damaged ({damage}): use another checkpoint")
        source, techniques = _start_and_techniques(saved)
        task = build_task(saved.task, source, cache_dir)
        length = PhaseLength(total, steps_of(phase.warmup_steps or 0, total), identity["the seed"])
        built = PhaseModel(phase, techniques, task, source, length)
        weights = weights_of(saved.path, getattr(torch, DTYPES[identity["the precision"]]))

        def rebuild() -> tuple[nn.Module, list[Technique]]:
            """Rebuild the model of the phase; the weights of the checkpoint must have its names and shapes."""
            model, attached = built.rebuild(state["techniques"])
            shapes, saved_shapes = (
                {name: value.shape for name, value in w.items()} for w in (model.state_dict(), weights)
            )
            different = sorted(name for name in {*shapes, *saved_shapes} if shapes.get(name) != saved_shapes.get(name))
            if different:
                raise UserError(
                    f"the weights of {saved.path} do not go into the model that {source} gives for the task "
                    f"{task.spec.name}: {', '.join(different[:4])} differ; the phase started from another model, or "
                    f"the task is another one"
                )
            return model, attached

        results = export_state_dict(weights, rebuild, task, step, folder, phase.shrink)
    for technique in build_techniques(techniques, length, task):
        technique.after_export(folder, phase.per_device_eval_batch_size)
    return results


def _start_and_techniques(saved: SavedCheckpoint) -> tuple[str, Techniques]:
    """Return the model that the phase started from, and its techniques with the folders of the models that they name.

    The configs and tokenizers of all these models are needed again.
    """
    models = MadeModels(saved.recipe, saved.run / MADE)
    for phase in saved.recipe.phases[: saved.recipe.phases.index(saved.phase)]:
        models.add(phase.name, saved.run / phase.name / "model")
    source, techniques = models.start(saved.phase), models.techniques(saved.phase)
    needed = {"the model at the start": source}
    needed |= {f"the {field} of {name}": model for (name, field), model in techniques.models.items()}
    mistakes = [
        f"{saved.path}: {role} of the phase {saved.phase.name} cannot be loaded, and its config and tokenizer are "
        f"needed: {mistake}"
        for role, model in needed.items()
        for mistake in model_mistakes(model, trust_in_force())
    ]
    raise_mistakes(mistakes)
    return source, techniques
