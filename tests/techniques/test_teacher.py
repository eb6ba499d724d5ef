"""The teacher: its cached answers to tasks of tokens, and one that numbers the student's tokens otherwise."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distill_files import lm_files, squad_files, tag_files
from support.tiny_tokenizers import SENTENCES, byte_pairs, word_pieces
from support.zeroed import FAMILIES, randomised
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    GPT2Config,
)

from ds_trainer.cuts.vocabulary import cut_vocabulary_for
from ds_trainer.models.folders import save_folder, train_tokenizer
from ds_trainer.recipe.cut_specs import VocabularySpec
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.recipe.technique_specs import DistillSpec
from ds_trainer.tasks.losses import TopK
from ds_trainer.tasks.registry import build_task, training_texts
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.distill import teacher as teacher_module
from ds_trainer.techniques.distill.distill import Distill
from ds_trainer.techniques.distill.teacher import pack, unpack
from ds_trainer.techniques.technique import PhaseLength

CPU = torch.device("cpu")
LENGTH = PhaseLength(total=4, warmup=0, seed=0)
ROWS = range(8)


@pytest.fixture(scope="module", params=["squad", "clm", "ner"])
def source(request, tmp_path_factory) -> tuple[Any, str, Path]:
    """A task's spec, the folder of a random model for it, and a folder for caches."""
    folder = tmp_path_factory.mktemp(request.param)
    files = {"squad": squad_files, "clm": partial(lm_files, "clm"), "ner": tag_files}
    spec = parse_task(files[request.param](folder))
    tokenizer = train_tokenizer(training_texts(spec), 200, True)
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    bert = BertConfig(vocab_size=len(tokenizer), num_labels=2, **shape)
    if request.param == "clm":
        model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2))
    else:
        auto = AutoModelForQuestionAnswering if request.param == "squad" else AutoModelForTokenClassification
        model = auto.from_config(bert)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return spec, str(folder / "model"), folder


def attached(task: Any, model: str, **fields: Any) -> Distill:
    technique = Distill(DistillSpec(teacher=model, **fields), LENGTH, task)
    technique.attach(task.build_model(model))
    return technique


def test_cached_answers_equal_live_ones(source, monkeypatch):
    """In any batch, with any padding: logits and the states of attended positions, to half precision."""
    spec, model, folder = source
    monkeypatch.setattr(teacher_module, "_TOKENS", 16)
    task = build_task(spec, model, folder / "cache")
    pairs = {"terms": ["logits", "cos"], "layer_pairs": [[0, 1], [-1, -1]]}
    techniques = [attached(task, model, cache_teacher=cached, **pairs) for cached in (False, True)]
    for technique in techniques:
        technique.start(CPU)
    examples = task.examples("train")
    for rows in ([0], [7, 3, 30], list(range(len(examples)))):
        batch = task.collate(examples, rows)
        live, cached = (technique._targets(batch) for technique in techniques)
        torch.testing.assert_close(cached.logits, live.logits, rtol=2e-3, atol=1e-3)
        mask = batch.inputs["attention_mask"][..., None]
        assert live.hidden.keys() == cached.hidden.keys() == {1, -1}
        for layer, states in live.hidden.items():
            torch.testing.assert_close(cached.hidden[layer] * mask, states * mask, rtol=2e-3, atol=2e-3)


def test_a_top_k_cache_has_the_likeliest_tokens_in_as_many_bytes_as_the_docs_say(source):
    """In any batch they are the live teacher's, at the temperature of the phase: of another one there is another cache.

    SQuAD and tags, which have no vocabulary, are refused.
    """
    spec, model, folder = source
    task = build_task(spec, model, folder / "cache")
    if not task.over_vocabulary:
        with pytest.raises(ValueError, match="top_k is for logits over a vocabulary"):
            attached(task, model, cache_teacher={"top_k": 8})
        return
    examples = task.examples("train")
    for temperature in (1.0, 3.0):
        technique = attached(task, model, cache_teacher={"top_k": 8}, temperature=temperature)
        technique.start(CPU)
        for rows in ([0], [7, 3, 30], list(range(len(examples)))):
            batch = task.collate(examples, rows)
            (kept,) = technique._targets(batch).logits
            (logits,) = task.logits(technique._teacher.predict(batch), batch)
            live = TopK.of(logits, 8, temperature)
            torch.testing.assert_close(kept.log_probs, live.log_probs, rtol=1e-3, atol=2e-3)
            ours, theirs = (logits.gather(-1, ids) for ids in (kept.ids, live.ids))  # those alike may change places
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    labels = int(examples.offsets[-1]) - len(examples)  # the first token of an example is none
    sizes = [file.stat().st_size for file in (folder / "cache").glob("teacher-*/logits.0.npy")]
    assert sizes.count(128 + (2 * 9 + 4 * 8) * labels) == 2  # 9 log-probabilities in fp16, and 8 ids in int32


