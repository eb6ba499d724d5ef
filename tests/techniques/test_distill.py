"""Distillation: what the teacher is, what it is asked, what is kept of its answers, also to tasks of tokens, and a
teacher that numbers the student's tokens otherwise."""

import errno
import os
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.distill_files import lm_files, squad_files, tag_files
from support.tiny_tokenizers import byte_pairs, word_pieces
from support.zeroed import FAMILIES, randomised
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
)

from ds_trainer.cuts.vocabulary import cut_vocabulary_for
from ds_trainer.models.folders import save_folder, train_tokenizer
from ds_trainer.recipe.cut_specs import VocabularySpec
from ds_trainer.recipe.recipe import parse_task
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.recipe.technique_specs import DistillSpec
from ds_trainer.tasks.losses import TopK, soft_target_loss
from ds_trainer.tasks.registry import build_task, training_texts
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.distill import teacher as teacher_module
from ds_trainer.techniques.distill.distill import Distill
from ds_trainer.techniques.distill.teacher import Teacher
from ds_trainer.techniques.technique import PhaseLength

LENGTH = PhaseLength(total=4, warmup=0, seed=0)
SENTENCES = ["it rains", "it is wet", "it is dry today", "the cat sat on the mat", "no", "why is it so very wet"]
SMALL = {"num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CPU = torch.device("cpu")
ROWS = range(8)
ALL = ["logits", "mse", "cos", "hidden"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(SENTENCES * 5, 60, True)


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> TextSpec:
    """Pairs of sentences in two classes."""
    folder = tmp_path_factory.mktemp("pairs")
    pairs = [(SENTENCES[number % 6], SENTENCES[number % 5], "yes" if number % 3 else "no") for number in range(24)]
    for name in ("train.csv", "dev.csv"):
        (folder / name).write_text("\n".join(["first,second,label", *map(",".join, pairs)]) + "\n")
    files = {"data_dir": str(folder), "train_file": "train.csv", "validation_file": "dev.csv"}
    return TextSpec(name="text", text_columns=["first", "second"], label_column="label", **files)


def save(config: Any, tokenizer: Any, folder: Path, seed: int = 0) -> str:
    torch.manual_seed(seed)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def bert(tokenizer: Any, width: int = 16, layers: int = 2) -> BertConfig:
    shape = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": width}
    labels = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    return BertConfig(vocab_size=len(tokenizer), **SMALL, **shape, **labels)


@pytest.fixture(scope="module")
def student(tokenizer, tmp_path_factory) -> str:
    return save(bert(tokenizer), tokenizer, tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher(tokenizer, tmp_path_factory) -> str:
    return save(bert(tokenizer, width=24, layers=3), tokenizer, tmp_path_factory.mktemp("teacher"), seed=1)


def distillation(spec, student, teacher, cache: Path, **fields):
    """Task, model and technique, started; one batch of the training set."""
    task = build_task(spec, student, cache)
    technique = Distill(DistillSpec(teacher=teacher, **fields), LENGTH, task)
    model = technique.attach(task.build_model(student))
    technique.start(CPU)
    examples = task.examples("train")
    return task, model, technique, task.collate(examples, ROWS[: len(examples)])


def terms_of(model, technique, batch):
    return technique.terms(Forward(batch, model(**batch.inputs), 0))


def test_the_terms_are_those_of_their_papers(spec, student, teacher, tmp_path):
    """By the outputs that `transformers` gives: T^2 KL, the squared difference summed over classes, and 1 - cosine and
    the squared difference of projected states, over the tokens and the layers that are paired."""
    fields = {"terms": ALL, "temperature": 3.0, "layer_pairs": [[1, -1], [-1, 1], [0, 0]]}
    _, model, technique, batch = distillation(spec, student, teacher, tmp_path, **fields)
    model.eval()
    theirs = AutoModelForSequenceClassification.from_pretrained(teacher).eval()
    outs = [each(**batch.inputs, output_hidden_states=True) for each in (model, theirs)]
    logs = [(out.logits / 3).log_softmax(-1) for out in outs]
    mask = batch.mask.bool()
    states = [
        (technique.projection(outs[0].hidden_states[s][mask]), outs[1].hidden_states[t][mask])
        for s, t in fields["layer_pairs"]
    ]
    expected = {
        "distill.logits": 9 * F.kl_div(*logs, log_target=True, reduction="batchmean"),
        "distill.mse": (outs[0].logits - outs[1].logits).square().sum(-1).mean(),
        "distill.cos": torch.stack([(1 - F.cosine_similarity(*pair, dim=-1)).mean() for pair in states]).mean(),
        "distill.hidden": torch.stack([F.mse_loss(*pair) for pair in states]).mean(),
    }
    terms = terms_of(model, technique, batch)
    assert terms.keys() == expected.keys() == technique.term_units.keys()
    for name, value in expected.items():
        torch.testing.assert_close(terms[name], value, msg=name)
        assert float(value.detach()) > 1e-5, name


def test_the_teacher_learns_nothing(spec, student, teacher, tmp_path):
    """Its weights are the folder's, in evaluation mode, and get no gradient; the student's parameters, which get one,
    are its own and a projection, which folding takes away again."""
    _, model, technique, batch = distillation(spec, student, teacher, tmp_path, terms=ALL)
    plain = AutoModelForSequenceClassification.from_pretrained(student)
    names = {name for name, _ in model.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert names == {"distill_projection.weight", "distill_projection.bias"}
    for value in terms_of(model, technique, batch).values():
        (gradient,) = torch.autograd.grad(value, model.bert.embeddings.word_embeddings.weight, retain_graph=True)
        assert gradient.any()
    sum(terms_of(model, technique, batch).values()).backward()
    module = technique._teacher._model
    kept = load_file(Path(teacher) / "model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in module.named_parameters())
    assert all(p.grad is None and not p.requires_grad for p in module.parameters())
    assert not module.training
    folded = technique.fold(model)
    assert folded.state_dict().keys() == plain.state_dict().keys()
    assert folded(**batch.inputs).hidden_states is None
    folded.save_pretrained(tmp_path / "folded")
    assert "output_hidden_states" not in AutoConfig.from_pretrained(tmp_path / "folded").to_diff_dict()


def test_a_cached_teacher_is_in_memory_for_its_score_alone(spec, student, teacher, tmp_path):
    """Training reads its answers from disk, and a rehearsal remembers them, also after a loss has overwritten them."""
    _, _, live, batch = distillation(spec, student, teacher, tmp_path)
    expected = live._targets(batch).logits
    _, _, cached, _ = distillation(spec, student, teacher, tmp_path, cache_teacher=True)
    torch.testing.assert_close(cached._targets(batch).logits, expected, rtol=2e-3, atol=1e-3)
    assert cached._teacher._model is None
    cached.views(Forward(batch, None, 0), None)
    assert cached._teacher._model is not None
    cached.rehearse(CPU)
    for _ in range(2):
        outputs = cached._targets(batch)
        torch.testing.assert_close(outputs.logits, expected)
        outputs.logits[0].zero_()
    assert live.bytes_held()[0] > 0 == cached.bytes_held()[0]
    cached.stop()
    assert cached.views(Forward(batch, None, 0), None) == {}


def test_a_second_run_asks_the_teacher_nothing(spec, student, teacher, tmp_path, monkeypatch):
    """The cache is found again; another teacher's, or other layers', is not taken for it."""
    distillation(spec, student, teacher, tmp_path, cache_teacher=True)

    def never(*_):
        raise AssertionError("the teacher was asked")

    monkeypatch.setattr(Teacher, "predict", never)
    _, model, technique, batch = distillation(spec, student, teacher, tmp_path, cache_teacher=True)
    terms_of(model, technique, batch)
    for other, fields in ((student, {}), (teacher, {"terms": ["cos"]}), (teacher, {"teacher_dtype": "bf16"})):
        with pytest.raises(AssertionError, match="was asked"):
            distillation(spec, student, other, tmp_path, cache_teacher=True, **fields)


def test_the_room_of_a_cache_is_reserved_before_it_is_written(spec, student, teacher, tmp_path, monkeypatch):
    """A full disk is one clear error, and nothing is left of it: a mapped file on it would kill the process."""

    def full(descriptor: int, start: int, size: int) -> None:
        assert size >= 24 * 2 * 2  # examples x classes x bytes
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"cannot be written: .*No space left on device"):
        distillation(spec, student, teacher, tmp_path / "full", cache_teacher=True)
    assert not list((tmp_path / "full").glob("teacher-*"))


def test_what_cannot_be_distilled_is_told(spec, student, teacher, tmp_path):
    """Random masking with a cache, layers that are not there."""
    task = build_task(spec, student, tmp_path)
    task.inputs_vary = True
    with pytest.raises(ValueError, match="differ from epoch to epoch"):
        Distill(DistillSpec(teacher=teacher, cache_teacher=True), LENGTH, task)
    for pairs, message in (
        ([[2, 4]], "layer 4 of the teacher, which has 3"),
        ([[3, 2]], "layer 3 of the student, which has 2"),
    ):
        with pytest.raises(ValueError, match=message):
            distillation(spec, student, teacher, tmp_path, layer_pairs=pairs)


def test_a_bert_teacher_of_a_distilbert_student_sees_token_types(spec, teacher, tokenizer, tmp_path):
    """What tells the second sentence reaches the teacher, though the student does not take it."""
    config = DistilBertConfig(vocab_size=len(tokenizer), dim=16, hidden_dim=16, n_layers=1, n_heads=2)
    config.id2label = {0: "no", 1: "yes"}
    *_, technique, batch = distillation(spec, save(config, tokenizer, tmp_path / "student"), teacher, tmp_path)
    assert "token_type_ids" not in batch.inputs
    types = batch.others["token_type_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(teacher)
    with torch.no_grad():
        expected = model(**batch.inputs, token_type_ids=types).logits
        without = model(**batch.inputs).logits
    torch.testing.assert_close(technique._targets(batch).logits[0], expected)
    assert not torch.allclose(expected, without, atol=1e-5)


def test_a_regression_distils_by_squared_error():
    """The logits term is the mean squared difference of the scores at any temperature; no other divergence is taken."""
    task = SimpleNamespace(
        regression=True, vectors=False, by_query=False, inputs_vary=False, over_vocabulary=False, logits_unit="example"
    )
    one, two = torch.randn(2, 5, 1)
    torch.testing.assert_close(soft_target_loss(task, one, two, 3.0), (one - two).square().mean())
    with pytest.raises(ValueError, match="divergence: a regression has no classes"):
        Distill(DistillSpec(teacher="x", divergence="js"), LENGTH, task)


@pytest.mark.parametrize(
    ("family", "field", "frozen"),
    [
        ("distilbert", "freeze_pos_embs", {"distilbert.embeddings.position_embeddings.weight"}),
        ("opt", "freeze_pos_embs", {"model.decoder.embed_positions.weight"}),
        ("bert", "freeze_token_type_embds", {"bert.embeddings.token_type_embeddings.weight"}),
        ("distilbert", "freeze_token_type_embds", set()),
    ],
)
def test_embeddings_are_frozen_in_any_family_that_has_them(family, field, frozen, spec, student, teacher, tmp_path):
    """DistilBERT's script passes over the flags for other students than RoBERTa and GPT-2; here none is passed over."""
    technique = distillation(spec, student, teacher, tmp_path, **{field: True})[2]
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family))
    if not frozen:
        with pytest.raises(ValueError, match=f"{field} is true, and the student has no such"):
            technique.parameter_rules(model)
        return
    rules = technique.parameter_rules(model)
    assert {rule.frozen for rule in rules} == {True}
    names = [name for name, _ in model.named_parameters()]
    assert {name for name in names if any(fnmatchcase(name, rule.params) for rule in rules)} == frozen


def test_the_teachers_precision_is_its_own(spec, student, teacher, tmp_path):
    """bf16 weights and answers, near those of fp32; the student's loss stays fp32. Without a term on layers
    the student gives no hidden states: they would cost memory."""
    _, model, half, batch = distillation(spec, student, teacher, tmp_path, teacher_dtype="bf16")
    _, _, whole, _ = distillation(spec, student, teacher, tmp_path)
    assert model(**batch.inputs).hidden_states is None
    said = half._targets(batch).logits[0]
    assert said.dtype == torch.bfloat16
    torch.testing.assert_close(said.float(), whole._targets(batch).logits[0], rtol=0.05, atol=0.02)
    assert terms_of(model, half, batch)["distill.logits"].dtype == torch.float32
    assert half.bytes_held() == (whole.bytes_held()[0] // 2, 0) != (0, 0)


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

    SQuAD and tags, which have no vocabulary, are refused, and so is a k that leaves no others.
    """
    spec, model, folder = source
    task = build_task(spec, model, folder / "cache")
    if not task.over_vocabulary:
        with pytest.raises(ValueError, match="top_k is for logits over a vocabulary"):
            attached(task, model, cache_teacher={"top_k": 8})
        return
    with pytest.raises(ValueError, match=r"top_k (\d+) is not below the \1 tokens of the teacher"):
        attached(task, model, cache_teacher={"top_k": len(task.tokenizer)})
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
            torch.testing.assert_close(kept.log_probs.exp().sum(-1), torch.ones(len(logits)))
            ours, theirs = (logits.gather(-1, ids) for ids in (kept.ids, live.ids))  # those alike may change places
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    labels = int(examples.offsets[-1]) - len(examples)  # the first token of an example is none
    sizes = [file.stat().st_size for file in (folder / "cache").glob("teacher-*/logits.0.npy")]
    assert sizes.count(128 + (2 * 9 + 4 * 8) * labels) == 2  # 9 log-probabilities in fp16, and 8 ids in int32


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
    *_, technique, batch = distillation(classes, student, teacher, tmp_path / "cache", cache_teacher=cached, **fields)
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


def test_logits_over_a_vocabulary_are_those_of_the_student_s_tokens(tmp_path):
    """The teacher's columns in the student's order: a student that is the cut teacher has nothing to learn from it."""
    spec, tokenizer = parse_task(lm_files("mlm", tmp_path)), word_pieces()
    config = AutoConfig.for_model("bert", **FAMILIES["bert"] | {"vocab_size": len(tokenizer)})
    student, teacher = folders(spec, randomised(AutoModelForMaskedLM.from_config(config)), tokenizer, tmp_path)
    task, model, technique, batch = distillation(spec, student, teacher, tmp_path / "cache", terms=["mse"])
    terms = terms_of(model.eval(), technique, batch)
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
    _, student, technique, batch = distillation(spec, *paths[:2], Path(paths[2]), **fields)
    terms = terms_of(student.eval(), technique, batch)
    assert max(terms.values()) < (1e-3 if cached else 1e-6)
    sum(terms.values()).backward()
    assert student.lm_head.weight.grad.abs().sum() > 0
    assert not student.lm_head.weight.grad[len(tokenizer) :].any()
    scored = technique.views(Forward(batch, None, 0), lambda _: None)["teacher"]
    assert scored.logits.shape[-1] == len(tokenizer)
