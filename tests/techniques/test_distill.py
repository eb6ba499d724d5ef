"""Distillation: what the teacher is, what it is asked, and what is kept of its answers."""

import errno
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.zeroed import empty, randomised
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
)

from ds_trainer.config.recipe import DistillSpec, GroupRule, TextSpec, parse_recipe
from ds_trainer.engine.optim import Hyperparameters
from ds_trainer.models.folders import save_folder, train_tokenizer
from ds_trainer.models.shrink import shrink
from ds_trainer.phase import PhasePlan
from ds_trainer.tasks import losses
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.distill.distill import Distill
from ds_trainer.techniques.distill.teacher import Teacher
from ds_trainer.techniques.technique import PhaseLength

LENGTH = PhaseLength(total=4, warmup=0, seed=0)
SENTENCES = ["it rains", "it is wet", "it is dry today", "the cat sat on the mat", "no", "why is it so very wet"]
SMALL = {"num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CPU = torch.device("cpu")
HEADS = {"heads": [0, 1, 4], "neurons": [16, 16, 16]}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(SENTENCES * 5, 60, True)


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> TextSpec:
    """Pairs of sentences in two classes."""
    folder = tmp_path_factory.mktemp("pairs")
    pairs = [(SENTENCES[number % 6], SENTENCES[number % 5], "yes" if number % 3 else "no") for number in range(24)]
    lines = ["first,second,label", *map(",".join, pairs)]
    for name in ("train.csv", "dev.csv"):
        (folder / name).write_text("\n".join(lines) + "\n")
    files = {"data_dir": str(folder), "train_file": "train.csv", "validation_file": "dev.csv"}
    return TextSpec(name="text", text_columns=["first", "second"], label_column="label", **files)


def save(config: Any, tokenizer: Any, folder: Path, seed: int = 0) -> str:
    torch.manual_seed(seed)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def bert(tokenizer: Any, width: int = 16, layers: int = 2, **fields: Any) -> BertConfig:
    shape = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": width}
    labels = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    return BertConfig(vocab_size=len(tokenizer), **SMALL, **shape, **labels, **fields)


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
    batch = task.collate(examples, range(min(10, len(examples))))
    return task, model, technique, batch


def terms_of(model, technique, batch):
    return technique.terms(Forward(batch, model(**batch.inputs), 0))


ALL = ["logits", "mse", "cos", "hidden"]


def test_the_teacher_learns_nothing_and_is_no_part_of_the_student(spec, student, teacher, tmp_path):
    """After training on every term the teacher's weights are the folder's, bit for bit, without a gradient; the
    student's parameters are its own and a projection."""
    _, model, technique, batch = distillation(spec, student, teacher, tmp_path, terms=ALL)
    names = {name for name, _ in model.named_parameters()}
    plain = {name for name, _ in AutoModelForSequenceClassification.from_pretrained(student).named_parameters()}
    assert names - plain == {"distill_projection.weight", "distill_projection.bias"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack(list(terms_of(model, technique, batch).values())).sum().backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "query" in n)
    module = technique._teacher._model
    kept = load_file(Path(teacher) / "model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in module.named_parameters())
    assert all(p.grad is None and not p.requires_grad for p in module.parameters())
    assert not module.training


def test_terms_fall_when_the_student_follows(spec, student, teacher, tmp_path):
    """Each term can be learned by itself: gradient descent on it lowers it."""
    for term in ALL:
        _, model, technique, batch = distillation(spec, student, teacher, tmp_path, terms=[term])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        values = []
        for _ in range(8):
            optimizer.zero_grad()
            (loss,) = terms_of(model, technique, batch).values()
            loss.backward()
            optimizer.step()
            values.append(float(loss.detach()))
        assert values[-1] < 0.9 * values[0], term


@pytest.mark.parametrize("divergence", ["forward", "reverse", "js"])
def test_a_student_like_its_teacher_has_nothing_to_learn(divergence, spec, teacher, tmp_path):
    """The same model on both sides: every term is 0 and they agree on every example."""
    pairs = [[1, 1], [0, 0], [-1, 3]]
    terms = {"terms": ["logits", "mse", "cos", "hidden"], "layer_pairs": pairs, "divergence": divergence}
    _, model, technique, batch = distillation(spec, teacher, teacher, tmp_path, **terms)
    found = terms_of(model.eval(), technique, batch)
    assert technique.projection is None
    assert found.keys() == set(technique.term_units)
    assert max(float(term.detach()) for term in found.values()) == pytest.approx(0, abs=1e-6)
    assert technique.readings() == {"distill/agreement": 1.0}
    assert technique.readings() == {}


def test_agreement_counts_the_rows_of_equal_answers(spec, student, teacher, tmp_path):
    """distill/agreement is the share of examples whose likeliest class is the teacher's."""
    task, model, technique, batch = distillation(spec, student, teacher, tmp_path)
    teacher_model = AutoModelForSequenceClassification.from_pretrained(teacher)
    with torch.no_grad():
        same = model(**batch.inputs).logits.argmax(-1) == teacher_model(**batch.inputs).logits.argmax(-1)
    terms_of(model, technique, batch)
    assert technique.readings()["distill/agreement"] == pytest.approx(float(same.float().mean()))
    viewed = technique.views(Forward(batch, None, 0), None)
    assert viewed.keys() == {"teacher"}
    assert task.answers(viewed["teacher"], batch).keys() == set(range(10))


@pytest.mark.parametrize("layers", [{}, {"terms": ["logits", "cos"], "layer_pairs": [[1, 1], [-1, -1]]}])
def test_cached_answers_are_the_live_ones(spec, student, teacher, layers, tmp_path):
    """Every example's terms from disk equal those of the live teacher to half precision, in any batch."""
    _, model, live, _ = distillation(spec, student, teacher, tmp_path, **layers)
    task, _, cached, _ = distillation(spec, student, teacher, tmp_path, cache_teacher=True, **layers)
    model.eval()
    for rows in ([0, 5, 9], [23], list(range(24))):
        batch = task.collate(task.examples("train"), rows)
        one, two = (live._targets(batch), cached._targets(batch))
        torch.testing.assert_close(one.logits, two.logits, rtol=2e-3, atol=1e-3)
        mask = batch.inputs["attention_mask"][..., None]
        for layer in one.hidden:
            torch.testing.assert_close(one.hidden[layer] * mask, two.hidden[layer] * mask, rtol=2e-3, atol=2e-3)


def test_a_second_run_asks_the_teacher_nothing(spec, student, teacher, tmp_path, monkeypatch):
    """The cache is found again; another teacher's, or other layers', is not taken for it."""
    distillation(spec, student, teacher, tmp_path, cache_teacher=True)

    def never(*_):
        raise AssertionError("the teacher was asked")

    with monkeypatch.context() as context:
        context.setattr(Teacher, "predict", never)
        _, model, technique, batch = distillation(spec, student, teacher, tmp_path, cache_teacher=True)
        terms_of(model, technique, batch)
        with pytest.raises(AssertionError, match="was asked"):
            distillation(spec, student, student, tmp_path, cache_teacher=True)
        with pytest.raises(AssertionError, match="was asked"):
            distillation(spec, student, teacher, tmp_path, cache_teacher=True, terms=["cos"])


def test_the_size_of_a_cache_is_checked_before_it_is_written(spec, student, teacher, tmp_path, monkeypatch, caplog):
    """Its room is reserved before a value is written: a full disk is one clear error, and nothing is left of it."""
    with caplog.at_level("INFO", logger="ds_trainer"):
        distillation(spec, student, teacher, tmp_path, cache_teacher=True)
    assert "0.0 MB of the teacher's outputs are kept in" in caplog.text

    def full(descriptor: int, start: int, size: int) -> None:
        assert size >= 24 * 2 * 2  # examples x classes x bytes
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"cannot be written: .*No space left on device"):
        distillation(spec, student, teacher, tmp_path / "full", cache_teacher=True)
    assert not list((tmp_path / "full").glob("teacher-*"))


def test_a_broken_cache_is_made_again(spec, student, teacher, tmp_path):
    """A truncated file of it is noticed by its checksum."""
    *_, technique, batch = distillation(spec, student, teacher, tmp_path, cache_teacher=True)
    expected = technique._targets(batch).logits
    (file,) = tmp_path.glob("teacher-*/logits.0.npy")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    *_, technique, batch = distillation(spec, student, teacher, tmp_path, cache_teacher=True)
    torch.testing.assert_close(technique._targets(batch).logits, expected)


def test_inputs_that_vary_cannot_be_cached(spec, student, teacher, tmp_path):
    """Random masking gives other inputs in every epoch: cache_teacher is refused."""
    task = build_task(spec, student, tmp_path)
    task.inputs_vary = True
    with pytest.raises(ValueError, match="differ from epoch to epoch"):
        Distill(DistillSpec(teacher=teacher, cache_teacher=True), LENGTH, task)


def test_a_teacher_of_another_vocabulary_is_refused(spec, student, tokenizer, tmp_path):
    """The error shows some of the tokens that differ."""
    other = train_tokenizer([*SENTENCES, "zebras zigzag"], 60, True)
    wrong = save(bert(other), other, tmp_path / "wrong")
    with pytest.raises(
        ValueError, match=r"tokens that the teacher .* does not have, such as '.+: take a teacher with the student's"
    ):
        distillation(spec, student, wrong, tmp_path)


def test_a_teacher_without_a_trained_head_is_refused(spec, student, tokenizer, tmp_path):
    """What an untrained head says would teach nothing."""
    bare = tmp_path / "bare"
    AutoModelForSequenceClassification.from_config(bert(tokenizer)).bert.save_pretrained(bare)
    tokenizer.save_pretrained(bare)
    with pytest.raises(ValueError, match="no trained head"):
        distillation(spec, student, str(bare), tmp_path)


def test_a_bert_teacher_of_a_distilbert_student_sees_token_types(spec, teacher, tokenizer, tmp_path):
    """What tells the second sentence reaches the teacher, though the student does not take it."""
    config = DistilBertConfig(vocab_size=len(tokenizer), dim=16, hidden_dim=16, n_layers=1, n_heads=2)
    config.id2label = {0: "no", 1: "yes"}
    student = save(config, tokenizer, tmp_path / "student")
    *_, technique, batch = distillation(spec, student, teacher, tmp_path)
    assert "token_type_ids" not in batch.inputs
    types = batch.others["token_type_ids"]
    assert types.any()
    model = AutoModelForSequenceClassification.from_pretrained(teacher)
    with torch.no_grad():
        expected = model(**batch.inputs, token_type_ids=types).logits
        without = model(**batch.inputs).logits
    torch.testing.assert_close(technique._targets(batch).logits[0], expected)
    assert not torch.allclose(expected, without, atol=1e-5)


def test_a_regression_distils_by_squared_error(spec, tokenizer, tmp_path):
    """The logits term is the mean squared difference of the scores; there is no agreement to count."""
    folder = Path(spec.data_dir)
    (folder / "scores.csv").write_text("first,label\n" + "\n".join(f"{s},{i / 2}" for i, s in enumerate(SENTENCES)))
    files = {"data_dir": str(folder), "train_file": "scores.csv", "validation_file": "scores.csv"}
    task = TextSpec(name="text", text_columns=["first"], label_column="label", regression=True, **files)
    one, two = (bert(tokenizer) for _ in range(2))
    for config in (one, two):
        config.num_labels = 1
    student, teacher = save(one, tokenizer, tmp_path / "one"), save(two, tokenizer, tmp_path / "two", seed=3)
    _, model, technique, batch = distillation(task, student, teacher, tmp_path)
    other = AutoModelForSequenceClassification.from_pretrained(teacher)
    with torch.no_grad():
        expected = (model(**batch.inputs).logits - other(**batch.inputs).logits).square().mean()
        assert float(terms_of(model, technique, batch)["distill.logits"]) == pytest.approx(float(expected), rel=1e-5)
    assert technique.readings() == {}
    with pytest.raises(ValueError, match="divergence: a regression has no classes"):
        distillation(task, student, teacher, tmp_path, divergence="js")


def test_position_and_token_type_embeddings_can_be_frozen(spec, student, teacher, tmp_path):
    """Their rules freeze them; a student without them is told."""
    fields = {"freeze_pos_embs": True, "freeze_token_type_embds": True}
    _, model, technique, _ = distillation(spec, student, teacher, tmp_path, **fields)
    assert list(technique.parameter_rules(model)) == [
        GroupRule(params="*position_embeddings*", frozen=True),
        GroupRule(params="*token_type_embeddings*", frozen=True),
    ]
    with pytest.raises(ValueError, match="freeze_pos_embs is true, and the student has no such"):
        technique.parameter_rules(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("family", "frozen"),
    [
        ("distilbert", {"distilbert.embeddings.position_embeddings.weight"}),
        ("roberta", {"roberta.embeddings.position_embeddings.weight"}),
        ("gpt2", {"transformer.wpe.weight"}),
        ("opt", {"model.decoder.embed_positions.weight"}),
        ("llama", set()),
    ],
)
def test_positions_are_frozen_in_any_family_that_has_them(family, frozen, spec, student, teacher, tmp_path):
    """DistilBERT's script passes over the flag for other students than RoBERTa and GPT-2; here none is passed over."""
    technique = distillation(spec, student, teacher, tmp_path, freeze_pos_embs=True)[2]
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family))
    if not frozen:
        with pytest.raises(ValueError, match="freeze_pos_embs is true, and the student has no such"):
            technique.parameter_rules(model)
        return
    rules = technique.parameter_rules(model)
    names = [name for name, _ in model.named_parameters()]
    assert {name for name in names if any(fnmatchcase(name, rule.params) for rule in rules)} == frozen


