"""Tagged words from a file to a score: what is read, windows, labels, answers and entities."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from support.tiny_tokenizers import SENTENCES, byte_pairs, unigrams, word_pieces
from transformers import BertConfig, BertModel

from ds_trainer.files.reading import content_hash
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.tasks.evaluation import evaluate
from ds_trainer.tasks.registry import build_task, check_data_files, training_texts
from ds_trainer.tasks.token import token_data
from ds_trainer.tasks.token.token_task import TokenTask, entity_kinds, entity_scores

TAGS = ["O", "B-loc", "I-loc", "B-per"]
ROWS = "the\tO\nrain\tB-per\nin\tO\nthe\tB-loc\nhills\tI-loc\n\nit\tO\nrained\tO\n"


def spec_of(folder: Path, text: bytes | str, file: str = "a.conll", **fields: Any) -> Any:
    (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    files = {"data_dir": str(folder), "train_file": file, "validation_file": file}
    return parse_task({"name": "ner", "max_seq_length": 16, **files, **fields})


def read(spec: Any) -> list[tuple[list[str], list[str]]]:
    return [tuple(row.value) for row in token_data.records(spec, "train").rows()]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT without a head, and its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("bert"), word_pieces()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def build(tmp_path: Path, model_folder: Path) -> Any:
    def build(text: str = ROWS, source: Path = model_folder, **fields: Any) -> TokenTask:
        return build_task(spec_of(tmp_path, text, **fields), source, tmp_path / "cache")

    return build


# Files

ONE = [(["a", "b"], ["B-x", "O"])]
READINGS = {
    "spaces": ("a B-x\nb   O \n", ONE),
    "blank lines": ("\n \na\tB-x\r\nb\tO\n\t\n\n \t \nc\tO\n\n", [*ONE, (["c"], ["O"])]),
    "four columns": ("-DOCSTART- -X- -X- O\n\na NNP I-NP B-x\nb VBZ I-VP O\n", ONE),
    "comments": ("# id 1 de\na _ _ B-x\nb _ _ O\n\n#\n# id 2 de\nc _ _ O\n", [*ONE, (["c"], ["O"])]),
    "hashes that are words": ("#a B-x\n# O\n#b O\n", [(["#a", "#", "#b"], ["B-x", "O", "O"])]),
    "documents": (
        "#begin document (bc/x); part 000\na B-x\nb O\n#end document\n\n#begin document\nc O\n",
        [*ONE, (["c"], ["O"])],
    ),
    "hashes before the first row": (
        "#a\tO\na\tB-x\n\n#b\tO\n# c\tO\n\n#d e\n#e\tx\ty\na\tO\n",
        [(["#a", "a"], ["O", "B-x"]), (["#b", "# c"], ["O", "O"]), (["a"], ["O"])],
    ),
    "odd words": (
        '"\tO\n\u200b\tO\n\xa0\tO\n#a\tB-x\nNew York\tO\n',
        [(['"', "\u200b", "\xa0", "#a", "New York"], [*"OOO", "B-x", "O"])],
    ),
}


@pytest.mark.parametrize("case", READINGS)
def test_a_conll_file_is_read_as_stated(case: str, tmp_path: Path) -> None:
    """Tabs or spaces, blank lines of any white space, any line ends; the word is the first column, its tag the last."""
    text, expected = READINGS[case]
    spec = spec_of(tmp_path, text)
    assert read(spec) == expected
    assert check_data_files(spec) == []
    assert training_texts(spec) == ["".join(f" {word}" for word in words) for words, _ in expected]


UNIVERSAL = """# text = We are to go.
1-2\twe're\t_\t_\t_
1\twe\tPRON\tX\t_
2\tare\tAUX\tX\t_
2.1\tset\t_\t_\t_
3\tto\tPART\tX\t_

