"""Make of a model folder what is deployed: shrink or cut it, write it as ONNX, int8 ONNX or compact, each checked.

Everything is written aside and takes its place once it is whole and its numbers agree, so that an error leaves nothing
behind. Exit heads are no part of an .onnx file, which holds the plain model.
"""

import copy
import shutil
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_trainer.cuts.cut import cut_of, outline_of
from ds_trainer.deploy import onnx_file
from ds_trainer.deploy.card import write_export_card
from ds_trainer.deploy.export import check_same, cut_as_trained, tolerance_in
from ds_trainer.deploy.measuring import bytes_on_disk, sample_inputs
from ds_trainer.files.reading import read_object
from ds_trainer.files.writing import existing_above, move_files, write_json
from ds_trainer.models import pretrained
from ds_trainer.models.compact import unpack_compact, write_compact_folder
from ds_trainer.models.folders import COMPACT_FILE, as_user_error, save_folder
from ds_trainer.models.layers import FIELD, count_weights, total_weights
from ds_trainer.models.sentence_files import copy_sentence_files
from ds_trainer.models.shrink import shrink
from ds_trainer.models.shrunk_model import whole_class
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.ranks.joining import silence_transformers
from ds_trainer.ranks.stopping import held_back, leaving
from ds_trainer.recipe.exit_specs import EXITS_FILE
from ds_trainer.recipe.jobs import EXPORT_REPORT, INT8_FILE, ONNX_FILE, REPLACED, WEIGHTS, ExportJob
from ds_trainer.tasks.evaluation import evaluate, score_folder
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Task
from ds_trainer.techniques.exits.early_exit import HEADS_FILE, has_exits

_SEED = 42
"""Draws the examples of a cut, as the default seed of a recipe does."""


def export_folder(job: ExportJob) -> dict[str, Any]:
    """Write what a job asks for, and return its report, which is in `export.json` too; UserError where that fails."""
    silence_transformers()
    with leaving():
        with as_user_error(f"the output folder {job.output} cannot be written"):  # on its disk: files are moved there
            temporary = tempfile.TemporaryDirectory(prefix=".export.", suffix=".tmp", dir=existing_above(job.output))
        with temporary as name:
            made = Path(name, "made")
            made.mkdir()
            source = job.checkpoint.path if job.checkpoint else job.model
            report = {"folder": str(source), **_written(job, made, Path(name)), **_earlier(job)}
            write_json(made / EXPORT_REPORT, report)
            with held_back():  # no signal may end the command between the removal of the old model and the new one
                _put_in_place(made, job)
                with distributed.as_warning("the export has no card"):
                    write_export_card(job, report)
    return report


def _earlier(job: ExportJob) -> dict[str, Any]:
    """Return the report that lies in the folder, of how its model was made: that of the .onnx files keeps it."""
    if not (job.adds_onnx and (job.output / EXPORT_REPORT).exists()):
        return {}
    report = read_object(job.output / EXPORT_REPORT)
    return {"earlier": report.get("earlier", report)}


def _put_in_place(made: Path, job: ExportJob) -> None:
    """Delete the old model, its weights first, and move the new one there, its weights last: a mixture never loads."""

    def among(path: Path, patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(path.name, pattern) for pattern in patterns)

    job.output.mkdir(parents=True, exist_ok=True)
    replaced = (ONNX_FILE, INT8_FILE) if job.adds_onnx else REPLACED
    old = [path for path in job.output.iterdir() if path.is_file() and among(path, replaced)]
    for path in sorted(old, key=lambda path: not among(path, WEIGHTS)):
        path.unlink()
    move_files(made, job.output, key=lambda path: among(path, WEIGHTS))


