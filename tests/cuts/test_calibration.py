"""The examples that a cut is fitted to, for every family of tasks, and how far its answers are from the dense ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.labelled_files import SENTENCES, write_csv
from support.lm_files import LINES, SMALL, bytes_tokenizer
from support.squad_tasks import squad, with_words_only, word_pieces
from support.zeroed import randomised
from transformers import AutoModel, BertConfig, GPT2Config

from ds_trainer.cuts.calibration import calibration_of
from ds_trainer.cuts.cut import cut_model
from ds_trainer.cuts.reconstruction import reconstruction_set
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.recipe.cut_specs import CutSpec, ReconstructSpec
from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.lm.head_positions import take_head_positions
from ds_trainer.tasks.lm.lm_task import LmTask
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Task

KINDS = ("classes", "values", "mlm", "clm", "squad")


def folder_of(place: Path, tokenizer: Any, decoder: bool = False) -> Path:
    """A model of one layer."""
    torch.manual_seed(0)
    if decoder:
        config: Any = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=128)
    else:
        config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SMALL)
    for part in (AutoModel.from_config(config), tokenizer):
        part.save_pretrained(place)
    return place


def task_of(kind: str, place: Path) -> tuple[Task, Path]:
    """A task of 18 or so training examples with tokens of several lengths, and a folder of a model for it."""
    if kind in ("classes", "values"):
        source = folder_of(place / "model", train_tokenizer(SENTENCES * 5, 60, True))
        labels = ["yes", "no"] * 9 if kind == "classes" else [0.1 * number for number in range(18)]
        spec = write_csv(place, labels)
        if kind == "values":
            spec = spec.model_copy(update={"regression": True})
        return build_task(spec, source, place / "cache"), source
    if kind == "squad":
        tokenizer = word_pieces()
        source = folder_of(place / "model", tokenizer)
        return squad(place, with_words_only(0, 12), source), source
    tokenizer = train_tokenizer(LINES * 5, 150, True) if kind == "mlm" else bytes_tokenizer(False)
    source = folder_of(place / "model", tokenizer, kind == "clm")
    (place / "text.txt").write_text("\n".join(LINES * 4))
    files = {"data_dir": str(place), "train_file": "text.txt", "validation_file": "text.txt", "min_seq_length": 4}
    return LmTask(LmSpec(name=kind, **files), tokenizer, source, place / "cache"), source


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_task_calibrates_a_cut(kind: str, tmp_path: Path) -> None:
    """Single weights, the same share of blocks and one by loss; divergences are zero from itself and then are not."""
    task, source = task_of(kind, tmp_path)
    given = calibration_of(task, 512, seed=0)
    dense: Any = randomised(task.build_model(source))
    answers = given.answers(dense)
    divergences = [given.divergence(answers, answers)]
    for fields in ({"granularity": "weight"}, {"uniform": True}, {}):
        small, records = cut_model(copy.deepcopy(dense), given, CutSpec(keep=0.5, **fields))
        assert sum(record.kept for record in records) < sum(record.count for record in records)
        if kind in ("mlm", "clm") and "granularity" not in fields:
            small = take_head_positions(small)  # as the task does where it loads a folder
        divergences.append(given.divergence(answers, given.answers(small)))
    assert divergences[0] == pytest.approx(0, abs=1e-6)
    assert min(divergences[1:]) > 1e-6


def rows(batches: Any) -> list[tuple[int, ...]]:
    """The attended tokens of each example, in order."""
    return [
        tuple(tokens[mask].tolist())
        for inputs, attended in batches
        for tokens, mask in zip(inputs["input_ids"], attended, strict=True)
    ]


def test_examples_are_drawn_by_the_seed_and_dealt_out_to_the_ranks(tmp_path: Path, monkeypatch) -> None:
    """Each once; another seed draws others; those of two ranks together are those of one, in the same batches."""
    task, _ = task_of("classes", tmp_path)
    everything = calibration_of(task, 512, seed=0)
    assert sum(map(len, everything.attended)) == len(task.examples("train")) == 18
    draws = []
    for seed in (0, 0, 1):
        given = calibration_of(task, 9, seed, 3)
        draws.append(rows(zip(given.inputs, given.attended, strict=True)))
    assert draws[0] == draws[1] != draws[2]
    assert len(draws[0]) == 9
    assert list(map(len, draws[0])) == sorted(map(len, draws[0]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    parts = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        given = calibration_of(task, 9, 0, 3)
        parts.append([rows([batch]) for batch in zip(given.inputs, given.attended, strict=True)])
    assert [len(part) for part in parts] == [2, 1]
    assert [*parts[0][0], *parts[1][0], *parts[0][1]] == draws[0]


def test_layers_are_reconstructed_on_about_the_tokens_of_the_spec_in_small_batches(tmp_path: Path) -> None:
    """Half of the tokens are about half of the examples, and a step of two batches has about 256 tokens."""
    task, _ = task_of("classes", tmp_path)
    lengths = task.examples("train").lengths
    given = reconstruction_set(task, ReconstructSpec(tokens=int(lengths.sum() / 2)), seed=1)
    assert sum(map(len, given.attended)) == len(lengths) / 2
    assert {len(attended) for attended in given.attended} == {1}
    long = reconstruction_set(task, ReconstructSpec(), seed=1)
    assert len(long.attended) == len(lengths)


def test_some_examples_of_every_length_are_probed(tmp_path: Path, monkeypatch) -> None:
    """About as many as wanted, spread over the lengths; of language models only some rows of logits are held."""
    task, source = task_of("clm", tmp_path)
    monkeypatch.setattr("ds_trainer.cuts.calibration._PROBED", 8)
    monkeypatch.setattr("ds_trainer.cuts.calibration._PROBE_BATCH", 4)
    monkeypatch.setattr("ds_trainer.cuts.calibration._PROBED_ROWS", 10)
    answers = calibration_of(task, 512, 0).answers(task.build_model(source))
    assert len(answers) == 2
    assert all(10 <= len(logits) < 20 for (logits,) in answers)
