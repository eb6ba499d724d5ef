"""What all tasks have in common: reading, held-out rows, caches and their keys, and the table of families."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

import pytest
from support.launching import run_python
from transformers import BertConfig, BertModel

from ds_trainer.models.folders import train_tokenizer
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.recipe.task_specs import FAMILIES, LabelledSpec, TextSpec
from ds_trainer.tasks.data import part_of
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


@pytest.mark.parametrize("share", [0.001, 0.02, 0.999])
def test_the_two_parts_are_disjoint_complete_and_ascending(share: float) -> None:
    """Each of 1,000 rows is in one part; round(share * 1000) are held out, and not all of one class."""
    rows, spec = list(range(1000)), LabelledSpec(name="text", held_out=share)
    held_out, rest = (part_of(spec, split, rows, "a.csv") for split in ("held_out", "train"))
    assert sorted([*held_out, *rest]) == rows
    assert len(held_out) == round(share * 1000)
    assert (held_out, rest) == (sorted(held_out), sorted(rest))
    if share == 0.02:  # of a file whose classes alternate
        assert {row % 2 for row in held_out} == {0, 1}


def test_a_share_that_leaves_a_part_empty_is_refused_by_both() -> None:
    """Training tells it, before it has cost anything, with the number of examples and what to set."""
    for share, message in (
        (0.001, r"0\.001, and of the 50 .*a\.csv none would be held out: set task\.held_out to 0\.02 or more"),
        (0.999, r"0\.999, and of the 50 .*a\.csv none would be used for training: set task\.held_out lower"),
    ):
        for split in ("train", "held_out"):
            with pytest.raises(ValueError, match=message):
                part_of(LabelledSpec(name="text", held_out=share), split, list(range(ROWS)), "a.csv")


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
    [place] = part_of(LabelledSpec(name="text", held_out=0.02), "held_out", list(range(ROWS)), "")
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


def test_the_key_of_the_cache_follows_what_the_tokens_depend_on(
    build: Any, spec: TextSpec, encoder: Path, tmp_path: Path
) -> None:
    """Another length, file content or tokenizer is another cache; how batches are padded is none of it."""
    BertModel.from_pretrained(encoder).save_pretrained(tmp_path / "other")
    train_tokenizer(DIGITS, 40, True).save_pretrained(tmp_path / "other")
    other = build_task(spec, tmp_path / "other", tmp_path / "cache").key("train")
    key = build().key("train")
    assert key == build(pad_to_multiple_of=8, max_eval_samples=2, metrics=["matthews"]).key("train")
    keys = {key, other, *(build(**fields).key("train") for fields in ({"max_seq_length": 5}, {"max_train_samples": 2}))}
    (tmp_path / "train.csv").write_text("text,label\nzero,a\none,b\n", encoding="utf-8")
    assert len(keys | {build().key("train")}) == 5


UNHASHED = {
    "text": {"header", "quoting", "missing", "multi_label", "positive_class", "class_weights", "metrics"},
    "squad": {"name", "null_score_diff_threshold", "n_best_size", "max_answer_length"},
    "lm": {"mlm_mask_prop", "word_mask", "word_keep", "word_rand", "mlm_smoothing", "head_positions"},
    "token": set(),
    "embedding": {"train", "validation", "scale", "matryoshka_dims", "pooling", "normalize", "prompts"},
    "rerank": {"train", "validation", "loss"},
}
"""The fields of each family that do not decide on the tokens, or are in the hash of the file or the labels, or in
`hashed_values`."""


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_a_family_is_in_the_key_or_known_not_to_matter(name: str) -> None:
    """A field that is forgotten would give a run the tokens of another."""
    task, spec = pkgutil.resolve_name(FAMILIES[name].task), FAMILIES[name].spec
    fields = (spec.model_fields.keys() - LabelledSpec.model_fields.keys()) | {"name"}
    assert fields == {*task.hashed_fields, *task.hashed_if_set} | UNHASHED[name]
    assert not {*task.hashed_fields, *task.hashed_if_set} & UNHASHED[name]


def test_data_files_are_checked_without_torch() -> None:
    code = (
        "import pkgutil, sys, ds_trainer.tasks.registry; from ds_trainer.recipe.task_specs import FAMILIES\n"
        "[pkgutil.resolve_name(each.data) for each in FAMILIES.values()]; print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "set()", done.stderr
