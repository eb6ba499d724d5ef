"""The card of a model folder, its `README.md`: scores, sizes, latency, how to load the model, and how it was made.

Its head is metadata for the hub, to which `push_to_hub` sends a folder. A card without `CARD_MARK` is the user's own,
and stays as it is.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData

import ds_trainer
from ds_trainer.cuts.cut import CUT_FILE
from ds_trainer.deploy.measuring import bytes_on_disk
from ds_trainer.files.messages import markdown
from ds_trainer.files.reading import read_object
from ds_trainer.files.redaction import redacted
from ds_trainer.files.run_folder import CARD, CARD_MARK, is_own_card
from ds_trainer.files.writing import write_whole
from ds_trainer.models.folders import as_user_error, has_safetensors, is_compact, is_hub_name
from ds_trainer.models.layers import FIELD
from ds_trainer.models.sentence_files import ACTIVATION, MODULES_FILE
from ds_trainer.ranks import distributed
from ds_trainer.recipe.exit_specs import EXITS_FILE
from ds_trainer.recipe.jobs import EXPORT_REPORT, INT8_FILE, ONNX_FILE, REPLACED, ExportJob
from ds_trainer.recipe.recipe import Phase, Recipe
from ds_trainer.recipe.task_specs import TaskBase
from ds_trainer.report.page import latency_notes, table_of
from ds_trainer.report.results import read_run

_TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
}
"""The hub's name of what a model does, by the end of the name of its class."""
_OWN_SIZES = """Its layers differ in size, which a plain config cannot say: `shrunk_model.py`, a file of this folder,
builds them. Without `trust_remote_code=True` transformers ends with "You set `ignore_mismatched_sizes` to `False`", and
setting it would fill layers with random weights. Where code of a folder may not be run, load it by
`ds_trainer.load_model`, which does not run that file, export it with `--onnx`, or cut the model to sizes that a plain
config can say (docs/cuts.md)."""
_FLAGS = {"shrink", "cut", "onnx", "quantize", "compact", "unpack"}
_PATH = re.compile(r'"/(?:[^"]*/)?([^"/]+)/?"')


def write_cards(output: Path, recipe: Recipe) -> None:
    """Write the card of each model of a run, from the files in its output folder; a failure is a warning."""
    with distributed.as_warning("the models have no cards"):
        run = read_run(output)
        for phase in recipe.phases:
            models = f"The models of the run, side by side. This one is `{phase.name}`."
            sections = ["## Results", models, table_of(run), *latency_notes(run), *_section(recipe)]
            task, scores = phase.task or recipe.task, run.results[phase.name]["eval"]
            folder = run.folder_of(phase.name) / "model"
            if (folder / "config.json").exists():  # otherwise the user has deleted the model
                _write(folder, _origin(recipe, phase), task, scores, sections)


def write_export_card(job: ExportJob, report: Mapping[str, Any]) -> None:
    """Write the card of an export; a model to which .onnx files were added keeps the card of its run."""
    if job.adds_onnx and is_own_card(job.output / CARD):
        return
    scores = report.get("scores", {})
    made = scores.get("compact", scores.get("cut"))
    models = [("source", bytes_on_disk(job.model), scores.get("model"))]
    models += [("this model", bytes_on_disk(job.output), made)] if job.writes_folder else []
    models += [(report[n]["file"], report[n]["bytes"], scores.get(n)) for n in ("onnx", "int8") if n in report]
    rows = [
        {"": name, "MiB": f"{size / 2**20:,.1f}", **{metric: f"{value:.4f}" for metric, value in (of or {}).items()}}
        for name, size, of in models
    ]
    flags = job.model_dump(mode="json", exclude_unset=True, include=_FLAGS)
    sections = ["## Results", markdown(rows), "## Export", _json({name: flags[name] for name in flags if flags[name]})]
    source: str | None = str(job.model)
    if saved := job.checkpoint:
        source = _origin(saved.recipe, saved.phase)
        sections += _section(saved.recipe)
    _write(job.output, source, job.task, made or scores.get("model", {}), sections)


def push_to_hub(folder: Path, name: str) -> None:
    """Send a model folder to a repository of the hub, in the place of its model; UserError where that fails.

    The repository is made unless it exists. The reports of cuts and exports stay here: they name folders of this
    machine.
    """
    with as_user_error(f"--push_to_hub {name}: {folder} is whole here, and was not sent"):
        kept, replaced = [".*", EXPORT_REPORT, CUT_FILE], list(REPLACED)
        repository = HfApi().create_repo(name, exist_ok=True).repo_id
        HfApi().upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=kept, delete_patterns=replaced)


