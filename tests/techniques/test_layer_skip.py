"""LayerSkip: its loss and its dropout by hand, and a model that drafts with its own first layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.lm_files import LINES, bytes_tokenizer
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.models.recomputing import set_recomputing
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.recipe import parse_recipe
from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.recipe.technique_specs import LayerSkipSpec
from ds_trainer.tasks.lm.lm_task import LmTask
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.layer_skip.layer_skip import LayerSkip
from ds_trainer.techniques.technique import PhaseLength

DEPTH, STEPS = 6, 24


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> LmTask:
    """The task "clm" over some lines, for a Llama of 6 layers."""
    folder = tmp_path_factory.mktemp("clm")
    (folder / "text.txt").write_text("\n".join(LINES), encoding="utf-8")
    tokenizer = bytes_tokenizer(beginning=False)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": DEPTH, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), **shape, tie_word_embeddings=True, initializer_range=0.2)
    config.eos_token_id = config.bos_token_id = None
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    spec = LmSpec(name="clm", data_dir=str(folder), train_file="text.txt", validation_file="text.txt")
    return LmTask(spec, load_tokenizer(folder), folder, folder / "cache")


def attached(task: LmTask, **fields: Any) -> tuple[Any, LayerSkip]:
    technique = LayerSkip(LayerSkipSpec(**fields), PhaseLength(STEPS, 0, 0), task)
    model = technique.attach(task.build_model(Path(task.spec.data_dir)))
    technique.on_step(0)
    return model.train(), technique


def forward_of(task: LmTask, model: Any) -> Forward:
    batch = task.collate(task.examples("train"), range(4))
    return Forward(batch, model(**batch.inputs), 0)


def exit_losses(task: LmTask, model: Any, forward: Forward) -> list[Tensor]:
    """The loss of each layer's output, by the norm, the head and the hidden states that `transformers` gives."""
    inputs = {name: value for name, value in forward.batch.inputs.items() if name != "head_positions"}
    states = model(**inputs, output_hidden_states=True).hidden_states
    rows = [state.flatten(0, 1)[forward.batch.inputs["head_positions"]] for state in states[1:]]
    return [F.cross_entropy(model.lm_head(model.model.norm(row)), forward.batch.labels) for row in rows[:-1]]


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_the_term_is_the_papers_mean_over_the_layers_of_the_step(task, step):
    """Every third exit by turns, weighted by 0 + 1 + ... + (l - 1); of a single one, its loss."""
    model, technique = attached(task, layer_dropout=0.0, rotation=3)
    technique.on_step(step)
    forward = forward_of(task, model)
    (term,) = technique.terms(forward).values()
    layers = {0: [2, 5], 1: [3], 2: [4]}[step % 3]
    losses = exit_losses(task, model, forward)
    weights = [sum(range(layer)) for layer in layers]
    expected = sum(w * losses[layer - 1] for w, layer in zip(weights, layers, strict=True)) / sum(weights)
    torch.testing.assert_close(term, expected)
    term.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert any(name.startswith(f"model.layers.{layers[-1] - 1}.") for name in trained)
    assert not any(name.startswith(f"model.layers.{layers[-1]}.") for name in trained)


def test_curricula(task):
    """By turns, by default one exit a step; gradually one more every T / 2L steps, so that half of them see all."""
    _, technique = attached(task)
    seen = {"rotational": [], "gradual": []}
    for curriculum, steps in seen.items():
        _, technique = attached(task, curriculum=curriculum)
        for step in range(STEPS):
            technique.on_step(step)
            steps.append(technique._trained)
    assert seen["rotational"] == [[2], [3], [4], [5]] * 6
    assert seen["gradual"] == [[5]] * 2 + [[4, 5]] * 2 + [[3, 4, 5]] * 2 + [[2, 3, 4, 5]] * 18


