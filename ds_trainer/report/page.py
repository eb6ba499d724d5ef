"""The report of a run: figures, `report.md`, and `report.html` as a single file, made from the output folder alone.

A figure or a section that cannot be made becomes a warning and a line on the page.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, TypeVar

from ds_trainer.files.run_folder import RunFolder
from ds_trainer.files.tables import markdown
from ds_trainer.files.writing import write_whole
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.report import plots
from ds_trainer.report.drawing import INSTALL, check_installed, label, pixels, save
from ds_trainer.report.matrices import cut_by_layer
from ds_trainer.report.run_files import OF_ONE_EXIT, RunFiles, encoder_weights, peak_memory, read_object, read_run
from ds_trainer.report.verdict import TimedPhase, main_metric, timed_phases, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Cells = dict[str, str]
"""A part of the column of a phase in the table of results: the cells by the titles of their rows."""

_TEMPLATE = Path(__file__).with_name("page.html")
_MARKUP = re.compile(r"(?<![^\W_])_|_(?![^\W_])|[\\`*\[\]<>|#&!~$]")
_WORDS = {
    "teacher/agreement": "agreement with the teacher",
    "teacher/": "teacher's ",
    "final_threshold/": "at the final threshold, ",
    "early_exit/": "early exit, ",
    "mean_layers": "mean layers",
    "expected_saving": "share of layers used",
}
"""Words for the parts of a score's name."""


def make_report(folder: Path) -> None:
    """Draw every figure for which a run has data into `plots/`, and write `report.md` and `report.html`.

    Raises UserError if the folder holds no run, a file is broken, or the report cannot be written.
    """
    try:
        _write(read_run(folder))
    except UserError:
        raise
    except (OSError, LookupError, TypeError, AttributeError, ValueError) as error:
        broken = "recipe.json, all_results.json or log.jsonl has values that no run writes: restore these files"
        cause = error if isinstance(error, OSError) else broken
        raise UserError(f"the report of {folder} cannot be made: {cause}") from error
    distributed.info(f"report: {folder / 'report.md'}")


def write_report(folder: Path) -> None:
    """Make the report at the end of a run, on rank 0, and add its figures to TensorBoard; a failure is a warning."""
    tried("report", partial(_write_with_images, folder))


@dataclass(frozen=True)
class _Plot:
    """A figure of the report: its name, its phase, its caption, and a function that draws it if it has data."""

    name: str
    phase: str
    caption: str
    draw: Callable[[], Figure | None]


