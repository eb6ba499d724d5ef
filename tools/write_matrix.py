"""Write what works with what, into docs/matrix.md and the README: every "yes" is a test that pytest has collected.

It takes half a minute.

python tools/write_matrix.py
"""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "matrix.md"
README = ROOT / "README.md"
"""Both have the markers `<!-- matrix:begin -->` and `<!-- matrix:end -->`; the README has the tables in short."""
FAMILIES = {
    "BERT": "bert|cls",
    "RoBERTa": "roberta",
    "ELECTRA": "electra",
    "DistilBERT": "distilbert",
    "DeBERTa-v2": "deberta-v2|deberta",
    "ModernBERT": "modernbert",
    "GPT-2": "gpt2",
    "Llama": "llama",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "OLMo2": "olmo2",
    "Mistral": "mistral",
    "Gemma": "gemma",
}
"""Names of families, and what tests call them. Below the encoders are the decoders."""
DECODERS = list(FAMILIES)[6:]
OF_MODELS = {
    "masked weights": "tests/techniques/test_prune.py::test_any_model_is_masked_trained_and_folded",
    "masked heads, neurons": "tests/techniques/test_prune.py::test_heads_and_neurons_are_masked_and_folded",
    "zeros cut out": "tests/models/test_shrink.py::test_the_cut_model_computes",
    "cut of heads, neurons": "tests/cuts/test_blocks.py::test_every_family_is_cut",
    "cut of weights": "tests/cuts/test_weights.py::test_every_matrix_keeps_its_share_of_every_family",
    "cut of layers, width": "tests/cuts/test_sizes.py::test_a_cut_(decoder|encoder)_is_a_plain_folder",
    "cut of tokens": "tests/cuts/test_vocabulary.py::test_logits_of_tokens_that_stay",
    "student of its layers": "tests/models/test_student.py::test_layers_of_any_family_are_copied",
    "exits": "tests/techniques/test_early_exit.py::test_a_batch_leaves_as_its_texts_do_alone",
    "ONNX": "tests/deploy/test_onnx_file.py::test_families",
}
"""What is done with a model, and the tests of it by family."""
MADE_FOR = {"exits": "encoders"}
"""What is made for one kind of family alone."""
_OF_BLOCKS = ("masked heads, neurons", "zeros cut out", "cut of heads, neurons")
PARTLY = {("DeBERTa-v2", column): "neurons" for column in _OF_BLOCKS}
"""Where only a part of it is done."""
TASKS = ("classes", "values", "tags", "SQuAD", "MLM", "CLM")
_DISTILL_RUN = "tests/integration/test_distill_run.py::test_every_combination_trains[{}]"
_CALIBRATED = "tests/cuts/test_calibration.py::test_every_kind_of_task_calibrates_a_cut[{}]"
_EXITS_RUN = "tests/integration/test_exits_run.py::test_the_folder_is_a_model_that_exits[{}]"
_COMBINED = [_DISTILL_RUN.format(task) for task in ("squad", "mlm", "clm")]
OF_TASKS = {
    "prune": (
        _DISTILL_RUN.format("text"),
        "",
        "tests/integration/test_resume.py::test_records_and_weights_are_those_of_an_uninterrupted_run[ner-zero2-bf16]",
        *_COMBINED,
    ),
    "distill": (
        _DISTILL_RUN.format("text"),
        "tests/techniques/test_distill.py::test_a_regression_distils_by_squared_error",
        "tests/integration/test_cut_run.py::test_the_results_have_the_cut_and_its_scores",
        *_COMBINED,
    ),
    "exits": (
        _EXITS_RUN.format("all"),
        "tests/techniques/test_exits.py::test_heads_learn_the_sum_of_their_losses_or_a_mean_weighted_by_layer[joint-None]",
        _EXITS_RUN.format("stages"),
        *["labels only"] * 3,
    ),
    "cut": (
        _CALIBRATED.format("classes"),
        _CALIBRATED.format("values"),
        "tests/integration/test_cut_run.py::test_the_results_have_the_cut_and_its_scores",
        *[_CALIBRATED.format(task) for task in ("squad", "mlm", "clm")],
    ),
    "ONNX": (
        "tests/deploy/test_onnx_file.py::test_batch_and_length_are_free[cls]",
        "",
        "tests/deploy/test_onnx_file.py::test_families[modernbert]",
        "tests/cli/test_export_command.py::test_squad_is_scored_by_the_files",
        "tests/deploy/test_onnx_file.py::test_families[roberta]",
        "tests/deploy/test_onnx_file.py::test_families[gpt2]",
    ),
}
"""For each task the test that proves a technique, or a word on why there is none."""
TOGETHER = {
    "prune": "topK|global|threshold|sigmoied|magnitude|l0|static|hybrid.*|mixed|block",
    "distill": "distill|layers|partitioned|whole|filled",
    "exits": "exits-.*|heads",
    "prune + distill": "both|plain",
    "prune + distill + exits": "all",
}
"""Techniques, alone and together, and what the tests of ZeRO call them."""
PRECISIONS = ("fp32", "bf16", "fp16", "autocast")
ZERO = (
    r"tests/integration/test_zero.py::test_losses_equal_the_reference\[2-(recomputed-)?(?:{})-?zero(\d)-{}\]",
    r"tests/integration/test_resume.py::test_records_and_weights_are_those.*\[(?:{})-?zero(\d)-{}\]",
    r"tests/integration/test_resume.py::test_a_checkpoint_becomes_what.*\[(?:{})-?zero(\d)-{}\]",
)