def _written(job: ExportJob, made: Path, aside: Path) -> dict[str, Any]:
    """Write the files of a job into `made`, compare them with their source and score them; returns the report.

    `aside` is a folder for temporary files.
    """
    if job.unpack:
        unpack_compact(job.model, made)
        copy_sentence_files(job.model, made)
        return {"unpacked": count_weights(pretrained.load_trained(made))["model"]}
    report: dict[str, Any] = {}
    scores: dict[str, Any] = {}
    if job.cut:
        report["cut"], scores["model"] = _cut(job, aside / "cut")
        job = job.model_copy(update={"model": aside / "cut"})
    model, tokenizer = _load(job.model)
    pretrained.check_fits(model, tokenizer, max_seq_length=1)
    task = build_task(job.task, job.model, job.cache_dir) if job.task else None
    if task:
        scores["cut" if job.cut else "model"] = score_folder(task, job.model, job.batch_size).scores
    batches = [*sample_inputs(model), *(_batches_of(task) if task else [])]
    if job.checkpoint:
        step = {"phase": job.checkpoint.phase.name, "step": job.checkpoint.position["step"]}
        report["checkpoint"] = step | {"weights": total_weights(model)}
    folder = job.model
    if job.plain:
        shutil.copytree(folder, made, dirs_exist_ok=True)
    if job.shrink:
        folder = aside / "shrunk" if job.compact else made
        model, report["shrunk"] = _shrunk(job.model, model, batches, folder)
    if job.compact:
        written = write_compact_folder(folder, model, made)
        written["bytes"]["folder"] = bytes_on_disk(job.model)
        compared = onnx_file.compare(model, onnx_file.by_torch(_load(made)[0]), batches)
        report["compact"] = {"file": COMPACT_FILE, **written, **compared}
        if task:
            scores["compact"] = score_folder(task, made, job.batch_size).scores
    if job.onnx:
        if has_exits(job.model):
            distributed.warn(
                f"{job.model} has exit heads: the .onnx file holds the plain model, which never exits early"
            )
        if job.compact:
            distributed.warn(f"{ONNX_FILE} holds the weights as they were before they were made compact")
        small = made / INT8_FILE if job.quantize else None
        report |= onnx_file.write_checked(model, batches, made / ONNX_FILE, small, torch.get_num_threads())
        if not (job.writes_folder or job.adds_onnx):
            _write_beside_onnx(job, model, task, made)
        for name in ("onnx", "int8"):
            if task and name in report:
                opened = onnx_file.session(made / report[name]["file"], torch.get_num_threads())
                scores[name] = evaluate(onnx_file.predictor(opened), task, job.batch_size).scores
    if (made / "config.json").exists():
        copy_sentence_files(job.model, made)
    return report | ({"scores": scores} if task else {})


def _load(folder: Path) -> tuple[Any, Any]:
    """Load model and tokenizer, with a padding token where they have none."""
    model, tokenizer = pretrained.load_trained(folder).eval(), pretrained.load_tokenizer(folder)
    pretrained.set_padding(model, pretrained.pad_token_id(tokenizer))  # which gives the tokenizer such a token, too
    return model, tokenizer


def _cut(job: ExportJob, folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Cut the job's model into a folder; return the cut's report, and the scores before."""
    if has_exits(job.model):
        raise UserError(
            f"--cut: {job.model} has exit heads, which were trained on the hidden states of the whole model: cut the "
            f'model by a phase with "cut" and train new heads in it, or remove {EXITS_FILE} to cut it without them'
        )
    assert job.task is not None, "read_export_job saw to it"
    assert job.cut is not None
    task = build_task(job.task, job.model, job.cache_dir)
    outline_of(task, job.model, job.cut)  # refuses a family or a share before anything is scored
    before = score_folder(task, job.model, job.batch_size).scores
    cut = cut_of(task, job.model, job.cut, _SEED)
    cut_as_trained(cut.tokenizer, task)
    cut.save(folder)
    distributed.info(cut.summary)
    return cut.report, before


def _shrunk(source: Path, model: Any, batches: list[onnx_file.Inputs], folder: Path) -> tuple[Any, dict[str, Any]]:
    """Write the shrunk model in the precision of its source, with the source's exit heads.

    Returns the model of the folder, and its report, once its outputs are those of the whole model.
    """
    # loaded anew: the padding token that the given model got is none of the saved one's
    whole, tokenizer = pretrained.load_trained(source).eval(), pretrained.load_tokenizer(source)
    save_folder(shrink(whole).to(pretrained.dtype_of(source)), tokenizer, folder)
    if has_exits(source):
        for name in (EXITS_FILE, HEADS_FILE):  # hidden states are as wide as before
            shutil.copyfile(source / name, folder / name)
    shrunk, _ = _load(folder)
    compared = onnx_file.compare(model, onnx_file.by_torch(shrunk), batches)
    check_same(compared, tolerance_in(pretrained.dtype_of(folder)), "the shrunk model's outputs")
    return shrunk, compared | {"weights": total_weights(shrunk)}


def _write_beside_onnx(job: ExportJob, model: Any, task: Task | None, made: Path) -> None:
    """Write what programs read beside an .onnx file: the tokenizer and a plain config.

    Both name the padding token that the file was traced with.
    """
    config, tokenizer = copy.deepcopy(model.config), pretrained.load_tokenizer(job.model)
    for name in (FIELD, "auto_map"):
        if hasattr(config, name):
            delattr(config, name)
    config.architectures = [whole_class(model).__name__]
    config.save_pretrained(made)
    pretrained.pad_token_id(tokenizer)
    if task:
        cut_as_trained(tokenizer, task)
    tokenizer.save_pretrained(made)


def _batches_of(task: Task) -> Iterator[onnx_file.Inputs]:
    """Yield batches of the task's texts: the shortest, the longest, and eight of all lengths, padded to one."""
    examples = task.examples(task.splits[0])
    order = np.argsort(examples.lengths, kind="stable").tolist()
    for some in (order[:1], order[-1:], order[:: max(1, len(order) // 8)][:8]):
        inputs = task.collate(examples, some).inputs
        yield {name: value for name, value in inputs.items() if name not in task.own_inputs}
