"""The held-out share of the training rows: which rows, under which cache, with which score, and its mistakes."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.launching import SHARED
from transformers import BertConfig, BertModel

from ds_trainer.config.recipe import TextSpec, parse_task
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.tasks.data import Examples
from ds_trainer.tasks.held_out import held_out_and_rest
from ds_trainer.tasks.registry import build_task, check_data_files, training_texts
from ds_trainer.tasks.text import docstrings
from ds_trainer.tasks.text.text_data import read_split
from ds_trainer.tasks.text.text_task import TextTask

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
ROWS = 50


def words(number: int) -> str:
    """A text of its own for each number: its digits."""
    return " ".join(DIGITS[int(digit)] for digit in str(number))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = train_tokenizer([*DIGITS, "and"] * 5, 80, True)
    config = BertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def spec(tmp_path: Path) -> TextSpec:
    """50 training rows of distinct texts, sorted by label as a trap, and 6 to validate."""
    for file, numbers in (("train.csv", range(ROWS)), ("dev.csv", range(100, 106))):
        rows = [f"{words(n)},and {words(n)},{'a' if place < len(numbers) / 2 else 'b'},{n / 10}\n"
                for place, n in enumerate(numbers)]  # fmt: skip
        (tmp_path / file).write_text("text,second,label,score\n" + "".join(rows), encoding="utf-8")
    return TextSpec(
        name="text",
        data_dir=str(tmp_path),
        text_columns=["text"],
        label_column="label",
        train_file="train.csv",
        validation_file="dev.csv",
    )


@pytest.fixture
def build(spec: TextSpec, encoder: Path, tmp_path: Path) -> Any:
    """The task of `spec` with some fields changed; the cache is the test's own."""

    def of(**fields: Any) -> TextTask:
        changed = TextSpec(**(spec.model_dump() | fields))
        task = build_task(changed, encoder, tmp_path / "cache")
        assert isinstance(task, TextTask)
        return task

    return of


def texts(task: TextTask, split: str) -> list[str]:
    examples = task.examples(split)
    rows = [examples.row(position)["input_ids"] for position in range(len(examples))]
    return task.tokenizer.batch_decode(rows, skip_special_tokens=True)


def equal(one: Examples, other: Examples) -> bool:
    columns = ({"offsets": each.offsets} | dict(each.tokens) | dict(each.fields) for each in (one, other))
    first, second = columns
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("count", [1, 7, 1000])
@pytest.mark.parametrize("share", [0.0, 0.001, 1 / 3, 0.999])
def test_the_two_parts_are_disjoint_complete_and_ascending(count: int, share: float) -> None:
    """Each position is in one part; the held-out ones are round(share * count)."""
    held_out, left = held_out_and_rest(count, share)
    assert sorted([*held_out, *left]) == list(range(count))
    assert len(held_out) == round(share * count)
    assert held_out == sorted(held_out)
    assert left == sorted(left)


def test_a_file_that_alternates_is_held_out_in_both_its_classes() -> None:
    """Of 1,000 rows whose classes take turns, 2% held out are not of one class."""
    held_out, _ = held_out_and_rest(1000, 0.02)
    assert {position % 2 for position in held_out} == {0, 1}


@pytest.mark.parametrize("share", [0.02, 0.5, 0.98])
def test_each_training_text_is_in_one_part_in_the_order_of_the_file(share: float, build: Any) -> None:
    """No text is in both, none is lost, and neither part is shuffled."""
    task = build(held_out=share)
    train, held_out = texts(task, "train"), texts(task, "held_out")
    whole = [words(number) for number in range(ROWS)]
    assert not set(train) & set(held_out)
    assert len(held_out) == round(share * ROWS)
    assert train == [text for text in whole if text in set(train)]
    assert held_out == [text for text in whole if text in set(held_out)]
    assert sorted(train + held_out) == sorted(whole)