def collected() -> list[str]:
    """Return the id of every test, those of `--exhaustive` included."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "--exhaustive", "-q", "tests"]
    lines = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if "::" in line]


def proof(ids: Iterable[str], words: str, label: str = "yes") -> str:
    """Return a link to the test's module, which names the test; or the words where there is no such test."""
    path, _, name = next(iter(ids), "").partition("::")
    if not path:
        return words
    return f'[{label}]({os.path.relpath(ROOT / path, PAGE.parent)} "{name.partition("[")[0]}")'


def rows(head: str, columns: Iterable[str], cells: dict[str, list[str]]) -> str:
    titles = [head, *columns]
    lines = [titles, ["---"] * len(titles), *([name, *row] for name, row in cells.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def of_models(ids: list[str]) -> str:
    cells: dict[str, list[str]] = {}
    for family, names in FAMILIES.items():
        kind = "decoders" if family in DECODERS else "encoders"
        for column, tests in OF_MODELS.items():
            found = [test for test in ids if re.match(rf"{tests}\w*\[(.*-)?({names})([-,].*)?\]$", test)]
            made_for = MADE_FOR.get(column, kind)
            words = "–" if made_for == kind else f"{made_for} only"
            cells.setdefault(family, []).append(proof(found, words, PARTLY.get((family, column), "yes")))
    return rows("family", OF_MODELS, cells)


def of_tasks(ids: list[str]) -> str:
    missing = [test for tests in OF_TASKS.values() for test in tests if "::" in test and test not in ids]
    assert not missing, f"pytest does not collect {missing}: name another test, or say why there is none"
    cells = {
        technique: [proof([test], "") if "::" in test else test or "–" for test in tests]
        for technique, tests in OF_TASKS.items()
    }
    return rows("technique", TASKS, cells)


def of_zero(ids: list[str]) -> str:
    cells: dict[str, list[str]] = {}
    for technique, names in TOGETHER.items():
        for precision in PRECISIONS:
            patterns = [tests.format(names, precision) for tests in ZERO]
            matches = [match for test in ids for pattern in patterns if (match := re.fullmatch(pattern, test))]
            stages = sorted({match[match.lastindex or 0] for match in matches})
            cells.setdefault(technique, []).append(", ".join(stages) or "–")
    return rows("technique", PRECISIONS, cells)


def page() -> str:
    """Return the tables, each with a sentence."""
    ids, tests = collected(), os.path.relpath(ROOT / "tests", PAGE.parent)
    return f"""A "yes" leads to the module of a test that shows it, and – stands for what no test shows.

{of_models(ids)}
{of_tasks(ids)}
Stages of ZeRO at which, on two ranks, the losses are those of a plain loop in torch
([test_zero]({tests}/integration/test_zero.py)), or a run that was stopped and resumed, or exported from a checkpoint,
gives the same bits as one that was not ([test_resume]({tests}/integration/test_resume.py)):

{of_zero(ids)}"""


def short(tables: str) -> str:
    """Return the tables of the page for the README: without links; families of equal cells share a row."""
    shortened = []
    plain = re.sub(r"\[(\w+)\]\([^)]*\)", r"\1", tables)
    for table in re.findall(r"(?:^\|.*\n)+", plain, re.MULTILINE):
        head, ruler, *lines = table.splitlines()
        if head.startswith("| family"):
            names: dict[str, list[str]] = {}
            for line in lines:
                name, cells = line.removeprefix("| ").split(" | ", 1)
                names.setdefault(cells, []).append(name)
            lines = [f"| {', '.join(alike)} | {cells}" for cells, alike in names.items()]
        shortened.append("\n".join([head, ruler, *lines]) + "\n")
    return "\n".join(shortened)


if __name__ == "__main__":
    from markers import write_between

    text = page()
    write_between(PAGE, "matrix", text)
    write_between(README, "matrix", short(text))
