"""Every script of `benchmarks/` runs: a round of small models each, whose figures nobody judges."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.exit_folders import ENTROPY, make_folder
from support.launching import ROOT, SHARED, Done, environment, run_script

from tools.markers import write_rows
from tools.write_speed_table import table

_COUNTS = """against_hf_trainer 2, against_pruners 2, cut_quality 5, cut_speed 3, decoder_cuts 6, exit_speed 14,
    faults 0, front_page 17, gpu 37, grad_cache 2, length_grouping 4, lm_head 2, loop_overhead 1, mask_cost 4,
    memory_model 2, openmp_spinning 2, packing 3, recipes 0, speculation 8, structured_speed 11, student_speed 1,
    teacher_cache 1, top_k_cache 8, tune 1"""
FIGURES = {name: int(count) for name, count in map(str.split, _COUNTS.split(","))}
"""How many figures each prints; `faults.py` and `recipes.py` print tables."""
if not SHARED.is_dir():
    FIGURES |= {"length_grouping": 0, "packing": 0}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, Done]:
    """How each script ended, by its name."""
    folder = tmp_path_factory.mktemp("bench")
    model = str(make_folder(folder / "model", ["negative", "positive"], ENTROPY))
    rows = [f"the {word} is old\t{label}" for label, word in enumerate(("plum", "saw"))] * 16
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    two = [model, model, str(folder)]
    arguments = {"exit_speed": [model, str(folder)], "student_speed": two}
    arguments["decoder_cuts"] = [str(folder / "decoder_cuts")]
    cuts = ["--output", str(folder / "cut_quality"), "--data_dir", str(folder)]
    arguments |= {"cut_quality": cuts}
    write_embedding_files(folder / "embedding")
    arguments["front_page"] = ["--output", str(folder / "front_page"), "--data_dir", str(folder / "embedding")]
    for name in ("against_pruners", "recipes"):
        arguments[name] = ["--output", str(folder / name), "--data_dir", str(folder)]
    return {
        name: run_script(f"benchmarks/{name}.py", "--quick", *arguments.get(name, []), timeout=420) for name in FIGURES
    }


def write_embedding_files(folder: Path) -> None:
    """Write the files of the front page's model, each in the form of the real one."""
    for name in ("stsb", "glue/SST-2", "squad", "wikitext-2"):
        (folder / name).mkdir(parents=True)
    words = ["plum", "saw", "slaw", "maps", "pulp", "wasp", "lamp", "laps"]  # of few letters, which a cut must keep
    pairs = [f"g\tf\ty\t0\t{place % 5}\told {one}\tall {one}" for place, one in enumerate(words * 4)]
    for name in ("train", "dev", "test"):
        (folder / f"stsb/sts-{name}.csv").write_text("\n".join(pairs) + "\n")
    (folder / "glue/SST-2/train.tsv").write_text("sentence\tlabel\n" + "".join(f"a {one}\t0\n" for one in words))
    (folder / "wikitext-2/valid.txt").write_text("\n".join(f"small {one}" for one in words))
    answer = {"text": "old", "answer_start": 0}
    paragraphs = [
        {"context": f"old {one}", "qas": [{"id": one, "question": f"a {one}", "answers": [answer]}]} for one in words
    ]
    for name in ("train", "dev"):
        (folder / f"squad/{name}-v1.1.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))


def test_none_is_forgotten(tmp_path):
    """`figures.py` is what they share; `all.sh` runs those it is given, and keeps what they print."""
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} == {*FIGURES, "figures"}
    text = (ROOT / "benchmarks/all.sh").read_text()
    assert [name for name in FIGURES if name not in text] == []
    python = tmp_path / "python"
    line = '{"name": "a", "value": 1.5, "bar": null, "at_least": false, "holds": true}'
    python.write_text(f"#!/bin/bash\n[ $1 = -c ] || echo '{line}'\n")
    python.chmod(0o755)
    words = ["bash", str(ROOT / "benchmarks/all.sh"), str(tmp_path / "out"), "mask_cost", "faults"]
    subprocess.run(words, env=environment() | {"PYTHON": str(python)}, capture_output=True, check=True)
    figures = [json.loads(line) for line in (tmp_path / "out/figures.jsonl").read_text().splitlines()]
    assert [figure["command"].split()[1] for figure in figures] == ["benchmarks/mask_cost.py", "benchmarks/faults.py"]