def _origin(recipe: Recipe, phase: Phase) -> str | None:
    """Return the folder or hub name of the model that a phase's goes back to; None where its weights are new."""
    if phase.student and phase.student.config:
        return None
    if not phase.start_from.startswith("@"):
        return phase.start_from
    before = recipe.earlier(phase, phase.start_from)
    return _origin(recipe, before) if before else recipe.model.name_or_path


def _write(
    folder: Path,
    source: str | None,
    task: TaskBase | None,
    scores: Mapping[str, float],
    sections: Sequence[str],
) -> None:
    """Write the card of a folder that was made from `source`, a folder or hub name; None stands for new weights."""
    if (folder / CARD).exists() and not is_own_card(folder / CARD):
        return
    config, name = read_object(folder / "config.json"), "/".join(folder.absolute().parts[-2:])
    classes = config.get("architectures") or []
    kind = next((kind for kind in _TASKS if any(one.endswith(kind) for one in classes)), "")
    named, base = _sentence_class(folder, config), source
    does = {"SentenceTransformer": "sentence-similarity", "CrossEncoder": "text-ranking"}.get(named, _TASKS.get(kind))
    if source and not is_hub_name(source):  # the base of a folder is that which its own card names
        base = ModelCard.load(Path(source) / CARD).data.base_model if is_own_card(Path(source) / CARD) else None
    library = "sentence-transformers" if named else "transformers"
    head = ModelCardData(base_model=base, library_name=library, pipeline_tag=does, tags=["ds_trainer"])
    if does and task:
        data = task.dataset or task.name
        data, config_of_data = data.rsplit("/", 1) if data.count("/") > 1 else (data, None)
        results = [
            EvalResult(does, data, task.name, metric, value, dataset_config=config_of_data)
            for metric, value in scores.items()
            if "/" not in metric
        ]
        if results:
            head.model_name, head.eval_results = name, results
    origin = f"from {base or Path(source).name}" if source else "from new weights"
    text = f"This {config['model_type']} was made by ds_trainer {ds_trainer.__version__} {origin}"
    text += f", for the task {task.name}." if task else "."
    parts = [f"---\n{head.to_yaml()}\n---\n{CARD_MARK}", f"# {name}", text, *sections, "## How to load"]
    write_whole(folder / CARD, "\n\n".join([*parts, *_ways(folder, config, kind)]) + "\n")


def _ways(folder: Path, config: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Yield a fence of Python, or a sentence, for each way to load what a folder holds."""
    auto = f"AutoModel{kind}".replace("LMHeadModel", "ForCausalLM")
    trust = ", trust_remote_code=True" if "auto_map" in config else ""
    exits = (folder / EXITS_FILE).exists()
    if has_safetensors(folder) or any(folder.glob("pytorch_model*")):
        library, loads = "transformers", f'{auto}.from_pretrained("FOLDER"{trust})'
        if named := _sentence_class(folder, config):
            library, auto, loads = "sentence_transformers", named, f'{named}("FOLDER"{trust})'
        yield f"```python\nfrom {library} import {auto}\n\nmodel = {loads}\n```"
        if FIELD in config:
            yield _OWN_SIZES
    if exits or is_compact(folder):
        early = "  # exits early" if exits else ""
        yield f'```python\nimport ds_trainer\n\nmodel = ds_trainer.load_model("FOLDER"){early}\n```'
    if (folder / ONNX_FILE).exists():
        files = [f"`{name}`" for name in (ONNX_FILE, INT8_FILE) if (folder / name).exists()]
        yield f"{' and '.join(files)}: in onnxruntime, by the program of ds_trainer's docs/export.md."


def _sentence_class(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the class of sentence-transformers that opens a folder, "" where none does."""
    return "SentenceTransformer" if (folder / MODULES_FILE).exists() else "CrossEncoder" * (ACTIVATION in config)


def _section(recipe: Recipe) -> list[str]:
    """Return the section of a card with what a recipe sets."""
    places = {"output_dir", "cache_dir"}
    return ["## Recipe", _json(recipe.model_dump(mode="json", exclude_defaults=True, exclude=places))]


def _json(value: Mapping[str, Any]) -> str:
    """Return a fence of JSON. A card is public: it has no secrets, and of absolute paths only the last parts."""
    text = json.dumps(redacted(value), indent=2, ensure_ascii=False)
    text = _PATH.sub(r'".../\1"', text)
    return f"```json\n{text}\n```"
