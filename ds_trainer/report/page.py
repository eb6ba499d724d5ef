"""The report of a run, made from its output folder alone: figures, `report.md`, and `report.html`, one file by itself.

A figure that fails is a warning, and a line on the page; it never ends a training run.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Template
from typing import Any, TypeVar

from ds_trainer.files.redaction import redacted
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.report import plots
from ds_trainer.report.figure import INSTALL, Figure, Pixels, check_installed, encoded, write_whole
from ds_trainer.report.run_files import OF_ONE_EXIT, Run, encoder_weights, peak_memory, read_object, read_run

_MOST_SPLITS = 20
T = TypeVar("T")
Cells = dict[str, str]
"""A column of the table of results: what is said of a phase, by the row's title."""


def make_report(folder: Path) -> None:
    """Make the report of an output folder again; raise UserError where the folder holds no run or cannot be written."""
    run = read_run(folder)
    try:
        _write(run, _Drawn())
    except OSError as error:
        raise UserError(f"the report cannot be written to {folder}: {error.strerror}") from error
    distributed.info(f"report: {folder / 'report.md'}")


def write_report(folder: Path) -> None:
    """Draw every figure that the files of an output folder allow, and write its page, at the end of a run; by rank 0.

    Writes `plots/NAME.png`, `report.md`, and `report.html`, which needs markdown-it-py; beside, TensorBoard images
    where the run has TensorBoard files. What fails is a warning. Raises ValueError only where the folder holds no run.
    """
    drawn = _Drawn()
    run = read_run(folder, drawn.failures)
    for failure in drawn.failures:
        distributed.warn(failure)
    _tried("report", lambda: _write(run, drawn))
    for phase in run.phases:
        if (folder / "tensorboard" / phase).is_dir():
            _tried(f"TensorBoard images of {phase}", partial(_to_tensorboard, run, phase, drawn))


@dataclass(frozen=True)
class _Plot:
    """A figure to be: the phase it belongs to, a line below it, and how it is drawn, if its data are there."""

    name: str
    phase: str
    caption: str
    draw: Callable[[], Figure | None]


@dataclass
class _Drawn:
    """The figures that could be drawn, their pixels and their PNG by name, and why others could not."""

    plots: list[_Plot] = field(default_factory=list)
    pixels: dict[str, Pixels] = field(default_factory=dict)
    images: dict[str, bytes] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def _write(run: Run, drawn: _Drawn) -> None:
    """Write the report. Raises ValueError or OSError where the page cannot be."""
    own = RunFolder(run.folder)
    try:
        check_installed()
    except ValueError as error:
        distributed.warn(f"the report has no figures: {error}")
        drawn.failures.append(str(error))
    else:
        _draw(run, own, drawn)
    page = _markdown(run, drawn)
    write_whole(own.claim("report.md"), page.encode(errors="replace"))
    try:
        import markdown_it  # noqa: F401
    except ImportError as error:
        distributed.warn(f"there is no report.html, only report.md: it needs markdown-it-py ({error}): {INSTALL}")
        return
    images = {f"plots/{name}.png": data for name, data in drawn.images.items()}
    write_whole(own.claim("report.html"), _html(_title(run), page, images).encode(errors="replace"))


def _draw(run: Run, own: RunFolder, drawn: _Drawn) -> None:
    """Every figure, drawn once, and written to `plots/`."""
    for plot in _all_plots(run, drawn.failures):
        pixels = _tried(f"plot {plot.name}", partial(_save, own, plot), drawn.failures)
        if pixels is not None:
            drawn.plots.append(plot)
            drawn.pixels[plot.name] = pixels
            drawn.images[plot.name] = (run.folder / "plots" / f"{plot.name}.png").read_bytes()


def _save(own: RunFolder, plot: _Plot) -> Pixels | None:
    figure = plot.draw()
    if figure is None:
        return None
    pixels = figure.render()
    write_whole(own.claim(f"plots/{plot.name}.png"), encoded(pixels, ".png"))
    return pixels


def _to_tensorboard(run: Run, phase: str, drawn: _Drawn) -> None:
    from torch.utils.tensorboard import SummaryWriter

    step = max((record["step"] for record in run.records.get(phase, [])), default=0)
    with SummaryWriter(str(run.folder / "tensorboard" / phase)) as events:
        for plot in drawn.plots:
            if plot.phase == phase:
                events.add_image(f"plots/{plot.name}", drawn.pixels[plot.name], step, dataformats="HWC")


