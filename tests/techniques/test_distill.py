"""Distillation: what the teacher is, what it is asked, and what is kept of its answers."""

import errno
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig, DistilBertConfig

from ds_trainer.models.folders import train_tokenizer
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.recipe.technique_specs import DistillSpec
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.distill.distill import Distill
from ds_trainer.techniques.distill.teacher import Teacher
from ds_trainer.techniques.technique import PhaseLength

LENGTH = PhaseLength(total=4, warmup=0, seed=0)
SENTENCES = ["it rains", "it is wet", "it is dry today", "the cat sat on the mat", "no", "why is it so very wet"]
SMALL = {"num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CPU = torch.device("cpu")
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
    return task, model, technique, task.collate(examples, range(min(10, len(examples))))


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


def test_the_teacher_learns_nothing_and_the_student_follows(spec, student, teacher, tmp_path):
    """Gradient descent lowers every term. The teacher's weights stay the folder's, bit for bit, without a gradient; the
    student's parameters are its own and a projection, which folding takes away again."""
    _, model, technique, batch = distillation(spec, student, teacher, tmp_path, terms=ALL)
    plain = AutoModelForSequenceClassification.from_pretrained(student)
    names = {name for name, _ in model.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert names == {"distill_projection.weight", "distill_projection.bias"}
    optimizer, values = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(12):
        optimizer.zero_grad()
        terms = terms_of(model, technique, batch)
        torch.stack(list(terms.values())).sum().backward()
        values.append({name: float(value.detach()) for name, value in terms.items()})
        optimizer.step()
    assert all(values[-1][name] < 0.9 * values[0][name] for name in values[0])
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


def test_the_teacher_is_scored_beside_a_student_that_gives_no_states_in_vain(spec, student, teacher, tmp_path):
    """Without a term on layers the student gives no hidden states: they would cost memory. A checkpoint of 0.2 has
    counts, which are ignored."""
    task, model, technique, batch = distillation(spec, student, teacher, tmp_path)
    technique.resume({"counts": [3.0, 4.0]})
    assert model(**batch.inputs).hidden_states is None
    viewed = technique.views(Forward(batch, None, 0), None)
    assert viewed.keys() == {"teacher"}
    assert task.answers(viewed["teacher"], batch).keys() == set(range(10))


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
    """The cache is found again; another teacher's, or other layers', is not taken for it, nor one that is broken."""
    *_, technique, batch = distillation(spec, student, teacher, tmp_path, cache_teacher=True)
    expected = technique._targets(batch).logits

    def never(*_):
        raise AssertionError("the teacher was asked")

    with monkeypatch.context() as context:
        context.setattr(Teacher, "predict", never)
        _, model, technique, batch = distillation(spec, student, teacher, tmp_path, cache_teacher=True)
        terms_of(model, technique, batch)
        for other, fields in ((student, {}), (teacher, {"terms": ["cos"]}), (teacher, {"teacher_dtype": "bf16"})):
            with pytest.raises(AssertionError, match="was asked"):
                distillation(spec, student, other, tmp_path, cache_teacher=True, **fields)
    (file,) = tmp_path.glob("teacher-*/logits.0.npy")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    *_, technique, batch = distillation(spec, student, teacher, tmp_path, cache_teacher=True)
    torch.testing.assert_close(technique._targets(batch).logits, expected)


def test_the_room_of_a_cache_is_reserved_before_it_is_written(spec, student, teacher, tmp_path, monkeypatch):
    """A full disk is one clear error, and nothing is left of it: a mapped file on it would kill the process."""

    def full(descriptor: int, start: int, size: int) -> None:
        assert size >= 24 * 2 * 2  # examples x classes x bytes
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"cannot be written: .*No space left on device"):
        distillation(spec, student, teacher, tmp_path / "full", cache_teacher=True)
    assert not list((tmp_path / "full").glob("teacher-*"))


def test_what_cannot_be_distilled_is_told(spec, student, teacher, tokenizer, tmp_path):
    """Random masking with a cache, other tokens, an untrained head, layers that are not there, a term that is gone."""
    task = build_task(spec, student, tmp_path)
    task.inputs_vary = True
    with pytest.raises(ValueError, match="differ from epoch to epoch"):
        Distill(DistillSpec(teacher=teacher, cache_teacher=True), LENGTH, task)
    other = train_tokenizer([*SENTENCES, "zebras zigzag"], 60, True)
    wrong = save(bert(other), other, tmp_path / "wrong")
    AutoModelForSequenceClassification.from_config(bert(tokenizer)).bert.save_pretrained(tmp_path / "bare")
    tokenizer.save_pretrained(tmp_path / "bare")
    for source, fields, message in (
        (wrong, {}, r"tokens that the teacher .* does not have, such as '.+: take a teacher with the student's"),
        (str(tmp_path / "bare"), {}, "no trained head"),
        (teacher, {"layer_pairs": [[2, 4]]}, "layer 4 of the teacher, which has 3"),
        (teacher, {"layer_pairs": [[3, 2]]}, "layer 3 of the student, which has 2"),
        (teacher, {"terms": ["attention"]}, r"distill\.attention was removed in 0\.3: use distill\.hidden"),
    ):
        with pytest.raises(ValueError, match=message):
            distillation(spec, student, source, tmp_path, **fields)


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


def test_a_regression_distils_by_squared_error(spec, tokenizer, tmp_path):
    """The logits term is the mean squared difference of the scores."""
    folder = Path(spec.data_dir)
    (folder / "scores.csv").write_text("first,label\n" + "\n".join(f"{s},{i / 2}" for i, s in enumerate(SENTENCES)))
    files = {"data_dir": str(folder), "train_file": "scores.csv", "validation_file": "scores.csv"}
    task = TextSpec(name="text", text_columns=["first"], label_column="label", regression=True, **files)
    config = bert(tokenizer)
    config.num_labels = 1
    student, teacher = (save(config, tokenizer, tmp_path / name, seed) for seed, name in enumerate(("one", "two")))
    _, model, technique, batch = distillation(task, student, teacher, tmp_path)
    other = AutoModelForSequenceClassification.from_pretrained(teacher)
    with torch.no_grad():
        expected = (model(**batch.inputs).logits - other(**batch.inputs).logits).square().mean()
        assert float(terms_of(model, technique, batch)["distill.logits"]) == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(ValueError, match="divergence: a regression has no classes"):
        distillation(task, student, teacher, tmp_path, divergence="js")


@pytest.mark.parametrize(
    ("family", "field", "frozen"),
    [
        ("distilbert", "freeze_pos_embs", {"distilbert.embeddings.position_embeddings.weight"}),
        ("gpt2", "freeze_pos_embs", {"transformer.wpe.weight"}),
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
    """bf16 weights and answers, near those of fp32; the student's loss stays fp32."""
    _, model, half, batch = distillation(spec, student, teacher, tmp_path, teacher_dtype="bf16")
    _, _, whole, _ = distillation(spec, student, teacher, tmp_path)
    said = half._targets(batch).logits[0]
    assert said.dtype == torch.bfloat16
    torch.testing.assert_close(said.float(), whole._targets(batch).logits[0], rtol=0.05, atol=0.02)
    assert terms_of(model, half, batch)["distill.logits"].dtype == torch.float32
    assert half.bytes_held() == (whole.bytes_held()[0] // 2, 0) != (0, 0)