1\tgo\tVERB\tX\t_
"""


def test_the_columns_of_a_conll_file_can_be_named(tmp_path: Path) -> None:
    """By their numbers, also from the last one. Lines of CoNLL-U that are no single word are left out, and counted."""
    first = spec_of(tmp_path, "O\tthe\nB-x\train\nO\tfalls\n", word_column=-1, tag_column=0)
    assert read(first) == [(["the", "rain", "falls"], ["O", "B-x", "O"])]
    universal = spec_of(tmp_path, UNIVERSAL, word_column=1, tag_column=2)
    assert read(universal) == [(["we", "are", "to"], ["PRON", "AUX", "PART"]), (["go"], ["VERB"])]
    source = token_data.records(universal, "train")
    assert len(list(source.rows())) == 2
    left_out = "1 left out, as comments (line 1), 2 as no single word (lines 2, 5)"
    assert source.summary() == f"2 sentences kept; {left_out}"
    # its quotes are words, also where its ending is .tsv, and they would show the quoting of a table
    quotes = spec_of(tmp_path, 'a\tO\n"\tO\n\nb\tB-x\n"\tO\n', "a.tsv")
    assert read(quotes) == [(["a", '"'], ["O", "O"]), (["b", '"'], ["B-x", "O"])]
    assert token_data.records(quotes, "train").fingerprint() == content_hash(tmp_path / "a.tsv").hex()


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("a\tO\nb\n", {}, r"a\.conll, line 2: 1 fields where 2 are expected \('b'\): write the word first"),
        ("a O\nNew York O\n", {}, r"a\.conll, line 2: 3 fields where 2 are expected"),
        ("\n \t\n", {}, r"a\.conll has no examples"),
        ("a\tO\n", {"tag_column": 2}, r"word_column is 0, and tag_column 2: name two of the 2 fields, 0 to 1"),
        ("O\tthe\nB-x\train\nO\tfalls\n", {}, r"has the words 'O', 'B-x', and the tags 'the', 'rain', 'falls': name"),
        (UNIVERSAL, {}, r"a\.conll has the words '1-2', '1', '2' and 2 more, and the tags '_': name the columns"),
    ],
)
def test_a_broken_file_and_columns_that_hold_no_words_or_no_tags_are_told(
    text: str, fields: dict[str, Any], message: str, build: Any, tmp_path: Path
) -> None:
    """A tagger of words as tags would have an accuracy of 1. A broken line is known before torch is loaded."""
    with pytest.raises(ValueError, match=message):
        build(text, **fields)
    mistakes = check_data_files(spec_of(tmp_path, text, **fields))
    assert len(mistakes) == ("has the" not in message), "both splits are this file"


def test_columns_of_words_and_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON lines, and a data set of the hub, which has numbers for tags."""
    rows = [{"tokens": ["a", "b"], "tags": ["B-x", "O"], "id": 3}, {"tokens": ["c"], "tags": ["O"], "id": 4}]
    expected = [(row["tokens"], row["tags"]) for row in rows]
    spec = spec_of(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "a.jsonl", name="token")
    assert read(spec) == expected
    features = {"words": datasets.List(datasets.Value("string"))}
    features["ner_tags"] = datasets.List(datasets.ClassLabel(names=["O", "B-x"]))
    columns = {"words": [words for words, _ in expected], "ner_tags": [[1, 0], [0]]}
    dataset = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, configuration, split: dataset)
    hub = {"name": "token", "dataset": "x/y", "tokens_column": "words", "tags_column": "ner_tags"}
    assert read(parse_task(hub)) == expected
    for row, message in (
        ({"tokens": ["a", "b"], "tags": ["O"]}, r"line 1: 2 words in 'tokens', and 1 tags in 'tags'"),
        ({"tokens": "a b", "tags": ["O"]}, r"line 1: 'tokens' is text, and must be a list of texts"),
        ({"tokens": ["a"], "tags": [0]}, r"line 1: 'tags'\[0\] is a whole number, and must be text"),
    ):
        with pytest.raises(ValueError, match=message):
            read(spec_of(tmp_path, json.dumps(row), "a.jsonl", name="token"))


# Windows and labels


def test_every_word_of_a_long_sentence_is_predicted_once(build: Any) -> None:
    """10,000 words, cut into windows of at most 16 tokens; the tags come back in the order of the words."""
    words = [SENTENCES[0].split()[index % 7] for index in range(10_000)]
    tags = [TAGS[index * index % 4] for index in range(10_000)]
    task = build("".join(f"{word}\t{tag}\n" for word, tag in zip(words, tags, strict=True)))
    examples = task.examples("validation")
    assert examples.lengths.max() <= 16
    assert examples.fields["labels"].sum() == 10_000
    assert set(examples.fields["sentence"]) == {0}

    def right(batch: Any) -> Any:
        logits = torch.zeros(*batch.inputs["input_ids"].shape, len(task.label_names))
        logits.view(-1, len(task.label_names))[batch.others["head_positions"], batch.labels[:, 0]] = 1.0
        return SimpleNamespace(logits=logits)

    evaluation = evaluate(right, task, 64)
    assert evaluation.scores["f1"] == evaluation.scores["accuracy"] == 1
    lines = evaluation.files(task)["predictions.conll"].splitlines()
    assert lines == [*(f"{word}\t{tag}\t{tag}" for word, tag in zip(words, tags, strict=True))]


@pytest.mark.parametrize("everywhere", [False, True])
def test_the_loss_is_that_of_transformers(everywhere: bool, build: Any) -> None:
    """Its own model has the same mean over labels of -100 elsewhere; each word counts by its first piece, or by all."""
    task = build(ROWS.replace("rained", "moonlight"), label_all_tokens=everywhere)
    model = task.build_model(task.config.name_or_path).eval()
    examples = task.examples("train")
    batch = task.collate(examples, [0, 1])
    labels = torch.full_like(batch.mask, -100)
    labels.view(-1)[batch.others["head_positions"]] = batch.labels[:, 0]
    out = model(**batch.inputs, labels=labels)
    assert task.loss(out, batch).item() == pytest.approx(out.loss.item(), rel=1e-6)
    pieces = batch.mask.sum().item() - 4
    assert pieces > 7
    assert len(batch.labels) == task.counts(examples, batch.ids.numpy())["label"] == (pieces if everywhere else 7)
    assert [len(tags) for tags in task.answers(out, batch).values()] == [5, 2]