def test_folding_leaves_a_plain_model(spec, student, teacher, tmp_path):
    """Projection and the outputs asked for are gone: config and parameters are as before."""
    _, model, technique, batch = distillation(spec, student, teacher, tmp_path, terms=["logits", "cos", "attention"])
    assert model(**batch.inputs).hidden_states is not None
    folded = technique.fold(model)
    plain = AutoModelForSequenceClassification.from_pretrained(student)
    assert folded.state_dict().keys() == plain.state_dict().keys()
    out = folded(**batch.inputs)
    assert (out.hidden_states, out.attentions) == (None, None)
    folded.save_pretrained(tmp_path / "folded")
    saved = AutoConfig.from_pretrained(tmp_path / "folded").to_diff_dict()
    assert not {"output_hidden_states", "output_attentions"} & saved.keys()


def test_layers_that_are_not_there_are_told(spec, student, teacher, tmp_path):
    """The error names the layer, whose it is, and how many there are."""
    with pytest.raises(ValueError, match="layer 4 of the teacher, which has 3"):
        distillation(spec, student, teacher, tmp_path, terms=["cos"], layer_pairs=[[2, 4]])


@pytest.mark.parametrize("side", [0, 1])
def test_layers_without_attention_are_passed_over_when_maps_are_compared(side, spec, tokenizer, tmp_path):
    """A student (0) or teacher (1) with no head in its first layer and one in its second gives two maps: each is
    compared with that of the layer it is paired with, and the first can be paired with none."""
    config = bert(tokenizer, layers=3)
    config.num_attention_heads = 4
    whole = save(config, tokenizer, tmp_path / "whole")
    masked = empty(randomised(AutoModelForSequenceClassification.from_pretrained(whole)), HEADS)
    cut = shrink(masked)
    save_folder(cut, tokenizer, tmp_path / "cut")
    folders = [whole, whole]
    folders[side] = str(tmp_path / "cut")
    for pair in ([2, -1], [-1, 2]):
        asked = {"terms": ["attention"], "layer_pairs": [pair]}
        _, model, technique, batch = distillation(spec, *folders, tmp_path, **asked)
        found = terms_of(model.eval(), technique, batch)["distill.attention"]
        models = [model, technique._teacher._model]
        models[side] = masked  # which has all maps
        maps = []
        for each, layer in zip(models, pair, strict=True):
            each.set_attn_implementation("eager")
            given = each(**batch.inputs, output_attentions=True).attentions
            maps.append(given[layer - 1 if layer > 0 else layer])
        if pair[side] == 2:  # only the head that was kept
            columns = masked.bert.encoder.layer[1].attention.output.dense.weight.unflatten(1, (4, -1))
            (kept_head,) = columns.any(2).any(0).nonzero().flatten().tolist()
            maps[side] = maps[side][:, [kept_head]]
        expected = losses.attention_mse(*maps, batch.mask)
        assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
        assert float(found.detach()) > 0
    wrong = [2, 2]
    wrong[side] = 1
    who = ("student", "teacher")[side]
    with pytest.raises(ValueError, match=f"layer 1 of the {who}, and its layers 1 have no attention heads left"):
        distillation(spec, *folders, tmp_path, terms=["attention"], layer_pairs=[wrong])
    distillation(spec, *folders, tmp_path, terms=["cos"], layer_pairs=[wrong])