def test_a_record_holds_the_ids_and_the_probabilities_to_half_precision():
    """Ids of a large vocabulary, too; probabilities that are read sum to 1."""
    generator, k = torch.Generator().manual_seed(0), 4
    ids = torch.stack([torch.randperm(1 << 18, generator=generator)[:k] for _ in range(9)])
    log_probs = torch.randn(9, k + 1, generator=generator).mul(4).log_softmax(-1)
    read = unpack(torch.from_numpy(pack(TopK(ids, log_probs))), k)
    assert torch.equal(read.ids, ids)
    torch.testing.assert_close(read.log_probs, log_probs, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(read.log_probs.exp().sum(-1), torch.ones(9))


@pytest.fixture
def classes(tmp_path: Path) -> TextSpec:
    """Texts of different lengths in two classes."""
    rows = ["text,label", *["the rain,yes", "no rains in the hills,no", "on,yes"] * 3]
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    files = {"data_dir": str(tmp_path), "train_file": "rows.csv", "validation_file": "rows.csv"}
    return TextSpec(name="text", text_columns=["text"], label_column="label", max_seq_length=16, **files)


def classifier(family: str, tokens: int, padding: int | None) -> Any:
    labels = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    fields = FAMILIES[family] | labels | {"vocab_size": tokens, "pad_token_id": padding}
    torch.manual_seed(0)
    return randomised(AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **fields)))


def folders(spec: Any, model: Any, tokenizer: Any, folder: Path) -> tuple[str, str]:
    """The folders of a student with the tokens that the task has, and of the whole model, its teacher."""
    cut = cut_vocabulary_for(VocabularySpec(keep="seen"), spec, model, tokenizer)
    save_folder(*cut, folder / "student")
    save_folder(model, tokenizer, folder / "teacher")
    return str(folder / "student"), str(folder / "teacher")


def started(spec: Any, student: str, teacher: str, cache: Path, **fields: Any) -> tuple[Any, Any, Any]:
    """Task, student and technique of a phase."""
    task = build_task(spec, student, cache)
    technique = Distill(DistillSpec(teacher=teacher, **fields), LENGTH, task)
    model = technique.attach(task.build_model(student))
    technique.start(torch.device("cpu"))
    return task, model, technique


@pytest.mark.parametrize(("family", "cached"), [("bert", True), ("roberta", False), ("gpt2", False)])
def test_the_teacher_answers_as_it_does_to_its_own_tokens(family, cached, classes, tmp_path):
    """Logits and states of padded batches, from the model and from the cache. GPT-2 finds the last token of a text by
    the padding token, which its config does not name here, and which the student numbers otherwise."""
    tokenizer = word_pieces() if family == "bert" else byte_pairs()
    tokenizer.add_tokens(["zebra"])
    tokenizer.pad_token = "zebra" if family == "gpt2" else tokenizer.pad_token
    model = classifier(family, len(tokenizer), None if family == "gpt2" else tokenizer.pad_token_id)
    student, teacher = folders(classes, model, tokenizer, tmp_path)
    fields = {"terms": ["logits", "cos"], "layer_pairs": [[-1, -1]]}
    task, _, technique = started(classes, student, teacher, tmp_path / "cache", cache_teacher=cached, **fields)
    batch = task.collate(task.examples("train"), ROWS)
    answers = technique._targets(batch)
    whole = build_task(classes, teacher, tmp_path / "cache")
    theirs = whole.collate(whole.examples("train"), ROWS)
    assert not torch.equal(batch.inputs["input_ids"], theirs.inputs["input_ids"])
    with torch.no_grad():
        expected = whole.build_model(teacher).eval()(**theirs.inputs, output_hidden_states=True)
    close = {"rtol": 2e-3, "atol": 2e-3} if cached else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(answers.logits[0], expected.logits, **close)
    mask = theirs.mask.bool()
    torch.testing.assert_close(answers.hidden[-1][mask], expected.hidden_states[-1][mask], **close)