def _write_with_images(folder: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    run = read_run(folder)
    figures = _write(run)
    for phase in run.phases:
        events = folder / "tensorboard" / phase
        if events.is_dir():
            step = max((record["step"] for record in run.records.get(phase, [])), default=0)
            with SummaryWriter(str(events)) as writer:
                for plot, figure in figures.items():
                    if plot.phase == phase:
                        writer.add_image(f"plots/{plot.name}", pixels(figure), step, dataformats="HWC")


def _write(run: RunFiles) -> dict[_Plot, Figure]:
    """Write the figures and both pages; return the figures that were drawn."""
    folder, failures = RunFolder(run.folder), list[str]()
    figures = tried("the report has no figures", partial(_draw, run, folder, failures), failures) or {}
    page = _page(run, list(figures), failures)
    write_whole(folder.claim("report.md"), page)
    if (text := _html(run, page)) is not None:
        write_whole(folder.claim("report.html"), text)
    return figures


def _draw(run: RunFiles, folder: RunFolder, failures: list[str]) -> dict[_Plot, Figure]:
    """Draw and save every figure that has its data."""

    def drawn(plot: _Plot) -> Figure | None:
        if (figure := plot.draw()) is not None:
            save(figure, folder.claim(f"plots/{plot.name}.png"))
        return figure

    check_installed()
    figures = {plot: tried(f"plot {plot.name}", partial(drawn, plot), failures) for plot in _all_plots(run, failures)}
    return {plot: figure for plot, figure in figures.items() if figure is not None}


def _all_plots(run: RunFiles, failures: list[str]) -> Iterator[_Plot]:
    """Yield the figure that compares the phases, then those of each phase."""
    if run.results:
        caption = "Score against size and time, the phases side by side."
        yield _Plot("score_by_cost", list(run.results)[-1], caption, partial(_score_by_cost, run))
    for phase in run.phases:
        for kind in (_plots, _exit_plots):
            yield from tried(f"plots of {phase}", partial(kind, run, phase), failures) or []


def _plots(run: RunFiles, phase: str) -> list[_Plot]:
    """Return the figures that any phase may have, if its log or its model has the data."""
    records, result = run.records.get(phase, []), run.results.get(phase, {})
    weights = result.get("weights", {})
    counts, before = weights.get("layers", {}), weights.get("before", {}).get("layers")
    final = result.get("eval", {}).get("teacher/agreement")
    drawn = [
        _plot(phase, "loss", "loss, its terms and the learning rates.", plots.losses, records),
        _plot(phase, "density", "encoder weights kept while training.", plots.densities, records, counts),
        _plot(phase, "agreement", "agreement with the teacher.", plots.agreement, records, final),
    ]
    if cut := result.get("cut"):
        what = "heads of the attention, neurons of the feed-forward, or single weights"
        caption = f"what the cut kept ({what}), and the error of the outputs as a share of their variance."
        drawn.append(_plot(phase, "cut", caption, plots.cut_parts, cut["parts"]))
    kept, whole = encoder_weights(result) or (0, 0)
    if kept < whole or (whole > 0 and any("prune/density" in record for record in records)):
        caption = "weights kept in the final model; ff is feed-forward, a grey cell is a head that was cut out."
        model = run.folder_of(phase) / "model"
        drawn.append(_plot(phase, "kept_weights", caption, plots.kept_weights, counts, model, before))
    return drawn


def _exit_plots(run: RunFiles, phase: str) -> list[_Plot]:
    exits, drawn = run.exits(phase), []
    for index, split in enumerate(exits.get("splits", {})):
        end = f"_{_for_file(split)}" if index else ""
        score = f"score against speed-up if samples of {split} leave early.{_calibration(exits)}"
        leave = f"where samples of {split} leave under the chosen policy."
        drawn.append(_plot(phase, f"exits{end}", score, plots.exit_curves, split, exits))
        drawn.append(_plot(phase, f"exit_histogram{end}", leave, plots.exit_histogram, split, exits))
    return drawn


def _plot(phase: str, name: str, caption: str, draw: Callable[..., Figure | None], *data: Any) -> _Plot:
    return _Plot(f"{_for_file(phase)}.{name}", phase, f"{phase}: {caption}", partial(draw, phase, *data))


def _for_file(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def _calibration(exits: Mapping[str, Any]) -> str:
    """Return a sentence about the calibration of the thresholds, or nothing if they were not calibrated."""
    calibration = exits.get("calibration")
    if not calibration:
        return ""
    threshold, chosen = calibration.get("threshold"), "The policy"
    if calibration.get("thresholds"):
        chosen = "A threshold for each head"
    elif threshold is not None:
        chosen = f"The threshold {threshold:.3g}"
    return f" {chosen} was set on {calibration['examples']:,} examples of {calibration['split']}."


def _score_by_cost(run: RunFiles) -> Figure | None:
    """Draw the main metric of the last phase, and of those with its task, over encoder weights and milliseconds."""

    def task(phase: str) -> Any:
        return run.spec(phase).get("task") or run.recipe.get("task")

    last, metric = list(run.results)[-1], main_metric(run.results) or ""
    alike = {name: each for name, each in run.results.items() if metric in each["eval"] and task(name) == task(last)}
    models: dict[str, tuple[float, dict[str, float]]] = {}
    for name, each in alike.items():
        counted = encoder_weights(each)
        models[name] = each["eval"][metric], {"encoder weights kept": counted[0]} if counted else {}
    for timed in timed_phases(alike):
        batch, ms = list(timed.ms.items())[-1]
        if timed.score is not None:
            models.setdefault(timed.name, (timed.score, {}))[1][f"milliseconds, {batch}"] = ms
    return plots.score_by_cost(metric, models)


def _page(run: RunFiles, drawn: Sequence[_Plot], failures: list[str]) -> str:
    """Return the page in Markdown; text from the run's files is escaped or fenced."""
    parts = [f"# {_escaped(_title(run))}"]
    model, task = run.recipe.get("model") or {}, run.recipe.get("task") or {}
    if task:
        parts.append(_escaped(f"Model {model.get('name_or_path') or 'new'}, task {task.get('name')}."))
    table = tried("the table of results", partial(table_of, run), failures)
    notes = tried("the notes on the table", partial(notes_on, run), failures) or []
    said = tried("the verdict", partial(verdict, run.results), failures) or []
    parts += ["## Results", "\n".join(f"- {_escaped(line)}" for line in said), table or "", *map(_escaped, notes)]
    if drawn:
        parts.append("## Figures")
        parts += [f"![{_escaped(p.caption)}](plots/{p.name}.png)\n\n{_escaped(p.caption)}" for p in drawn]
    if failures:
        parts += ["## What is missing", "\n".join(f"- {_escaped(failure)}" for failure in failures)]
    for name, text in _texts(run):
        fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", text)), 3)
        parts.append(f"## {_escaped(name)}\n\n{fence}\n{text}\n{fence}")
    return "\n\n".join(filter(None, parts)) + "\n"


def _title(run: RunFiles) -> str:
    return f"Report of {run.folder.absolute().name}"


def _texts(run: RunFiles) -> Iterator[tuple[str, str]]:
    """Yield the command and the resolved files with their titles. The run has written them without secrets."""
    command = run.folder / "command.json"
    if command.is_file():
        yield "Command", str(tried("command.json", lambda: read_object(command)["command"]))
    folders = [run.folder, *map(run.folder_of, run.phases)]
    names: dict[str, str] = {}  # by the text: most phases have the engine file of the run
    for file in (run.folder / "recipe.json", *(folder / "deepspeed_config.json" for folder in folders)):
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace").strip()
            names.setdefault(text, str(file.relative_to(run.folder)))
    yield from ((name, text) for text, name in names.items())


def table_of(run: RunFiles) -> str:
    """Return a Markdown table with a column for each phase."""
    if not run.results:
        return "No phase has finished."
    columns = {phase: _cells(run, phase) for phase in run.results}
    rows = []
    for group in zip(*columns.values(), strict=True):
        for title in dict.fromkeys(title for cells in group for title in cells):
            values = dict(zip(columns, (cells.get(title, "–") for cells in group), strict=True))
            rows.append({_escaped(name): _escaped(cell) for name, cell in {"": title, **values}.items()})
    return markdown(rows)


def notes_on(run: RunFiles) -> list[str]:
    """Return warnings, and notes on where phases were trained and measured, and which exits changed since."""
    trained: dict[str, list[str]] = {}
    measured: dict[str, list[str]] = {}
    for phase, result in run.results.items():
        for session in result.get("trained_on", []):
            trained.setdefault(_session(session), []).append(phase)
        if on := result.get("measured_on"):
            threads = f"{on['threads']} thread{'s' * (on['threads'] > 1)}"
            line = f"on {on['device']}, {threads}, {on['dtype']}: {on['examples']} examples of "
            measured.setdefault(f"{line}{on['mean_tokens']:.1f} tokens on average", []).append(phase)
    notes = [f"{phase}: {line}." for phase, result in run.results.items() for line in result.get("warnings", [])]
    notes += [f"Trained on {where}: {', '.join(phases)}." for where, phases in trained.items()]
    notes += [f"Latency of {', '.join(phases)}: median of the calls, {line}." for line, phases in measured.items()]
    if again := [phase for phase in run.phases if run.calibrated_again(phase)]:
        notes.append(f"The exits of {', '.join(again)} were calibrated again: the figures show those before.")
    return notes


def _session(session: Mapping[str, Any]) -> str:
    """Return hosts, devices and versions in a line."""
    hosts = (
        f"{host} ({', '.join(f'{ranks} x {device}' for device, ranks in devices.items())})"
        for host, devices in session["hosts"].items()
    )
    return f"{', '.join(hosts)}, with {', '.join(map(' '.join, session['versions'].items()))}"


def _cells(run: RunFiles, phase: str) -> tuple[Cells, ...]:
    """Return a phase's column of the table, in groups: scores, times, sizes, techniques, cut, training."""
    result = run.results[phase]
    timed = "early_exit/speedup" if result.get("exits") else None  # the times have it for each batch size
    scores = {}
    for name, value in result.get("eval", {}).items():
        repeats = OF_ONE_EXIT.search(name) and not name.endswith("early_exit/expected_saving")
        if not (repeats or (timed and name.endswith(timed))):
            for part, words in _WORDS.items():
                name = name.replace(part, words)
            scores[name] = _number(value)
    training = {}
    if trained := result.get("train"):
        training["training"] = f"{trained['train_seconds']:,.0f} s"
        training["epochs"] = f"{trained['epochs']:.2f}"
    for kind, (held, rank) in peak_memory(run.records.get(phase, [])).items():
        training[f"peak memory, {kind}"] = f"{held / 2**30:,.2f} GiB (rank {rank})"
    times = _times(result, timed_phases(run.results))
    return scores, times, _sizes(result), _techniques(result, run.spec(phase)), _cut(result), training


def _techniques(result: Mapping[str, Any], spec: Mapping[str, Any]) -> Cells:
    if not spec:
        return {}
    used = ["smaller model"] if spec.get("student") else []
    used += ["cut"] if spec.get("cut") else []
    used += [name for name, value in spec.get("techniques", {}).items() if value is not None]
    used += ["shrink"] if spec.get("shrink") else []
    kept, whole = encoder_weights(result) or (0, 0)
    return {"techniques": ", ".join(used) or ("none (dense)" if 0 < kept == whole else "none")}


def _cut(result: Mapping[str, Any]) -> Cells:
    """Return what the cut took that the phase starts from, and its scores before the first step."""
    cut = result.get("cut")
    if not cut:
        return {}
    cells = {f"{name} of the cut, before any training": _number(value) for name, value in cut["scores"].items()}
    if sizes := cut.get("sizes"):
        for name, before in sizes["before"].items():
            cells[f"cut: {name} of the model"] = f"{sizes['after'][name]:,} of {before:,}"
    for name, parts in cut_by_layer(cut["parts"]).items():
        kept = (str(part["kept"]) if part["kept"] < part["count"] else "all" for part in parts)
        cells[f"cut: {label(name)}, kept in each layer"] = ", ".join(kept)
        cells[f"cut: {label(name)}, error of the outputs"] = ", ".join(_percent(part["error"]) for part in parts)
    examples = f", {cut['examples']:,} examples" if cut["examples"] else ""
    return {"cut": f"{cut['seconds']:,.1f} s{examples}", **cells}


def _sizes(result: Mapping[str, Any]) -> Cells:
    cells = {}
    if counted := encoder_weights(result):
        cells["encoder weights kept"] = f"{counted[0]:,} ({100 * counted[0] / max(counted[1], 1):.1f}%)"
    if model := result.get("weights", {}).get("model"):
        cells |= {"parameters": f"{model['total']:,}", "parameters not 0": f"{model['kept']:,}"}
    if "size" in result:
        cells["size on disk"] = f"{result['size']['bytes'] / 2**20:,.1f} MiB"
    return cells


def _times(result: Mapping[str, Any], timed: Sequence[TimedPhase]) -> Cells:
    """Return how many times as fast the model is as the first of the `timed` ones, and the measured milliseconds."""
    fast, cells = {}, {}
    for key, name, early in (("latency", "latency", ""), ("early_exit_latency", "early-exit latency", "early exit, ")):
        for batch, times in (result.get(key) or {}).items():
            words = batch.replace("_", " ")
            slow = f" (p95 {times['p95_ms']:.2f})" if "p95_ms" in times else ""
            cells[f"{name}, {words}"] = f"{times['median_ms']:.2f} ms{slow}"
            if len(timed) > 1 and words in timed[0].ms:
                ratio = timed[0].ms[words] / times["median_ms"]
                fast[f"{early}times as fast as {timed[0].name}, {words}"] = f"{ratio:.2f}×"
    for index, (split, exits) in enumerate(((result.get("exits") or {}).get("splits") or {}).items()):
        for batch, times in (exits["early_exit"].get("measured") or {}).items():
            where = f" on {split}" if index else ""
            cells[f"early exit, measured speed-up{where}, {batch.replace('_', ' ')}"] = f"{times['speedup']:.2f}×"
    return fast | cells


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.1 or share < 1e-6 else f"{100 * share:.2g}%"  # never as 1e-05


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "–"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4f}"


def _escaped(text: str) -> str:
    """Return text that Markdown shows unchanged, on one line. It uses entities, which tables do not escape again."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", " ".join(text.split()))


def _html(run: RunFiles, page: str) -> str | None:
    """Return the page as one HTML file that loads nothing from the network; None, with a warning, without a renderer.

    HTML in the Markdown is shown as text.
    """
    try:
        from markdown_it import MarkdownIt
    except ImportError as error:
        distributed.warn(f"only report.md is written: report.html needs markdown-it-py ({error}): {INSTALL}")
        return None
    renderer = MarkdownIt("commonmark", {"html": False}).enable("table")
    renderer.add_render_rule("fence", _folded)
    tokens = renderer.parse(page)
    for image in [child for token in tokens for child in token.children or [] if child.type == "image"]:
        data = base64.b64encode((run.folder / str(image.attrs["src"])).read_bytes()).decode()
        image.attrs["src"] = f"data:image/png;base64,{data}"
    body = renderer.renderer.render(tokens, renderer.options, {})
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(title=html.escape(_title(run)), body=body)


def _folded(_renderer: Any, tokens: Sequence[Any], index: int, _options: Any, _env: Any) -> str:
    """Render a fence in HTML, folded where it is long."""
    text = tokens[index].content
    block = f"<pre><code>{html.escape(text)}</code></pre>\n"
    return block if text.count("\n") < 5 else f"<details><summary>show</summary>\n{block}</details>\n"


def tried(name: str, call: Callable[[], T], failures: list[str] | None = None) -> T | None:
    """Return the call's value. After an error return None, warn, and add the cause to the failures."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001  (a report never ends a run, whatever is wrong with it)
        cause = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        distributed.warn(f"{name}: {cause}")
        if failures is not None:
            failures.append(f"{name}: {cause}")
        return None