def _all_plots(run: Run, failures: list[str]) -> Iterator[_Plot]:
    """The figure of all phases, then those of each."""
    if run.results:
        caption = "Score against size, the phases side by side."
        draw = partial(_score_by_density, run)
        yield _Plot("score_by_density", list(run.results)[-1], caption, draw)
    for phase in run.phases:
        for kind in (_plots, _exit_plots):
            yield from _tried(f"plots of {phase}", partial(kind, run, phase), failures) or []


def _plots(run: Run, phase: str) -> list[_Plot]:
    """The figures that every phase may have; its log or its model decides."""
    records, found = run.records.get(phase, []), run.results.get(phase, {})
    weights = found.get("weights", {})
    counts, before = weights.get("layers", {}), weights.get("before", {}).get("layers")
    final = found.get("eval", {}).get("teacher/agreement")
    drawn = [
        ("loss", "loss, its terms and the learning rates.", partial(plots.losses, phase, records)),
        ("density", "encoder weights kept while training.", partial(plots.densities, phase, records, counts)),
        ("agreement", "agreement with the teacher.", partial(plots.agreement, phase, records, final)),
    ]
    if _is_pruned(found, records):
        caption = "weights kept in the final model; ff is feed-forward, grey a head that is gone."
        draw = partial(plots.kept_weights, phase, counts, run.place(phase) / "model", before)
        drawn.append(("kept_weights", caption, draw))
    return [_plot(phase, name, caption, draw) for name, caption, draw in drawn]


def _exit_plots(run: Run, phase: str) -> list[_Plot]:
    exits = run.exits(phase)
    if len(exits.get("splits", {})) > _MOST_SPLITS:
        raise UserError(f"{len(exits['splits']):,} splits: figures are drawn of {_MOST_SPLITS} at most")
    drawn = []
    for index, split in enumerate(exits.get("splits", {})):
        end = "" if index == 0 else f"_{_for_file(split)}"
        caption = f"score against speed-up where samples of {split} leave early.{_calibration(exits)}"
        drawn.append(_plot(phase, f"exits{end}", caption, partial(plots.exit_curves, phase, split, exits)))
        caption = f"where samples of {split} leave under the chosen policy."
        drawn.append(_plot(phase, f"exit_histogram{end}", caption, partial(plots.exit_histogram, phase, split, exits)))
    return drawn


def _plot(phase: str, name: str, caption: str, draw: Callable[[], Figure | None]) -> _Plot:
    return _Plot(f"{_for_file(phase)}.{name}", phase, f"{phase}: {caption}", draw)


