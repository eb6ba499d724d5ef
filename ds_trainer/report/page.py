"""The report of a run: figures, `report.md`, and `report.html` as a single file, made from the output folder alone.

A figure that cannot be made is a warning, and the page then lacks it and those that come after it.
"""

from __future__ import annotations

import base64
import html
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, TypeAlias

from ds_trainer.files.messages import markdown
from ds_trainer.files.reading import read_object
from ds_trainer.files.run_folder import RunFolder
from ds_trainer.files.writing import write_whole
from ds_trainer.models.folders import as_user_error
from ds_trainer.ranks import distributed
from ds_trainer.report import figures
from ds_trainer.report.results import RunFiles, number, peak_memory, read_run, side_by_side, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Plot: TypeAlias = "tuple[str, str, Callable[[], Figure | None]]"
"""A figure: its name, its caption, and a function that draws it if it has data."""
_TEMPLATE = Path(__file__).with_name("page.html")
_MARKUP = re.compile(r"(?<![^\W_])_|_(?![^\W_])|[\\`*\[\]<>|#&!~$]")


def make_report(folder: Path) -> None:
    """Draw every figure for which a run has data into `plots/`, and write `report.md` and `report.html`.

    Raises UserError if the folder holds no run, a file is broken, or the report cannot be written.
    """
    with as_user_error(f"the report of {folder} cannot be made"):
        _write(read_run(folder))
    distributed.info(f"report: {folder / 'report.md'}")


def write_report(folder: Path) -> None:
    """Make the report at the end of a run, on rank 0; a failure is a warning."""
    with distributed.as_warning("report"):
        _write(read_run(folder))


def table_of(run: RunFiles) -> str:
    """Return a Markdown table with a column for each phase."""
    if not run.results:
        return "No phase has finished."
    columns = side_by_side(run.results, {phase: _cells(run, phase) for phase in run.results})
    titles = next(iter(columns.values()))
    rows = [{"": title} | {phase: cells[title] for phase, cells in columns.items()} for title in titles]
    return markdown([{_escaped(name): _escaped(cell) for name, cell in row.items()} for row in rows])


def latency_notes(run: RunFiles) -> list[str]:
    """Return a note on where the models of a run were measured; none where they were not."""
    timed = {phase: result["measured_on"] for phase, result in run.results.items() if "measured_on" in result}
    if not timed:
        return []
    on = next(iter(timed.values()))  # they were measured in turns, all on the same device and texts
    threads = f"{on['threads']} thread{'s' * (on['threads'] > 1)}"
    texts = f"{on['examples']} examples of {on['mean_tokens']:.1f} tokens on average"
    where = f"on {on['device']}, {threads}, {on['dtype']}"
    return [f"Latency of {', '.join(timed)}: median of the calls, {where}: {texts}."]


def _write(run: RunFiles) -> None:
    """Write the figures and both pages."""
    folder, captions = RunFolder(run.folder), dict[str, str]()
    with distributed.as_warning("the report lacks figures"):
        figures.check_installed()
        for name, caption, draw in [plot for phase in run.phases for plot in _plots_of(run, phase)]:
            if (figure := draw()) is not None:
                figures.save(figure, folder.claim(f"plots/{name}.png"))
                captions[name] = caption
    page = _page(run, captions)
    write_whole(folder.claim("report.md"), page)
    if (text := _html(run, page)) is not None:
        write_whole(folder.claim("report.html"), text)