@pytest.fixture
def script(monkeypatch):
    """Import a script of benchmarks by its name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def test_a_bar_is_a_limit_on_its_side(script):
    """The mean over seeds is held against it: a score at least, or the points that are lost at most."""
    figures, quality = script("figures"), script("cut_quality")
    at_most, at_least = ([figures.Figure("a", value, 1.0, side) for value in (0.9, 1.1)] for side in (False, True))
    assert [figure.holds for figure in (*at_most, *at_least)] == [True, False, False, True]
    scores = {"finetune": [90.0, 92.0], "half": [88.0, 92.0], "half, one shot": [80.0, 82.0]}
    limits = ({"lost": 1.5}, {"lost": 1.5, "one_shot": True}, {"score": 91.0})
    bars = [quality.Bar("half", **limit) for limit in limits]
    judged = [quality.judged(bar, scores, "sst2") for bar in bars]
    assert [(figure.value, figure.holds) for figure in judged] == [(1.0, True), (10.0, False), (90.0, False)]


def test_the_peer_that_is_written_from_a_paper_loses_least_within_its_budget(script, monkeypatch):
    """No other number of heads has more information for as many weights; exchanges keep the number, and lose less."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "pruners")
    kwon, generator = script("by_kwon"), torch.Generator().manual_seed(0)
    norm, outer = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
    blocks = [kwon.Block(outer, norm, masks, weights) for masks, weights in ((4, 64), (8, 16))] * 2
    gradients = [torch.randn(32, block.masks, generator=generator) for block in blocks]
    fisher = [each.square().sum(0) for each in gradients]
    masks = kwon.search(blocks, fisher, 0.5)
    assert sum(block.weights * int(mask.sum()) for block, mask in zip(blocks, masks, strict=True)) <= 384
    heads, neurons = (torch.cat(fisher[kind::2]).sort(descending=True).values for kind in (0, 1))
    most = max(float(heads[:n].sum() + neurons[: (384 - 64 * n) // 16].sum()) for n in range(7))
    assert sum(float(each @ mask) for each, mask in zip(fisher, masks, strict=True)) == pytest.approx(most)
    lost = []
    for mask, each in zip(masks, gradients, strict=True):
        exchanged = kwon.rearranged(mask, each)
        assert exchanged.sum() == mask.sum()
        lost.append([float((each @ (1 - one)).square().sum()) for one in (exchanged, mask)])
    assert all(after <= before for after, before in lost)
    assert any(after < before for after, before in lost)


def test_the_table_has_the_newest_figures_and_their_commands():
    """Of a figure that was measured again the last line counts; bars show their direction, and what does not hold."""
    figure = {"name": "a", "value": 1.5, "bar": 2.0, "at_least": True, "holds": False, "command": "python a.py"}
    other, apart = figure | {"name": "b", "bar": None}, figure | {"command": "python b.py", "at_least": False}
    newest = figure | {"value": 2.5, "holds": True}
    assert table(map(json.dumps, (figure, other, apart, newest))).splitlines()[2:] == [
        "| a | 2.5 | >= 2 | yes | `python a.py` |",
        "| b | 1.5 | | |  |",
        "| a | 1.5 | <= 2 | **no** | `python b.py` |",
    ]


def test_rows_take_the_place_of_those_with_their_first_cell(tmp_path):
    """Rows of what was not run again stay, and so does the page around the table."""
    page, table = tmp_path / "page.md", "| run | score |\n| --- | --- |\n"
    page.write_text(f"a\n<!-- t:begin -->\n{table}| x | 1 |\n| x | 2 |\n| y | 3 |\n<!-- t:end -->\nb\n")
    write_rows(page, "t", f"{table}| z | 5 |\n| x | 4 |")
    after = "| x | 4 |\n| y | 3 |\n| z | 5 |\n"
    assert page.read_text() == f"a\n<!-- t:begin -->\n{table}{after}<!-- t:end -->\nb\n"
    with pytest.raises(ValueError, match="add both"):
        write_rows(page, "u", table)


@pytest.mark.parametrize("name", FIGURES)
def test_a_script_runs_to_its_end_and_prints_its_figures(name, outcomes):
    done = outcomes[name]
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert len([json.loads(line)["value"] for line in lines]) == FIGURES[name], done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_script_says_so(tmp_path):
    """With one message and the exit code of a user's mistake, before anything is installed."""
    words, variables = ["bash", str(ROOT / "tests/gpu/run.sh"), str(tmp_path / "out")], {"PYTHON": sys.executable}
    done = subprocess.run(words, env=environment() | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no torch that sees a GPU: install torch for CUDA" in done.stderr
    assert not any((tmp_path / "out").iterdir())
