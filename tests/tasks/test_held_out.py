"""The held-out share of the training rows: which rows, under which cache, with which score, and its mistakes."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from ds_trainer.models.folders import train_tokenizer
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.tasks.data import Examples, held_out_and_rest
from ds_trainer.tasks.registry import build_task, check_data_files, training_texts
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
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)
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
    files = {"data_dir": str(tmp_path), "train_file": "train.csv", "validation_file": "dev.csv"}
    return TextSpec(name="text", text_columns=["text"], label_column="label", **files)


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


def test_limits_and_keys_are_of_each_part_alone(build: Any, caplog: pytest.LogCaptureFixture) -> None:
    """max_train_samples thins what is left to train on; each share has its cache, and 0 changes nothing."""
    caplog.set_level("INFO", logger="ds_trainer")
    whole = build(held_out=0.2)
    limited = build(held_out=0.2, max_train_samples=10, max_eval_samples=2)
    assert texts(limited, "train") == texts(whole, "train")[::4]
    assert texts(limited, "held_out") == texts(whole, "held_out")
    assert "train.csv: 50 lines kept; 40 examples" in caplog.text
    tasks = [build(), build(held_out=0.1), build(held_out=0.101), build(held_out=0.1, max_train_samples=9)]
    assert len({task.key("train") for task in tasks}) == 4
    assert len({task.key(split) for task in tasks[1:3] for split in ("train", "held_out")}) == 4
    assert tasks[1].key("held_out") == tasks[3].key("held_out")
    assert build().key("train") == build(held_out=0.0).key("train")
    assert whole.key("validation") == build().key("validation")
    assert texts(build(max_train_samples=5), "train") == [words(n) for n in range(0, ROWS, 10)]
    with pytest.raises(ValueError, match=r"set task\.held_out to their share, such as 0\.02"):
        build().examples("held_out")
    with pytest.raises(ValueError, match=r"task\.held_out: unknown key"):
        parse_task({"name": "squad", "held_out": 0.02})
    for share in (-0.1, 1, "0.02", None, math.nan):
        with pytest.raises(ValueError, match=r"^task\.held_out: "):
            parse_task({"name": "sst2", "held_out": share})


def test_the_held_out_part_is_scored_by_its_own_labels(build: Any) -> None:
    """Answers by position in the held-out part; logits that are not finite are refused by the split's name."""
    task = build(held_out=0.2)
    batch = task.collate(task.examples("held_out"), range(10))
    logits = torch.eye(2)[batch.labels]
    answers = task.answers(SimpleNamespace(logits=logits), batch)
    assert task.score("held_out", answers) == {"accuracy": 1.0}
    wrong = {0: np.float32([0, 1]), 9: np.float32([1, 0])}
    assert task.score("held_out", answers | wrong) == {"accuracy": pytest.approx(0.8)}
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