def _plots_of(run: RunFiles, phase: str) -> Iterator[_Plot]:
    """Yield the figures that a phase may have, if its log or its model has the data."""

    def plot(name: str, caption: str, draw: Callable[..., Figure | None], *data: Any) -> _Plot:
        return f"{_for_file(phase)}.{name}", f"{phase}: {caption}", partial(draw, phase, *data)

    records, result = run.records.get(phase, []), run.results.get(phase, {})
    yield plot("loss", "loss, its terms and the learning rates.", figures.losses, records)
    yield plot("readings", "what its techniques read while training.", figures.readings, records)
    if cut := result.get("cut"):
        what = "heads of the attention, neurons of the feed-forward, or single weights"
        caption = f"what the cut kept ({what}), and the error of the outputs as a share of their variance."
        yield plot("cut", caption, figures.cut_parts, cut["parts"], cut.get("reconstruction", ()))
    exits = run.exits(phase)
    for index, split in enumerate(exits.get("splits", {})):
        end = f"_{_for_file(split)}" if index else ""
        caption = f"score against speed-up if samples of {split} leave early."
        if calibration := exits.get("calibration"):
            caption += f" The policy was set on {calibration['examples']:,} examples of {calibration['split']}."
        yield plot(f"exits{end}", caption, figures.exit_curves, split, exits)
        caption = f"where samples of {split} leave under the chosen policy."
        yield plot(f"exit_histogram{end}", caption, figures.exit_histogram, split, exits)


def _for_file(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def _page(run: RunFiles, captions: Mapping[str, str]) -> str:
    """Return the page in Markdown; text from the run's files is escaped or fenced."""
    parts = [f"# {_escaped(_title(run))}"]
    model, task = run.recipe.get("model") or {}, run.recipe.get("task") or {}
    if task:
        parts.append(_escaped(f"Model {model.get('name_or_path') or 'new'}, task {task.get('name')}."))
    parts += ["## Results", "\n".join(f"- {_escaped(line)}" for line in verdict(run.results))]
    warnings = [f"{name}: {line}." for name, result in run.results.items() for line in result.get("warnings", [])]
    parts += [table_of(run), *map(_escaped, [*warnings, *latency_notes(run)])]
    parts += ["## Figures"] if captions else []
    for name, caption in captions.items():
        parts.append(f"![{_escaped(caption)}](plots/{name}.png)\n\n{_escaped(caption)}")
    if (run.folder / "command.json").is_file():
        command = textwrap.indent(str(read_object(run.folder / "command.json").get("command")), "    ")
        parts += ["## Command", command, "Its files are recipe.json and deepspeed_config.json."]
    return "\n\n".join(filter(None, parts)) + "\n"


def _title(run: RunFiles) -> str:
    return f"Report of {run.folder.absolute().name}"


def _cells(run: RunFiles, phase: str) -> dict[str, str]:
    """Return what only the page shows of a phase: how its model was made, its sizes, and the memory that it took."""
    result, cells = run.results[phase], dict[str, str]()
    if model := result.get("weights", {}).get("model"):
        cells |= {"parameters": f"{model['total']:,}", "parameters not 0": f"{model['kept']:,}"}
    if spec := run.spec(phase):
        used = [words for field, words in (("student", "smaller model"), ("cut", "cut")) if spec.get(field)]
        used += [name for name, value in spec.get("techniques", {}).items() if value is not None]
        used += ["shrink"] if spec.get("shrink") else []
        cells["techniques"] = ", ".join(used) or "none"
    if cut := result.get("cut"):
        cells["cut"] = f"{cut['seconds']:,.1f} s" + (f", {cut['examples']:,} examples" if cut["examples"] else "")
        cells |= {f"{name} of the cut, before any training": number(value) for name, value in cut["scores"].items()}
    if train := result.get("train"):
        cells["epochs"] = f"{train['epochs']:.2f}"
    for kind, (held, rank) in peak_memory(run.records.get(phase, [])).items():
        cells[f"peak memory, {kind}"] = f"{held / 2**30:,.2f} GiB (rank {rank})"
    return cells


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
        distributed.warn(f"only report.md is written: report.html needs markdown-it-py ({error}): {figures.INSTALL}")
        return None
    renderer = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = renderer.parse(page)
    for image in [child for token in tokens for child in token.children or [] if child.type == "image"]:
        data = base64.b64encode((run.folder / str(image.attrs["src"])).read_bytes()).decode()
        image.attrs["src"] = f"data:image/png;base64,{data}"
    body = renderer.renderer.render(tokens, renderer.options, {})
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(title=html.escape(_title(run)), body=body)
