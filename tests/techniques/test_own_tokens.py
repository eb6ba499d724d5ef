"""A teacher with another tokenizer reads the texts in its own tokens; its answers go to the same texts and words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distill_files import lm_files, squad_files
from support.killing import alike
from support.launching import log_of, train
from support.tiny_tokenizers import SENTENCES, byte_pairs, word_pieces
from support.zeroed import FAMILIES, randomised
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.models.sentence_files import SentenceFiles
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.recipe.technique_specs import DistillSpec
from ds_trainer.tasks.evaluation import evaluate, forward_of, score_folder
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.distill.distill import Distill
from ds_trainer.techniques.distill.teacher import has_own_tokens, own_reader
from ds_trainer.techniques.technique import PhaseLength

CPU = torch.device("cpu")
TOKENIZERS = {"bert": word_pieces, "roberta": byte_pairs}
AUTO = {"text": AutoModelForSequenceClassification, "ner": AutoModelForTokenClassification}
CUT_AWAY = "\u200b"
"""A word of which BERT's tokenizer makes no token."""
TAGS = ["O", "B-loc", "I-loc", "B-per"]
SHORT = {"teacher_max_seq_length": 9}


def save(family: str, task: str, classes: list[str], folder: Path) -> str:
    """A trained model, as its folder says; without classes it has one value."""
    tokenizer = TOKENIZERS[family]()
    labels = {"id2label": dict(enumerate(classes)), "label2id": {name: at for at, name in enumerate(classes)}}
    fields = FAMILIES[family] | (labels if classes else {"num_labels": 1})
    fields |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    fields |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(len(tokenizer))
    randomised(AUTO[task].from_config(AutoConfig.for_model(family, **fields))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def started(spec: Any, student: str, teacher: str, cache: Path, **fields: Any) -> tuple[Any, Any, Distill]:
    task = build_task(spec, student, cache)
    technique = Distill(DistillSpec(teacher=teacher, **fields), PhaseLength(total=4, warmup=0, seed=0), task)
    model = technique.attach(task.build_model(student)).eval()
    technique.start(CPU)
    return task, model, technique


def pairs(folder: Path, kind: str) -> Any:
    """Pairs of texts, other ones to be scored than to train on, and classes, values or several labels."""
    label_of = {
        "classes": lambda number: "abc"[number % 3],
        "values": lambda number: number / 4,
        "several": lambda number: [name for name in "abc" if (number + ord(name)) % 3],
    }[kind]
    for name, start in (("train.jsonl", 0), ("dev.jsonl", 5)):
        rows = [(SENTENCES[at % 6], SENTENCES[at % 5][: 9 * at], label_of(at)) for at in range(start + 1, start + 11)]
        lines = [json.dumps(dict(zip(("one", "two", "label"), row, strict=True))) for row in rows]
        (folder / name).write_text("\n".join(lines))
    files = {"data_dir": str(folder), "train_file": "train.jsonl", "validation_file": "dev.jsonl"}
    which = {"regression": kind == "values", "multi_label": kind == "several"}
    columns = {"text_columns": ["one", "two"], "label_column": "label"}
    return parse_task({"name": "text", "max_seq_length": 24, **files, **which, **columns})


def test_lists_are_scored_in_the_tokens_of_the_teacher(tmp_path):
    """Live and from the cache a reranker's logits of the pairs of a batch are those of the teacher alone."""
    rows = [{"q": text, "good": SENTENCES[0], "bad": SENTENCES[1 : 1 + at]} for at, text in enumerate(SENTENCES[2:6])]
    (tmp_path / "lists.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = [{"file": "lists.jsonl", "text_columns": ["q", "good", "bad"]}]
    task = {"name": "rerank", "data_dir": str(tmp_path), "max_seq_length": 24, "train": source, "validation": source}
    teacher, student = (save(family, "text", [], tmp_path / family) for family in ("roberta", "bert"))
    tokenizer, alone = load_tokenizer(teacher), AutoModelForSequenceClassification.from_pretrained(teacher).eval()
    texts = [(rows[at]["q"], text) for at in (3, 1) for text in (rows[at]["good"], *rows[at]["bad"])]
    with torch.no_grad():
        expected = alone(**tokenizer(texts, padding=True, truncation=True, max_length=24, return_tensors="pt")).logits
    for cached, close in ((False, {"rtol": 1e-4, "atol": 1e-5}), (True, {"rtol": 2e-3, "atol": 2e-3})):
        built, _, technique = started(parse_task(task), student, teacher, tmp_path / "cache", cache_teacher=cached)
        (logits,) = technique._targets(built.collate(built.examples("train"), [3, 1])).logits
        torch.testing.assert_close(logits, expected, **close)


@pytest.mark.parametrize(
    ("kind", "family", "fields"),
    [("classes", "roberta", {}), ("classes", "bert", SHORT), ("values", "roberta", SHORT), ("several", "roberta", {})],
)
def test_the_teacher_answers_as_it_does_alone_to_the_texts(kind, family, fields, tmp_path):
    """Live and from the cache, in any batch: its own logits of the texts, cut at its own length, and the classes in the
    student's order. Evaluations have its own score on the texts that are scored."""
    spec = pairs(tmp_path, kind)
    theirs, ours = (list("cab"), list("bca")) if kind != "values" else ([], [])
    other = "bert" if family == "roberta" else "roberta"
    teacher, student = (save(*each, tmp_path / each[0]) for each in ((family, "text", theirs), (other, "text", ours)))
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    tokenizer, alone = load_tokenizer(teacher), AutoModelForSequenceClassification.from_pretrained(teacher).eval()
    length = fields.get("teacher_max_seq_length", 24)
    texts = [[row[name] for row in rows] for name in ("one", "two")]
    tokens = tokenizer(*texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
    with torch.no_grad():
        expected = alone(
            **{name: tokens[name] for name in tokens if name != "token_type_ids" or family == "bert"}
        ).logits
    expected = expected[:, [theirs.index(name) for name in ours]] if ours else expected
    cache = tmp_path / "cache"
    for cached, close in ((False, {"rtol": 1e-4, "atol": 1e-5}), (True, {"rtol": 2e-3, "atol": 2e-3})):
        task, model, technique = started(spec, student, teacher, cache, cache_teacher=cached, **fields)
        assert list(task.label_names) == ours
        for chosen in ([3], [9, 0, 4], range(10)):
            batch = task.collate(task.examples("train"), chosen)
            (logits,) = technique._targets(batch).logits
            torch.testing.assert_close(logits, expected[list(chosen)], **close)
    scores = evaluate(forward_of(model), task, 4, [technique.views]).scores
    own = build_task(spec.model_copy(update={"max_seq_length": length}), teacher, cache)
    for name, value in score_folder(own, teacher, 3).scores.items():
        assert scores.get(f"teacher/{name}", value) == pytest.approx(value, abs=1e-6)
    assert len([name for name in scores if name.startswith("teacher/")]) >= 2


def test_another_length_is_another_cache(tmp_path):
    """Each length, and the student's own tokens, has answers of its own; the same length finds them again."""
    spec = pairs(tmp_path, "classes")
    families = {"teacher": "bert", "student": "roberta", "same": "bert"}
    teacher, student, same = (save(family, "text", list("abc"), tmp_path / name) for name, family in families.items())
    for source, fields in ((student, {}), (student, SHORT), (student, SHORT), (same, {}), (same, SHORT)):
        started(spec, source, teacher, tmp_path / "cache", cache_teacher=True, **fields)
    assert len(list((tmp_path / "cache").glob("teacher-*"))) == 4


@pytest.mark.parametrize(("family", "pooling", "prompt"), [("roberta", "cls", ""), ("bert", "mean", "the: ")])
def test_vectors_are_those_of_the_teachers_own_folder(family, pooling, prompt, tmp_path):
    """Its tokenizer, its width, its pooling and its prompt, live and from the cache, and its own score; also where it
    has the student's tokenizer."""
    widths = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
    for name, kind, fields in (("teacher", family, widths), ("student", "bert", FAMILIES["bert"])):
        tokenizer = TOKENIZERS[kind]()
        fields = fields | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        torch.manual_seed(0)
        randomised(AutoModel.from_config(AutoConfig.for_model(kind, **fields))).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    given = {"pooling": pooling, "prompts": {"start": prompt}, "default_prompt_name": "start"} if prompt else {}
    SentenceFiles(**{"pooling": pooling, **given}).write(tmp_path / "teacher", 24)
    teacher, student = str(tmp_path / "teacher"), str(tmp_path / "student")
    texts = [(f"{SENTENCES[at][:9]}.", f"{SENTENCES[at - 1][9:30]}.") for at in range(5)]
    rows = ["\t".join([*pair, str(at)]) for at, pair in enumerate(texts)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["a\tb\ts", *rows]))
    source = {"file": "pairs.tsv", "text_columns": ["a", "b"]}
    scored = [source | {"score_column": "s"}]
    spec = {"data_dir": str(tmp_path), "train": [source], "validation": scored, "max_seq_length": 32}
    spec = parse_task({"name": "embedding", **spec})
    alone = AutoModel.from_pretrained(teacher).eval()
    for cached, close in ((False, {"rtol": 1e-4, "atol": 1e-5}), (True, {"rtol": 2e-3, "atol": 2e-3})):
        task, model, technique = started(
            spec, student, teacher, tmp_path / "cache", cache_teacher=cached, terms=["mse"]
        )
        batch = task.collate(task.examples("train"), [3, 1])
        (vectors,) = technique._targets(batch).logits
        read = [prompt + text.strip() for at in (3, 1) for text in texts[at]]
        tokens = load_tokenizer(teacher)(read, padding=True, return_tensors="pt")
        with torch.no_grad():
            states = alone(tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
        mask = tokens["attention_mask"][..., None]
        expected = states[:, 0] if pooling == "cls" else (states * mask).sum(1) / mask.sum(1)
        torch.testing.assert_close(vectors, torch.nn.functional.normalize(expected), **close)
        assert technique.terms(Forward(batch, model(**batch.inputs), 0))["distill.mse"] > 0
    scores = evaluate(forward_of(model), task, 4, [technique.views]).scores
    for name, value in score_folder(build_task(spec, teacher, tmp_path / "cache"), teacher, 3).scores.items():
        assert scores[f"teacher/{name}"] == pytest.approx(value, abs=1e-6)
    with pytest.raises(ValueError, match="and the terms cos and hidden compare states token by token"):
        started(spec, student, teacher, tmp_path / "cache", terms=["cos"])


def sentences(folder: Path, **fields: Any) -> Any:
    """Sentences of many lengths; some have a word that BERT's tokenizer cuts away, one nothing else."""
    rows = [(text.split() * 2)[: 3 + 4 * at] for at, text in enumerate(SENTENCES)]
    rows = [[*row[: at % 3], CUT_AWAY, *row[at % 3 :]] if at % 2 else row for at, row in enumerate(rows)]
    rows.append([CUT_AWAY])
    tagged = ["\n".join(f"{word}\t{TAGS[(at + len(word)) % 4]}" for at, word in enumerate(row)) for row in rows]
    for name, part in (("train.conll", tagged), ("dev.conll", tagged[::-1])):
        (folder / name).write_text("\n\n".join(part) + "\n", encoding="utf-8")
    files = {"data_dir": str(folder), "train_file": "train.conll", "validation_file": "dev.conll"}
    return parse_task({"name": "ner", "max_seq_length": 12, **files, **fields})


@pytest.mark.parametrize(("family", "every"), [("bert", True), ("bert", False), ("roberta", False)])
@pytest.mark.parametrize("cached", [False, True])
def test_tags_go_from_word_to_word(family, every, cached, tmp_path):
    """The logits are those of a word's first token, though pieces, windows and the tags' order differ. A word that the
    teacher cuts away has none: it counts as one without loss and without gradient."""
    spec, other = sentences(tmp_path, label_all_tokens=every), "roberta" if family == "bert" else "bert"
    teacher, student = save(family, "ner", TAGS[::-1], tmp_path / family), save(other, "ner", TAGS, tmp_path / other)
    fields = {"teacher_max_seq_length": 40, "cache_teacher": cached, "terms": ["logits", "mse"]}
    task, model, technique = started(spec, student, teacher, tmp_path / "cache", **fields)
    tokenizer, alone = load_tokenizer(teacher), AutoModelForTokenClassification.from_pretrained(teacher).eval()
    ends = tokenizer("", add_special_tokens=True)["input_ids"]
    expected: dict[tuple[int, int], torch.Tensor] = {}
    for number, sentence in enumerate(task.sentences("train")):
        ids, starts = ends[:1], {}
        for at, word in enumerate(sentence.words, 1):
            pieces = tokenizer(word if family == "bert" else f" {word}", add_special_tokens=False)["input_ids"]
            starts |= {at: len(ids)} if pieces else {}
            ids = ids + pieces
        with torch.no_grad():
            logits = alone(torch.tensor([ids + ends[1:]])).logits[0].flip(-1)
        expected |= {(number, at): logits[start] for at, start in starts.items()}
    examples, close = task.examples("train"), {"rtol": 2e-3, "atol": 2e-3} if cached else {"rtol": 1e-4, "atol": 1e-5}
    lacking = 0
    for chosen in ([0], [len(examples) - 1], [5, 2, 9], range(len(examples))):
        batch = task.collate(examples, chosen)
        wanted = []
        for id in chosen:
            word = 0
            for begins, tag in zip(examples.row(id)["word"].tolist(), examples.row(id)["tag"].tolist(), strict=True):
                word = begins or word
                wanted += [expected.get((int(examples.fields["sentence"][id]), word))] if tag else []
        (given,) = technique._targets(batch).logits
        has = torch.tensor([each is not None for each in wanted])
        lacking += int((~has).sum())
        theirs = torch.stack([torch.zeros(4) if each is None else each for each in wanted])
        torch.testing.assert_close(given[has], theirs[has], **close)
        out = model(**batch.inputs)
        terms = technique.terms(Forward(batch, out, 0))
        ours = task.logits(out, batch)[0]
        squares = (ours - theirs).square().sum(-1) * has
        torch.testing.assert_close(terms["distill.mse"], squares.sum() / len(has), **close)
        logs = [(each / 2).log_softmax(-1) for each in (ours, theirs)]
        kl = torch.nn.functional.kl_div(*logs, log_target=True, reduction="none").sum(-1) * has
        torch.testing.assert_close(terms["distill.logits"], 4 * kl.sum() / len(has), **close)
        (slope,) = torch.autograd.grad(sum(terms.values()), out.logits)
        slopes = slope.flatten(0, 1)[batch.others["head_positions"]].abs().sum(-1)
        assert (slopes[has] > 1e-4).all()
        assert (slopes[~has] < 1e-6).all()
    assert bool(lacking) == (family == "bert")


def test_a_teacher_of_tags_has_its_own_score(tmp_path):
    """In windows of its own, of which the student's words lie in other ones; a word that it cuts away counts as O."""
    spec = sentences(tmp_path)
    teacher, student = save("bert", "ner", TAGS, tmp_path / "t"), save("roberta", "ner", TAGS[::-1], tmp_path / "s")
    task, model, technique = started(spec, student, teacher, tmp_path / "cache", **SHORT)
    scores = evaluate(forward_of(model), task, 3, [technique.views]).scores
    own = build_task(spec.model_copy(update={"max_seq_length": 9}), teacher, tmp_path / "cache")
    alone = score_folder(own, teacher, 4).scores
    assert {name: scores[f"teacher/{name}"] for name in alone} == pytest.approx(alone)


def test_what_needs_the_students_tokens_is_told(tmp_path):
    """Answers of tokens, states, and a length beyond the teacher's positions: what there is, and the way out."""
    text = pairs(tmp_path, "classes")
    teacher, student = (save(family, "text", list("abc"), tmp_path / family) for family in TOKENIZERS)
    lacks = "the student has tokens that the teacher .* does not have, such as '"
    take = "take a teacher with the student's tokenizer, or with the one that its vocabulary was cut from"
    for spec, fields, message in (
        (
            text,
            {"terms": ["logits", "cos"]},
            f"{lacks}.*, and the terms cos and hidden compare.* drop these terms, or {take}",
        ),
        (parse_task(squad_files(tmp_path)), {}, f"{lacks}.*, and answers of squad are compared token by token: {take}"),
        (
            parse_task(lm_files("mlm", tmp_path)),
            {},
            f"{lacks}.*, and answers of mlm are compared token by token: {take}",
        ),
        (
            text,
            {"teacher_max_seq_length": 513},
            "has 512 positions, and .* 513 tokens: set teacher_max_seq_length to 512",
        ),
    ):
        task, distill = build_task(spec, student, tmp_path / "cache"), DistillSpec(teacher=teacher, **fields)
        with pytest.raises(ValueError, match=message):
            has_own_tokens(task, distill, load_tokenizer(teacher)) and own_reader(task, distill)
    squad = build_task(parse_task(squad_files(tmp_path)), teacher, tmp_path / "cache")
    with pytest.raises(ValueError, match=r"teacher_max_seq_length is set, .*: drop it"):
        has_own_tokens(squad, DistillSpec(teacher=teacher, **SHORT), load_tokenizer(teacher))


def test_a_run_is_the_same_on_any_ranks_and_resumed(tmp_path):
    """Each loss on two ranks is that on one, though a rank has more words without an answer than the other, and a run
    that goes on from a checkpoint gives the same bits. With the cache the losses are those of the live teacher."""
    task = sentences(tmp_path, label_all_tokens=True).model_dump(exclude_none=True)
    teacher, student = save("bert", "ner", TAGS[::-1], tmp_path / "t"), save("roberta", "ner", TAGS, tmp_path / "s")
    phase = {"name": "taught", "max_steps": 4, "save_steps": 2, "logging_steps": 1, "train_batch_size": 4}
    phase |= {"learning_rate": 1e-4, "per_device_eval_batch_size": 4}

    def run(ranks: int, name: str, *more: str, **fields: Any) -> list[float]:
        distill = {"teacher": teacher, "alpha_ce": 0.5, "alpha_distil": 0.5, **fields}
        phases = [phase | {"techniques": {"distill": distill}}]
        recipe = {"model": {"name_or_path": student}, "task": task, "phases": phases, "report": False}
        train(ranks, recipe, tmp_path / name, "--cache_dir", str(tmp_path / "cache"), *more)
        return [record["train/term/distill.logits"] for record in log_of(tmp_path / name, "taught")]

    two = run(2, "two")
    assert len(two) == 4
    assert run(1, "one") == pytest.approx(two, rel=1e-4)
    assert run(2, "cached", cache_teacher=True) == pytest.approx(two, rel=2e-3)
    shutil.copytree(tmp_path / "two", tmp_path / "resumed")
    run(2, "resumed", "--resume", str(tmp_path / "resumed" / "checkpoint-2"))
    assert alike(tmp_path / "two", tmp_path / "resumed")