@pytest.mark.parametrize("kind", ["mlm", "clm"])
def test_logits_over_a_vocabulary_are_those_of_the_student_s_tokens(kind, tmp_path):
    """The teacher's columns in the student's order: a student that is the cut teacher has nothing to learn from it."""
    spec = parse_task(lm_files(kind, tmp_path))
    tokenizer, family = (word_pieces(), "bert") if kind == "mlm" else (byte_pairs(), "gpt2")
    auto = AutoModelForMaskedLM if kind == "mlm" else AutoModelForCausalLM
    config = AutoConfig.for_model(family, **FAMILIES[family] | {"vocab_size": len(tokenizer)})
    student, teacher = folders(spec, randomised(auto.from_config(config)), tokenizer, tmp_path)
    task, model, technique = started(spec, student, teacher, tmp_path / "cache", terms=["mse"])
    batch = task.collate(task.examples("train"), ROWS)
    terms = technique.terms(Forward(batch, model.eval()(**batch.inputs), 0))
    assert terms["distill.mse"] < 1e-6
    assert technique._targets(batch).logits[0].shape[1] == len(task.tokenizer) < len(tokenizer)


@pytest.mark.parametrize(("padding", "cached"), [((0, 7), False), ((7, 0), {"top_k": 5}), ((3, 9), True)])
def test_a_padded_head_is_compared_over_the_tokens(padding, cached, tmp_path):
    """One tokenizer, and rows of the student's head or the teacher's that are no tokens and have large logits: models
    that are otherwise the same answer the same, and rows without a token get no gradient."""
    spec, tokenizer = parse_task(lm_files("clm", tmp_path)), byte_pairs()
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", **FAMILIES["gpt2"] | {"vocab_size": len(tokenizer)})
    model = randomised(AutoModelForCausalLM.from_config(config))
    for name, rows in zip(("student", "teacher"), padding, strict=True):
        model.resize_token_embeddings(len(tokenizer) + rows, mean_resizing=False)
        with torch.no_grad():
            model.lm_head.weight[len(tokenizer) :] = 50.0
        save_folder(model, tokenizer, tmp_path / name)
    terms = ["logits"] if isinstance(cached, dict) else ["logits", "mse"]
    fields = {"terms": terms, "cache_teacher": cached, "temperature": 1.0}
    paths = [str(tmp_path / name) for name in ("student", "teacher", "cache")]
    task, student, technique = started(spec, *paths[:2], Path(paths[2]), **fields)
    batch = task.collate(task.examples("train"), ROWS)
    terms = technique.terms(Forward(batch, student.eval()(**batch.inputs), 0))
    assert max(terms.values()) < (1e-3 if cached else 1e-6)
    sum(terms.values()).backward()
    assert student.lm_head.weight.grad.abs().sum() > 0
    assert not student.lm_head.weight.grad[len(tokenizer) :].any()
    scored = technique.views(Forward(batch, None, 0), lambda _: None)["teacher"]
    assert scored.logits.shape[-1] == len(tokenizer)


def test_a_teacher_that_was_cut_itself_is_refused(classes, tmp_path):
    """It has no number for some of the student's tokens; the message names some of them."""
    tokenizer = word_pieces()
    cut, whole = folders(classes, classifier("bert", len(tokenizer), 0), tokenizer, tmp_path)
    assert "unhappy" in tokenizer.tokenize(SENTENCES[4])
    with pytest.raises(ValueError, match=r"tokens that the teacher .*student does not have, such as '.*' and \d+ more"):
        started(classes, whole, cut, tmp_path / "cache")