def test_the_teachers_precision_is_its_own(spec, student, teacher, tmp_path):
    """bf16 weights and answers, near those of fp32; the student's loss stays fp32."""
    _, model, half, batch = distillation(spec, student, teacher, tmp_path, teacher_dtype="bf16")
    _, _, whole, _ = distillation(spec, student, teacher, tmp_path)
    said = half._targets(batch).logits[0]
    assert said.dtype == torch.bfloat16
    torch.testing.assert_close(said.float(), whole._targets(batch).logits[0], rtol=0.05, atol=0.02)
    assert terms_of(model, half, batch)["distill.logits"].dtype == torch.float32


def test_only_asked_layers_are_kept(spec, student, teacher, tmp_path):
    """Without a term on layers the student gives no hidden states: they would cost memory."""
    _, model, technique, batch = distillation(spec, student, teacher, tmp_path, terms=["logits"])
    assert model(**batch.inputs).hidden_states is None
    assert technique._student_layers == ComparedLayers()


def test_a_cached_teacher_is_not_kept_in_memory(spec, student, teacher, tmp_path):
    """Once its answers are on disk the model is freed; it comes back for the evaluation of the teacher itself."""
    *_, technique, batch = distillation(spec, student, teacher, tmp_path, cache_teacher=True)
    assert technique._teacher._model is None
    technique.views(Forward(batch, None, 0), None)
    assert technique._teacher._model is not None
    technique.stop()
    assert technique.views(Forward(batch, None, 0), None) == {}


def test_a_projection_is_trained_whatever_pruning_freezes(spec, student, teacher, tmp_path):
    """Static pruning freezes all weights but its scores; the projection is distillation's own."""
    prune = {"train_weights": False, "initial_warmup": 0, "final_warmup": 0}
    techniques = {"prune": prune, "distill": {"teacher": teacher, "alpha_distil": 1, "alpha_cos": 1}}
    recipe = parse_recipe({"phases": [{"max_steps": 1, "techniques": techniques}]})
    phase = recipe.phases[0]
    task = build_task(spec, student, tmp_path)
    plan = PhasePlan(phase, phase.techniques, task, student, LENGTH, {}, Hyperparameters(1e-3), tmp_path)
    model = plan.prepare().model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"distill_projection.weight", "distill_projection.bias"} < trained
    assert all(name.endswith("mask_scores") or name.startswith("distill_projection") for name in trained)