@pytest.mark.parametrize("tokenizer", [word_pieces, byte_pairs, unigrams])
def test_words_are_tokenised_as_they_are_behind_a_space(tokenizer: Any, build: Any, model_folder: Path) -> None:
    """Special tokens stand where the tokenizer puts them, and a word has the pieces that it has in the running text."""
    task = build()
    task.tokenizer = tokenizer()
    ids = task.tokenised("train").row(0)["input_ids"].tolist()
    text = " the rain in the hills"
    expected = task.tokenizer(text)["input_ids"]
    assert ids == expected


def test_a_word_without_pieces_is_o_and_shifts_no_other(build: Any) -> None:
    """A zero-width space or the variation selector of an emoji; also a sentence of nothing else."""
    task = build("\u200b\tB-per\nrain\tB-loc\n\ufe0f\tO\nhills\tI-loc\n\n\u200b\tO\n\nit\tB-per\n")
    examples = task.examples("validation")
    assert examples.fields["sentence"].tolist() == [0, 2]
    loc, per, inside = map(task.label_names.index, ("B-loc", "B-per", "I-loc"))
    found = task.artifacts("validation", {0: [loc, inside], 1: [per]})["predictions.conll"]
    predicted = [line.split("\t")[-1] for line in found.splitlines()]
    assert predicted == ["O", "B-loc", "O", "I-loc", "", "O", "", "B-per"]


def test_an_unknown_tag_is_told(tmp_path: Path, build: Any) -> None:
    """It names the file and the sentence, and the tags of the training file."""
    task = build()
    (tmp_path / "b.conll").write_text("a\tO\n\nb\tB-loc\nc\tI-per\n")
    task.spec = task.spec.model_copy(update={"validation_file": "b.conll"})
    with pytest.raises(ValueError, match=r"b\.conll, line 3: unknown tag 'I-per': allowed are 'O', 'B-loc'"):
        task.examples("validation")


# Scores


@pytest.mark.parametrize(
    ("gold", "predicted", "accuracy"),
    [
        ("I-per I-per O I-loc B-loc O", "I-per I-per O I-loc I-loc O", 5 / 6),
        ("B-per E-per O S-loc S-loc O", "B-per E-per O B-loc E-loc O", 4 / 6),
    ],
)
def test_entities_are_scored_alike_in_every_scheme(gold: str, predicted: str, accuracy: float) -> None:
    """Three entities, of which one is found, and two predicted: by hand, precision 1/2, recall 1/3, F1 2/5."""
    assert entity_kinds([*gold.split(), *predicted.split()]) == ("loc", "per")
    scores = entity_scores([gold.split()], [predicted.split()], ("loc", "per", "none"))
    of_kinds = {"f1/loc": 0.0, "f1/per": 1.0, "f1/none": 0.0}
    by_hand = {"f1": 0.4, "precision": 0.5, "recall": 1 / 3, "accuracy": accuracy}
    assert scores == pytest.approx(by_hand | of_kinds)
    # as in CoNLL's script, I-per after O begins an entity, and one of another kind ends the last
    scores = entity_scores([["O", "B-per", "B-loc"]], [["O", "I-per", "I-loc"]], ("loc", "per"))
    assert (scores["f1"], scores["accuracy"]) == (1.0, pytest.approx(1 / 3))
    assert entity_kinds("OBI") == ("_",)
    scores = entity_scores([["B", "I", "O", "B"]], [["B", "I", "O", "O"]], ("_",))
    assert scores == pytest.approx({"f1": 2 / 3, "precision": 1, "recall": 0.5, "accuracy": 0.75, "f1/_": 2 / 3})


def test_tags_of_no_entities_have_an_accuracy_alone(build: Any) -> None:
    """Parts of speech; a mixture with those of entities, and a single tag, are errors."""
    task = build("the\tDET\nrain\tNOUN\n")
    assert task.score("validation", {0: [0, 0]}) == {"accuracy": 0.5}
    with pytest.raises(ValueError, match=r"the tags 'NOUN', 'U-per' name no entity, and others do: write O, or B-"):
        build("the\tU-per\nrain\tNOUN\nin\tB-loc\n")
    with pytest.raises(ValueError, match=r"a\.conll has the tags 'O': at least two are needed"):
        build("the\tO\n")


def test_a_model_that_gives_one_tag_or_none_is_told(build: Any) -> None:
    """The tags that it never gives are a warning, and a logit that is not finite an error."""
    task = build()
    batch = task.collate(task.examples("validation"), [0, 1])
    logits = torch.zeros(*batch.mask.shape, 4)
    same = task.answers(SimpleNamespace(logits=logits), batch)
    assert task.never_answered("validation", same) == {"B-loc": 1, "I-loc": 1, "B-per": 1}
    assert task.agreement("validation", same, same | {1: [1, 0]}) == pytest.approx(6 / 7)
    logits[1, 1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"not finite .* 1 of 2 examples"):
        task.score("validation", task.answers(SimpleNamespace(logits=logits), batch))
