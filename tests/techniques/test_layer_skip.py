"""LayerSkip, the plugin of examples/: its loss, which layers samples skip, and drafts of the exported model."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.launching import ROOT
from support.lm_files import LINES, bytes_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.tasks.lm.lm_task import LmTask
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.technique import PhaseLength

LayerSkip = runpy.run_path(str(ROOT / "examples/layer_skip.py"))["TECHNIQUES"]["layer_skip"]
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


def attached(task: LmTask, **fields: Any) -> tuple[Any, Any]:
    technique = LayerSkip(LayerSkip.Spec(**fields), PhaseLength(STEPS, 0, 0), task)
    model = technique.attach(task.build_model(Path(task.spec.data_dir)))
    technique.on_step(0)
    return model.train(), technique


@pytest.mark.parametrize(
    ("fields", "step", "layers"),
    [({"rotation": 3}, 0, [2, 5]), ({"rotation": 3}, 5, [4]), ({"curriculum": "gradual"}, 4, [3, 4, 5])],
)
def test_the_term_is_the_papers_mean_over_the_layers_of_the_step(task, fields, step, layers):
    """Every third exit by turns, or one more every T / 2L steps, weighted by 0 + 1 + ... + (l - 1), of the states that
    `transformers` gives."""
    model, technique = attached(task, layer_dropout=0.0, **fields)
    technique.on_step(step)
    batch = task.collate(task.examples("train"), range(4))
    forward = Forward(batch, model(**batch.inputs), 0)
    (term,) = technique.terms(forward).values()
    inputs = dict(forward.batch.inputs)
    labelled = inputs.pop("head_positions")
    states = model(**inputs, output_hidden_states=True).hidden_states
    logits = [model.lm_head(model.model.norm(states[layer].flatten(0, 1)[labelled])) for layer in layers]
    weighted = [
        sum(range(n)) * F.cross_entropy(each, forward.batch.labels) for n, each in zip(layers, logits, strict=True)
    ]
    torch.testing.assert_close(term, sum(weighted) / sum(sum(range(layer)) for layer in layers))
    term.backward()
    reached = {n for n, layer in enumerate(model.model.layers, 1) if layer.mlp.up_proj.weight.grad is not None}
    assert reached == {*range(1, layers[-1] + 1)}


def test_samples_skip_layers_as_often_as_the_paper_says(task):
    """A skipped sample's output is its input; the first layer is never skipped, and none is in an evaluation."""
    model, technique = attached(task, layer_dropout=0.9, dropout_schedule="exponential")
    technique.length = PhaseLength(STEPS + 1, 0, 0)
    technique.on_step(STEPS // 2)
    skipped = torch.zeros(DEPTH)

    def count(layer, args, output):
        skipped[list(model.model.layers).index(layer)] += (args[0] == output).flatten(1).all(1).float().mean()

    for layer in model.model.layers:
        layer.register_forward_hook(count)
    torch.manual_seed(0)
    model(input_ids=torch.randint(2, 99, (2000, 3)))
    expected = [0.9 * (2 ** (1 / 2) - 1) * (2 ** (index / (DEPTH - 1)) - 1) for index in range(DEPTH)]
    assert skipped.tolist() == pytest.approx(expected, abs=0.04)
    assert skipped[0] == 0
    skipped[:] = 0
    model.eval()(input_ids=torch.randint(2, 99, (100, 3)))
    assert skipped.sum() == 0


def test_views_are_what_the_first_layers_answer_and_the_exported_model_drafts_with_them(task):
    """Each exit has the logits of the model of so many layers, also where the model was run again before. Folded, the
    model gives the same greedy text with drafts, for which its last layer runs less often than its first."""
    model, technique = attached(task, layer_dropout=0.9)
    batch = task.collate(task.examples("train"), range(4))
    forward = Forward(batch, model.eval()(**batch.inputs), 0)
    model(**task.collate(task.examples("train"), range(2)).inputs)
    views = technique.views(forward, None)
    assert list(views) == ["exit_2", "exit_3", "exit_4", "exit_5"]
    folded = technique.fold(model)
    assert not any(layer._forward_hooks for layer in folded.model.layers)
    for name, view in views.items():
        folded.config.num_hidden_layers = int(name.removeprefix("exit_"))
        torch.testing.assert_close(view.logits, folded(**forward.batch.inputs).logits)
    folded.config.num_hidden_layers = DEPTH
    calls, layers = {0: 0, DEPTH - 1: 0}, folded.model.layers
    for index in calls:
        layers[index].register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    plain = folded.generate(ids, **wanted)
    assert torch.equal(folded.generate(ids, **wanted, assistant_early_exit=5), plain)
    assert calls[DEPTH - 1] < calls[0]


def test_what_cannot_draft_is_refused(task):
    """A GPT-2, which runs all its layers whatever its config says; more turns than exits; another task."""
    with pytest.raises(UserError, match="rotation is 5, and the model of 6 layers has 4 exits"):
        attached(task, rotation=5)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=4, n_head=2, bos_token_id=None, eos_token_id=None)
    with pytest.raises(UserError, match="GPT2LMHeadModel of transformers cannot draft with its first layers alone"):
        LayerSkip(LayerSkip.Spec(), PhaseLength(1, 0, 0), task).attach(GPT2LMHeadModel(config))
    masked = SimpleNamespace(spec=SimpleNamespace(name="mlm"), loss_unit="label")
    with pytest.raises(UserError, match="the task is mlm"):
        LayerSkip(LayerSkip.Spec(), PhaseLength(1, 0, 0), masked)
