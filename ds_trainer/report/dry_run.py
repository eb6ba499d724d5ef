"""The table of a dry run: what each phase would train, how long, and in how much memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_trainer.files.tables import aligned

_MEMORY = {"peak": "MiB", "peak_of_the_gpu": "MiB of the GPU", "peak_of_the_host": "MiB of the host"}
"""The columns for the peaks of a rank."""


def dry_run_table(phases: Sequence[Mapping[str, Any]]) -> str:
    """Show the phases of `rehearsal.rehearse_phases`, a line each, and say what the minutes are measured on."""
    return "\n".join([aligned([_row(phase) for phase in phases]), "", *_notes(phases)])


def _row(phase: Mapping[str, Any]) -> dict[str, str]:
    trained = sum(group["parameters"] for group in phase["parameter_groups"])
    row = {
        "phase": phase["phase"],
        "steps": f"{phase['steps']['total']:,}",
        "examples a step": f"{phase['engine_file']['train_batch_size']:,}",
        "parameters": f"{trained + phase['frozen_parameters']:,}",
        "of them trained": f"{trained:,}" if "time" in phase else "0",
    }
    held = phase.get("memory_per_rank", {})
    row |= {column: f"{held[peak] / 2**20:,.0f}" for peak, column in _MEMORY.items() if peak in held}
    parts = [phase.get("cut", {}).get("estimated_seconds", 0), phase["time"]["seconds"] if "time" in phase else 0]
    if None in parts:
        return row
    minutes = sum(parts) / 60
    return row | {"minutes": f"{minutes:,.1f}" if minutes >= 0.1 else "<0.1"}


def _notes(phases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    ranks = next((phase["memory_per_rank"]["ranks"] for phase in phases if "memory_per_rank" in phase), 1)
    yield f"MiB: the peak of each of {ranks} ranks." if ranks > 1 else "MiB: the peak of the process."
    for phase in [phase for phase in phases if "time" in phase]:
        time = phase["time"]
        if time["seconds"] is None:
            yield f"{phase['phase']} has no minutes: {time['reason']}."
            continue
        part = f"{time['examples']} of the" if time["examples"] < time["micro_batch"] else "all"
        where = f"{time['device']}, {time['threads']} thread{'s' * (time['threads'] > 1)}"
        batches = f"{time['batches']} micro-batches, {part} {time['micro_batch']} examples of each"
        yield f"{phase['phase']} is measured by forwards and backwards of {batches}, on {where}."
    yield "On top come the optimizer's steps, evaluations, saves, and what is computed once before the first step."
    yield "--dry_run json prints all of it: both files as resolved, parameter groups, memory by part."