def _for_file(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def _calibration(exits: Mapping[str, Any]) -> str:
    """How the thresholds were chosen, where they were."""
    found = exits.get("calibration")
    if not found:
        return ""
    threshold = found.get("threshold")
    one = "The policy" if threshold is None else f"The threshold {threshold:.3g}"
    chosen = "A threshold for each head" if found.get("thresholds") else one
    return f" {chosen} was set on {found['examples']:,} examples of {found['split']}."


def _is_pruned(found: Mapping[str, Any], records: plots.Records) -> bool:
    kept, whole = encoder_weights(found) or (0, 0)
    return kept < whole or (whole > 0 and any("prune/density" in record for record in records))


def _score_by_density(run: Run) -> Figure | None:
    """Of the last phase, and of those with its task, the main metric and the encoder weights kept."""

    def task(phase: str) -> Any:
        return run.spec(phase).get("task") or run.recipe.get("task")

    last = list(run.results)[-1]
    metric = next(iter(run.results[last]["eval"]))
    alike = {name: found for name, found in run.results.items() if metric in found["eval"] and task(name) == task(last)}
    points = {name: (found["weights"]["encoder"]["kept"], found["eval"][metric]) for name, found in alike.items()}
    return plots.score_by_density(metric, points)


def _markdown(run: Run, drawn: _Drawn) -> str:
    """The page. Whatever comes from the run's files is escaped or fenced."""
    parts = [f"# {_escaped(_title(run))}", *(_tried("the run's subject", lambda: _subject(run)) or [])]
    table = _tried("the table of results", lambda: _table(run), drawn.failures)
    notes = _tried("the notes on the table", lambda: _notes(run), drawn.failures) or []
    parts += ["## Results", table, *map(_escaped, notes)] if table else []
    if drawn.plots:
        parts.append("## Figures")
        parts += [f"![{_escaped(p.caption)}](plots/{p.name}.png)\n\n{_escaped(p.caption)}" for p in drawn.plots]
    if drawn.failures:
        parts += ["## What is missing", "\n".join(f"- {_escaped(failure)}" for failure in drawn.failures)]
    parts += [part for title, text in _texts(run) for part in (f"## {_escaped(title)}", _fenced(text))]
    return "\n\n".join(parts) + "\n"


def _title(run: Run) -> str:
    return f"Report of {run.folder.absolute().name}"


def _subject(run: Run) -> list[str]:
    """What the run was about, in a line; none without a recipe."""
    model, task = run.recipe.get("model") or {}, run.recipe.get("task") or {}
    line = f"Model {model.get('name_or_path') or 'new'}, task {task.get('name')}."
    return [_escaped(line)] if run.recipe else []


def _texts(run: Run) -> Iterator[tuple[str, str]]:
    """The command and the resolved files without their secrets, by title."""
    command = run.folder / "command.json"
    told = _tried("command.json", lambda: redacted(read_object(command)).get("command")) if command.is_file() else None
    if told:
        yield "Command", str(told)
    places = dict.fromkeys([run.folder, *map(run.place, run.phases)])
    for file in (run.folder / "recipe.json", *(place / "deepspeed_config.json" for place in places)):
        text = _tried(str(file), partial(_shown, file)) if file.is_file() else None
        if text is not None:
            yield str(file.relative_to(run.folder)), text


def _shown(file: Path) -> str:
    """A file's text; where it holds secrets, without them."""
    text = file.read_text(encoding="utf-8", errors="replace").strip()
    try:
        value = json.loads(text)
    except ValueError:
        return str(redacted(text))
    shown = redacted(value)
    return text if shown == value else json.dumps(shown, indent=2)


def _table(run: Run) -> str:
    """The phases side by side, in Markdown, and notes on them."""
    if not run.results:
        return "No phase has finished."
    columns = [_cells(run, name) for name in run.results]
    lines = [["", *run.results]]
    for group in zip(*columns, strict=True):
        titles = dict.fromkeys(title for cells in group for title in cells)
        lines += [[title, *(cells.get(title, "–") for cells in group)] for title in titles]
    head, *rows = ["| " + " | ".join(map(_escaped, line)) + " |" for line in lines]
    return "\n".join([head, "| --- |" + " ---: |" * len(columns), *rows])


def _notes(run: Run) -> list[str]:
    """What the phases were trained on, what the latencies were measured on, and which exits are others by now."""
    trained: dict[str, list[str]] = {}
    for phase, found in run.results.items():
        for session in found.get("trained_on") or []:
            trained.setdefault(_session(session), []).append(phase)
    measured: dict[str, list[str]] = {}
    for phase, found in run.results.items():
        on = found.get("measured_on")
        if on:
            line = f"on {on['device']}, {on['threads']} threads, {on['dtype']}: {on['examples']} examples of "
            measured.setdefault(f"{line}{on['mean_tokens']:.1f} tokens on average", []).append(phase)
    notes = [f"Trained on {where}: {', '.join(phases)}." for where, phases in trained.items()]
    notes += [f"Latency of {', '.join(phases)}: median of the calls, {line}." for line, phases in measured.items()]
    again = [phase for phase in run.phases if _tried(f"exits of {phase}", partial(run.calibrated_again, phase))]
    if again:
        notes.append(f"The exits of {', '.join(again)} were set again since: the figures are those of the ones before.")
    return notes


def _session(session: Mapping[str, Any]) -> str:
    """Hosts, devices and versions, in a line."""
    hosts = (
        f"{host} ({', '.join(f'{ranks} x {device}' for device, ranks in devices.items())})"
        for host, devices in session["hosts"].items()
    )
    return f"{', '.join(hosts)}, with {', '.join(map(' '.join, session['versions'].items()))}"


def _cells(run: Run, phase: str) -> tuple[Cells, ...]:
    """What the table says of a phase, in groups: what it did, scores, sizes, times, training."""
    found = run.results[phase]
    timed = "early_exit/speedup" if found.get("exits") else None  # by batch size among the times
    scores = {
        _metric(name): _number(value)
        for name, value in found.get("eval", {}).items()
        if not (timed and name.endswith(timed))
        and (name.endswith("early_exit/expected_saving") or not OF_ONE_EXIT.search(name))
    }
    trained = found.get("train", {})
    training = {"training": f"{trained['train_seconds']:,.0f} s"} if "train_seconds" in trained else {}
    if "epochs" in trained:
        training["epochs"] = f"{trained['epochs']:,.2f}"
    for kind, (held, rank) in peak_memory(run.records.get(phase, [])).items():
        training[f"peak memory, {kind}"] = f"{held / 2**30:,.2f} GiB (rank {rank})"
    return _techniques(found, run.spec(phase)), scores, _sizes(found), _times(found), training


def _techniques(found: Mapping[str, Any], spec: Mapping[str, Any]) -> Cells:
    if not spec:
        return {}
    used = [name for name, value in (spec.get("techniques") or {}).items() if value is not None]
    used = (["smaller model"] if spec.get("student") else []) + used + (["shrink"] if spec.get("shrink") else [])
    kept, whole = encoder_weights(found) or (0, 0)
    dense = 0 < kept == whole
    return {"techniques": ", ".join(used) or ("none (dense)" if dense else "none")}


def _sizes(found: Mapping[str, Any]) -> Cells:
    cells = {}
    weights = found.get("weights", {})
    counted = encoder_weights(found)
    if counted:
        cells["encoder weights kept"] = f"{counted[0]:,} ({100 * counted[0] / max(counted[1], 1):.1f} %)"
    if "model" in weights:
        cells |= {"parameters": f"{weights['model']['total']:,}", "parameters not 0": f"{weights['model']['kept']:,}"}
    if "size" in found:
        cells["size on disk"] = f"{found['size']['bytes'] / 2**20:,.1f} MiB"
    return cells


def _times(found: Mapping[str, Any]) -> Cells:
    cells = {}
    for key, what in (("latency", "latency"), ("early_exit_latency", "early-exit latency")):
        for batch, times in (found.get(key) or {}).items():
            slow = f" (p95 {times['p95_ms']:.2f})" if "p95_ms" in times else ""
            cells[f"{what}, {batch.replace('_', ' ')}"] = f"{times['median_ms']:.2f} ms{slow}"
    for index, (split, exits) in enumerate(((found.get("exits") or {}).get("splits") or {}).items()):
        for batch, times in (exits["early_exit"].get("measured") or {}).items():
            where = f" on {split}" if index else ""
            cells[f"early exit, measured speed-up{where}, {batch.replace('_', ' ')}"] = f"{times['speedup']:.2f}×"
    return cells


def _metric(name: str) -> str:
    """A score's name in words: `teacher/agreement`, `early_exit/mean_layers`."""
    words = {
        "teacher/agreement": "agreement with the teacher",
        "teacher/": "teacher's ",
        "final_threshold/": "at the final threshold, ",
        "early_exit/": "early exit, ",
        "mean_layers": "mean layers",
        "expected_saving": "share of layers used",
    }
    for key, said in words.items():
        name = name.replace(key, said)
    return name


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "–"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4f}"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    flat = " ".join(text.split())
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])|[\\`*\[\]<>|#&!~$]", lambda found: "\\" + found[0], flat)


def _fenced(text: str) -> str:
    """Text as it is, in a fence longer than any in it."""
    fence = "`" * max(3, *(len(found) + 1 for found in re.findall("`+", text)), 3)
    return f"{fence}\n{text}\n{fence}"


def _html(title: str, page: str, images: Mapping[str, bytes]) -> str:
    """The Markdown page as one file that asks nothing of the network; HTML in it is shown, not obeyed."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    markdown.add_render_rule("fence", _folded)
    tokens = markdown.parse(page)
    for image in [child for token in tokens for child in token.children or [] if child.type == "image"]:
        data = base64.b64encode(images[str(image.attrs["src"])]).decode()
        image.attrs["src"] = f"data:image/png;base64,{data}"
    body = markdown.renderer.render(tokens, markdown.options, {})
    return Template(_PAGE).substitute(title=html.escape(title), body=body)


def _folded(_renderer: Any, tokens: Sequence[Any], index: int, _options: Any, _env: Any) -> str:
    """A fence in HTML: folded away where it is long."""
    text = tokens[index].content
    block = f"<pre><code>{html.escape(text)}</code></pre>\n"
    return block if text.count("\n") < 5 else f"<details><summary>show</summary>\n{block}</details>\n"


def _tried(what: str, call: Callable[[], T], failures: list[str] | None = None) -> T | None:
    """The call's value; or None, and a warning that names what failed and why, which is also put on the page."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001  (a report never ends a run, whatever is wrong with it)
        cause = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        distributed.warn(f"{what}: {cause}")
        if failures is not None:
            failures.append(f"{what}: {cause}")
        return None


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --text: #1c1c1c; --page: #fff; --line: #d0d0d0; --block: #f4f4f4; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e4e4; --page: #16181c; --line: #44474d; --block: #22252b; } }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif;
  color: var(--text); background: var(--page); }
table { display: block; overflow-x: auto; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
td:first-child { white-space: normal; }
img { display: block; max-width: 100%; margin-top: 2rem; border-radius: 4px; background: #fff; }
pre { overflow: auto; max-height: 30rem; padding: .8rem; font-size: 14px; background: var(--block); }
summary { cursor: pointer; }
</style>
</head>
<body>
$body</body>
</html>
"""