def test_labels_stay_with_their_texts_and_a_sorted_file_gives_both_classes(build: Any) -> None:
    """Of a file sorted by label both classes are held out; a text keeps its own label."""
    task = build(held_out=0.2)
    for split in ("train", "held_out"):
        labels = task.examples(split).fields["labels"].tolist()
        numbers = [[words(n) for n in range(ROWS)].index(text) for text in texts(task, split)]
        assert labels == [int(number >= ROWS // 2) for number in numbers]
    assert set(task.examples("held_out").fields["labels"].tolist()) == {0, 1}


def test_two_builds_have_the_same_parts(build: Any, encoder: Path, spec: TextSpec, tmp_path: Path) -> None:
    """A second task with a cache of its own comes out equal: nothing is drawn by chance."""
    first = build(held_out=0.3)
    second = build_task(TextSpec(**(spec.model_dump() | {"held_out": 0.3})), encoder, tmp_path / "another")
    for split in ("train", "held_out"):
        assert first.key(split) == second.key(split)
        assert equal(first.examples(split), second.examples(split))


def test_limits_are_for_what_is_left_to_train_on(build: Any) -> None:
    """max_train_samples thins the training part alone, after the held-out rows are taken; max_eval_samples neither."""
    whole = build(held_out=0.2)
    limited = build(held_out=0.2, max_train_samples=10, max_eval_samples=2)
    assert texts(limited, "train") == texts(whole, "train")[::4]
    assert texts(limited, "held_out") == texts(whole, "held_out")
    assert len(limited.examples("held_out")) == 10
    assert len(build(held_out=0.2, max_train_samples=1000).examples("train")) == 40


def test_the_held_out_part_is_scored_by_its_own_labels(build: Any) -> None:
    """Answers by position in the held-out part; logits that are not finite are refused by the split's name."""
    task = build(held_out=0.2)
    batch = task.collate(task.examples("held_out"), range(10))
    logits = torch.eye(2)[batch.labels]
    answers = task.answers(SimpleNamespace(logits=logits), batch)
    assert task.score("held_out", answers) == {"accuracy": 1.0}
    assert task.score("held_out", answers | {0: 1, 9: 0}) == {"accuracy": pytest.approx(0.8)}
    logits[3] = math.nan
    with pytest.raises(ValueError, match=r"held_out: .* not finite .* for 1 of 10 examples"):
        task.score("held_out", task.answers(SimpleNamespace(logits=logits), batch))


def test_the_held_out_part_can_be_scored_in_place_of_the_evaluation_set(build: Any, tmp_path: Path) -> None:
    """It is the only split to evaluate on, and the file of the evaluation set need not be there."""
    (tmp_path / "dev.csv").unlink()
    task = build(held_out=0.2, score_held_out=True)
    assert task.splits == ("held_out",)
    assert len(task.examples("held_out")) == 10
    assert check_data_files(task.spec) == []
    assert "dev.csv" in check_data_files(task.spec.model_copy(update={"score_held_out": False}))[0]


def test_scores_of_a_regression_are_parted_with_their_texts(build: Any) -> None:
    """The values to predict are those of the rows; the held-out ones have correlations."""
    task = build(held_out=0.2, regression=True, label_column="score")
    held_out, _ = held_out_and_rest(ROWS, 0.2)
    values = task.examples("held_out").fields["labels"]
    np.testing.assert_allclose(values, np.array(held_out) / 10, rtol=1e-6)
    assert task.score("held_out", dict(enumerate(values.tolist())))["pearson"] == pytest.approx(1.0)
    assert len(task.examples("train")) == 40


def test_both_texts_of_a_pair_go_to_one_part(build: Any) -> None:
    """A pair is not torn: its second text says the number of its first."""
    task = build(held_out=0.3, text_columns=["text", "second"])
    found = texts(task, "train") + texts(task, "held_out")
    assert sorted(found) == sorted(f"{words(n)} and {words(n)}" for n in range(ROWS))
    assert len(texts(task, "held_out")) == 15


def test_glue_files_have_a_held_out_part(encoder: Path, tmp_path: Path) -> None:
    """By its name, without a file of its own; both evaluation splits of MNLI stay whole."""
    (tmp_path / "MNLI").mkdir()
    rows = "".join(f"{words(n)}\tand {words(n)}\t{('entailment', 'neutral')[n % 2]}\n" for n in range(30))
    for file in ("train", "dev_matched", "dev_mismatched"):
        (tmp_path / "MNLI" / f"{file}.tsv").write_text(f"sentence1\tsentence2\tgold_label\n{rows}", encoding="utf-8")
    task = build_task(TextSpec(name="mnli", data_dir=str(tmp_path), held_out=0.1), encoder, tmp_path / "cache")
    sizes = {split: len(task.examples(split)) for split in ("train", "held_out", *task.splits)}
    assert sizes == {"train": 27, "held_out": 3, "validation": 30, "validation_mismatched": 30}


def test_the_embedded_docstrings_have_a_held_out_part(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task without files parts its training rows, too."""
    pairs = [(words(n), docstrings.PACKAGES[n % 5]) for n in range(500)]
    monkeypatch.setattr(docstrings, "extracted", lambda: {"train": pairs})
    labels = [package for _, package in pairs]
    task = build_task(TextSpec(held_out=0.02, max_train_samples=50), encoder, tmp_path / "cache")
    held_out = task.examples("held_out")
    assert len(task.examples("train")) == 50
    assert len(held_out) == round(0.02 * len(labels))
    positions, _ = held_out_and_rest(len(labels), 0.02)
    assert [task._task_labels[label] for label in held_out.fields["labels"]] == [labels[place] for place in positions]


def test_classes_are_those_of_all_training_rows(build: Any, spec: TextSpec, tmp_path: Path) -> None:
    """A class whose only row is held out keeps its place: the head does not depend on the share."""
    path = tmp_path / "train.csv"
    header, *rows = path.read_text(encoding="utf-8").splitlines()
    (place,), _ = held_out_and_rest(ROWS, 0.02)
    rows[place] = rows[place].replace(",a,", ",c,").replace(",b,", ",c,")
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    task = build(held_out=0.02)
    assert task.label_names == ("a", "b", "c")
    assert task.examples("held_out").fields["labels"].tolist() == [2]
    assert 2 not in task.examples("train").fields["labels"]
    assert len(training_texts(task.spec)) == ROWS


def test_a_share_of_zero_changes_nothing(build: Any, spec: TextSpec) -> None:
    """Without the field, or with 0, training has every row, and the evaluation splits never change."""
    assert texts(build(), "train") == [words(n) for n in range(ROWS)]
    assert build().key("train") == build(held_out=0.0).key("train")
    assert equal(build().examples("train"), build(held_out=0).examples("train"))
    assert texts(build(max_train_samples=5), "train") == [words(n) for n in range(0, ROWS, 10)]
    task = build(held_out=0.5)
    assert task.splits == ("validation",)
    assert task.key("validation") == build().key("validation")
    assert len(task.examples("validation")) == 6


def test_each_share_and_part_has_a_cache_of_its_own(build: Any) -> None:
    """Two shares never read each other's rows, even where they hold out equally many."""
    tasks = [build(), build(held_out=0.1), build(held_out=0.101), build(held_out=0.1, max_train_samples=9)]
    assert len({task.key("train") for task in tasks}) == 4
    assert len({task.key(split) for task in tasks[1:3] for split in ("train", "held_out")}) == 4
    assert tasks[1].key("held_out") == tasks[3].key("held_out")


def test_the_held_out_examples_have_an_identity(build: Any, spec: TextSpec, tmp_path: Path) -> None:
    """Another share, file or column is another; how examples are read, cut, limited or evaluated is none of it."""
    key = build(held_out=0.1).held_out_key()
    same = [
        {"max_seq_length": 16, "pad_to_multiple_of": 8},
        {"max_train_samples": 9, "max_eval_samples": 2},
        {"metrics": ["matthews"], "validation_file": "train.csv"},
    ]
    assert {build(held_out=0.1, **fields).held_out_key() for fields in same} == {key}
    others = [{"held_out": 0.101}, {"text_columns": ["text", "second"]}, {"train_file": "dev.csv"}]
    assert len({key, *(build(**{"held_out": 0.1} | fields).held_out_key() for fields in others)}) == 4
    assert build().held_out_key() == ""
    rows = (tmp_path / "train.csv").read_text(encoding="utf-8")
    (tmp_path / "copy.csv").write_text(rows, encoding="utf-8")
    assert build(held_out=0.1, train_file="copy.csv").held_out_key() == key
    (tmp_path / "train.csv").write_text(rows + "zero zero,and zero,a,0\n", encoding="utf-8")
    assert build(held_out=0.1).held_out_key() != key


def test_progress_names_the_part(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The log says how many examples are held out and how many are left."""
    caplog.set_level("INFO", logger="ds_trainer")
    task = build(held_out=0.1)
    task.examples("train"), task.examples("held_out")
    assert "train.csv: 50 lines kept; 45 examples" in caplog.text
    assert "50 lines kept; 5 examples" in caplog.text


def test_asking_for_what_is_not_held_out_says_what_to_set(build: Any) -> None:
    """Without a share there is no such split."""
    with pytest.raises(ValueError, match=r"set task\.held_out to their share, such as 0\.02"):
        build().examples("held_out")


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize(
    ("share", "message"),
    [
        (0.001, r"0\.001, and of the 50 .*train\.csv none would be held out: set task\.held_out to 0\.02 or more"),
        (0.999, r"0\.999, and of the 50 .*train\.csv none would be used for training: set task\.held_out lower"),
    ],
)
def test_a_share_that_leaves_a_part_empty_is_refused_by_both(
    split: str, share: float, message: str, build: Any
) -> None:
    """Training tells it, before it has cost anything, with the number of examples and what to set."""
    with pytest.raises(ValueError, match=message):
        build(held_out=share).examples(split)
    assert len(build(held_out=0.02).examples("held_out")) == 1


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (-0.1, "greater than or equal to 0"),
        (1.0, "less than 1"),
        (1, "less than 1"),
        (20, "less than 1"),
        ("0.02", "valid number"),
        (True, "valid number"),
        (None, "valid number"),
        (math.nan, "finite number"),
        (math.inf, "finite number"),
    ],
)
def test_what_is_no_share_is_refused(share: Any, message: str) -> None:
    """In a recipe by the field's path, with what was found; in Python as pydantic does."""
    with pytest.raises(ValueError, match=rf"^task\.held_out: .*{message}.*found"):
        parse_task({"name": "sst2", "held_out": share})
    with pytest.raises(ValidationError, match=message):
        TextSpec(held_out=share)


@pytest.mark.parametrize("name", ["squad", "mlm"])
def test_other_families_have_no_such_field(name: str) -> None:
    """A share that would be ignored is an unknown key."""
    with pytest.raises(ValueError, match=r"task\.held_out: unknown key"):
        parse_task({"name": name, "held_out": 0.02})


@pytest.mark.real
@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="no ../shared/data")
def test_two_percent_of_sst2_are_balanced_as_the_whole() -> None:
    """1,347 of the 67,349 rows, the share of positive ones within 3 points of the whole."""
    rows = read_split(TextSpec(name="sst2", data_dir=str(SHARED / "data")), "train").rows
    labels = np.array([row.label == "positive" for row in rows])
    held_out, rest = held_out_and_rest(len(rows), 0.02)
    assert (len(held_out), len(rest)) == (1_347, 67_349 - 1_347)
    assert labels[held_out].mean() == pytest.approx(labels.mean(), abs=0.03)