@pytest.mark.parametrize(("schedule", "share"), [("constant", 1.0), ("exponential", 2 ** (1 / 2) - 1)])
def test_samples_skip_layers_as_often_as_the_paper_says(task, schedule, share):
    """A skipped sample's output is its input; the others' are not; the first layer is never skipped."""
    model, technique = attached(task, layer_dropout=0.6, dropout_schedule=schedule)
    technique.length = PhaseLength(STEPS + 1, 0, 0)
    technique.on_step(STEPS // 2)
    skipped = torch.zeros(DEPTH)

    def count(layer, args, output):
        skipped[list(model.model.layers).index(layer)] += (args[0] == output).flatten(1).all(1).float().mean() / 20

    for layer in model.model.layers:
        layer.register_forward_hook(count)
    torch.manual_seed(0)
    for _ in range(20):
        model(input_ids=torch.randint(2, 99, (100, 3)))
    expected = [0.6 * share * (2 ** (index / (DEPTH - 1)) - 1) for index in range(DEPTH)]
    assert skipped[0] == 0
    assert skipped.tolist() == pytest.approx(expected, abs=0.04)
    skipped[:] = 0
    model.eval()(input_ids=torch.randint(2, 99, (100, 3)))
    assert skipped.sum() == 0


def test_layers_that_are_computed_again_skip_the_same_samples(task):
    """With gradient checkpointing the gradients are those without it."""
    gradients = []
    for recomputes in (False, True):
        model, technique = attached(task, layer_dropout=0.9, rotation=1)
        set_recomputing(model, recomputes)
        torch.manual_seed(5)
        forward = forward_of(task, model)
        (task.loss(forward.out, forward.batch) + technique.terms(forward)["layer_skip.exits"]).backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_views_are_what_the_first_layers_answer(task):
    """Every exit gives the logits of the model that `transformers` makes of so many layers; no sample skips. It does
    not matter whether the model is run again before."""
    model, technique = attached(task, layer_dropout=0.9)
    forward = forward_of(task, model.eval())
    model(**task.collate(task.examples("train"), range(2)).inputs)
    views = technique.views(forward, None)
    assert list(views) == ["exit_2", "exit_3", "exit_4", "exit_5"]
    folded = technique.fold(model)
    for name, view in views.items():
        folded.config.num_hidden_layers = int(name.removeprefix("exit_"))
        torch.testing.assert_close(view.logits, folded(**forward.batch.inputs).logits)
        assert task.answers(view, forward.batch).keys() == set(range(4))
    assert not any(layer._forward_hooks for layer in folded.model.layers)


def test_the_exported_model_drafts_with_its_first_layers(task):
    """The greedy text is the same; the layers after the exit run less often, those before it more often."""
    model, technique = attached(task)
    model = technique.fold(model).eval()
    calls = [0] * DEPTH
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    plain = model.generate(ids, **wanted)
    assert calls == [12] * DEPTH
    calls[:] = [0] * DEPTH
    assert torch.equal(model.generate(ids, **wanted, assistant_early_exit=5), plain)
    assert calls[:5] == [calls[0]] * 5
    assert calls[5] < calls[0]


def test_a_model_that_cannot_draft_is_refused(task, tmp_path):
    """GPT-2's forward runs all its layers whatever its config says, and so its speculation fails in transformers. More
    turns than exits are told."""
    with pytest.raises(UserError, match="rotation is 5, and the model of 6 layers has 4 exits"):
        attached(task, rotation=5)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=4, n_head=2, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config)
    with pytest.raises(UserError, match="GPT2LMHeadModel of transformers cannot draft with its first layers alone"):
        LayerSkip(LayerSkipSpec(), PhaseLength(1, 0, 0), task).attach(model)
    with pytest.raises(IndexError):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False, assistant_early_exit=2)


@pytest.mark.parametrize(
    ("name", "loss", "words"),
    [
        ("mlm", {"task": 1.0, "layer_skip.exits": 1.0}, 'its task is mlm: it needs the task "clm"'),
        ("clm", {"task": 1.0}, r'set loss\["layer_skip.exits"\]'),
    ],
)
def test_what_does_not_go_together_is_told_before_anything_is_loaded(name, loss, words):
    """The task, and a term without a weight."""
    phase = {"max_steps": 1, "techniques": {"layer_skip": {}}, "loss": loss}
    with pytest.raises(UserError, match=words):
        parse_recipe({"task": {"name": name, "train_file": "a.txt", "validation_file": "a.txt"}, "phases": [phase]})
