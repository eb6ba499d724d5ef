"""`launch/export.py --import_from`: folders of movement pruning's scripts and of DeeBERT, against own references.

The folders are as those programs of 2020 write them: a pickle in torch's old format, a vocab.txt, an old config.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.evil import Evil
from support.exported_models import inputs
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from ds_trainer import load_model
from ds_trainer.cli.command import run_command
from ds_trainer.cli.export import export_command
from ds_trainer.config.exit_specs import ExitPolicy
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.models.pretrained import load_tokenizer, load_trained
from ds_trainer.techniques.exits.early_exit import with_exits
from ds_trainer.techniques.exits.heads import read_exits

TEXTS = ["the old apple", "a hammer and a saw and a drill", "some wren finch crow owl", "plum pear fig new file"]
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 40}
LAYERS, CLASSES, WORDS = 3, 3, 300
PROGRAM = {"output_attentions": False, "output_past": True, "pruned_heads": {}, "torchscript": False}
"""Settings that old configs hold beside the model's."""


def exported(*arguments: object) -> int:
    return run_command(export_command, [str(argument) for argument in arguments])


def write_folder(folder: Path, config: dict[str, Any], state: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    if any(name.startswith("roberta.") for name in state):
        tokens = ByteLevelBPETokenizer()
        tokens.train_from_iterator(TEXTS, WORDS, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
        tokens.save_model(str(folder))
    else:
        ids = train_tokenizer(TEXTS, WORDS, True).get_vocab()
        (folder / "vocab.txt").write_text("\n".join(sorted(ids, key=ids.__getitem__)) + "\n")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true, "max_len": 512, "init_inputs": []}')
    (folder / "config.json").write_text(json.dumps(PROGRAM | config))
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return folder


def randomised(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model.eval()


def masked_bert(folder: Path, method: str, kind: str = "SequenceClassification", seed: int = 0) -> Path:
    """A masked BERT's folder: scores with many ties, some of them extreme."""
    torch.manual_seed(seed)
    size = {"vocab_size": WORDS, "num_hidden_layers": 2, **SIZES}
    plain = {"SequenceClassification": BertForSequenceClassification, "QuestionAnswering": BertForQuestionAnswering}
    model = randomised(plain[kind](BertConfig(**size, num_labels=CLASSES if kind.startswith("S") else 2)))
    state = dict(model.state_dict())
    if kind == "QuestionAnswering":  # it had a pooler then, which nothing looks at
        state |= {"bert.pooler.dense.weight": torch.randn(16, 16), "bert.pooler.dense.bias": torch.randn(16)}
    state["bert.embeddings.position_ids"] = torch.arange(40)[None]
    for name in [name for name in state if ".encoder." in name and state[name].dim() == 2]:
        if method == "magnitude":
            state[name] = (state[name] * 4).round() / 4  # ties of absolute values, of both signs
        else:
            scores = (torch.randn_like(state[name]) * 3).round() / 3
            state[f"{name.removesuffix('weight')}mask_scores"] = scores
    config = {"model_type": "masked_bert", "pruning_method": method, "mask_init": "constant", "mask_scale": 0.0}
    config |= {"architectures": [f"MaskedBertFor{kind}"], "num_hidden_layers": 2, "vocab_size": WORDS, **SIZES}
    if kind.startswith("S"):
        config |= {"id2label": {"0": "bird", "1": "fruit", "2": "tool"}, "label2id": {"bird": 0, "fruit": 1, "tool": 2}}
    return write_folder(folder, config, state)


def logistic(values: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-values.astype(np.float32)))).astype(np.float32)


def reference_mask(weight: np.ndarray, scores: np.ndarray, method: str, threshold: float) -> np.ndarray:
    """Of the scripts, by numpy, one number at a time where they count."""
    flat = (np.abs(weight) if method == "magnitude" else scores).ravel()
    if method == "l0":
        return np.minimum(1, np.maximum(0, logistic(scores) * 1.2 - 0.1))
    if method in ("topK", "magnitude"):
        kept = sorted(range(flat.size), key=lambda place: (-flat[place], place))[: math.floor(threshold * flat.size)]
        mask = np.zeros(flat.size)
        mask[kept] = 1
        return mask.reshape(weight.shape)
    passing = logistic(flat) if method == "sigmoied_threshold" else flat
    mask = passing > threshold
    least = math.floor(0.005 * flat.size) + 1
    if mask.sum() < least:
        mask = flat > np.sort(flat)[flat.size - least - 1]
    return mask.astype(float).reshape(weight.shape)


@pytest.mark.parametrize(
    ("method", "threshold"),
    [
        *(("topK", 0.15), ("topK", 0.004), ("magnitude", 0.3), ("l0", None)),
        *(("threshold", 0.0), ("threshold", 1e9), ("sigmoied_threshold", 0.1), ("sigmoied_threshold", 0.999999)),
    ],
)
def test_a_masked_bert_is_folded_as_its_script_does(method: str, threshold: float | None, tmp_path: Path) -> None:
    """Every weight to the bit, of l0 to 1e-6, with ties and floors; the result is a BERT that transformers loads."""
    source = masked_bert(tmp_path / "masked", method)
    flags = [] if threshold is None else ["--threshold", threshold]
    assert exported(source, "--import_from", "masked_bert", *flags, "--output_dir", tmp_path / "plain") == 0
    before = torch.load(source / "pytorch_model.bin", weights_only=True)
    after = load_file(tmp_path / "plain" / "model.safetensors")
    masked = [name for name in after if ".encoder." in name and after[name].dim() == 2]
    assert len(masked) == 12
    assert after.keys() == {name for name in before if not name.endswith(("mask_scores", "position_ids"))}
    zeros = 0
    for name, weight in after.items():
        wanted = before[name].numpy()
        if name in masked:
            scores = before.get(f"{name.removesuffix('weight')}mask_scores", before[name]).numpy()
            wanted = wanted * reference_mask(wanted, scores, method, threshold or 0.0).astype(np.float32)
            zeros += int((wanted == 0).sum())
        if method == "l0" and name in masked:  # numpy's exponential function rounds otherwise than torch's
            np.testing.assert_allclose(weight.numpy(), wanted, rtol=1e-6, atol=0)
        else:
            np.testing.assert_array_equal(weight.numpy(), wanted)
    report = json.loads((tmp_path / "plain" / "export.json").read_text())["imported"]
    assert (report["from"], report["pruning_method"], report["threshold"]) == ("masked_bert", method, threshold)
    assert report["weights"]["encoder"]["total"] - report["weights"]["encoder"]["kept"] == zeros
    assert zeros > 0
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("bert", ["BertForSequenceClassification"])
    assert config["id2label"] == {"0": "bird", "1": "fruit", "2": "tool"}
    assert not {"pruning_method", "mask_init", "mask_scale", "pruned_heads"} & config.keys()
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain").eval()
    asked = inputs(3, 9)
    assert torch.equal(plain(**asked).logits, load_model(tmp_path / "plain")(**asked).logits)
    assert load_tokenizer(tmp_path / "plain")("the old apple").input_ids == [2, *_ids(source, "the old apple"), 3]


def _ids(source: Path, text: str) -> list[int]:
    words = (source / "vocab.txt").read_text().splitlines()
    return [words.index(word) for word in text.split()]


def test_a_masked_bert_that_answers_questions(tmp_path: Path) -> None:
    """Its pooler is left out: no answer came from it."""
    source = masked_bert(tmp_path / "masked", "topK", "QuestionAnswering")
    command = ["--import_from", "masked_bert", "--threshold", 0.5, "--output_dir", tmp_path / "plain"]
    assert exported(source, *command) == 0
    model = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "plain")
    assert model(**inputs(2, 8)).start_logits.shape == (2, 8)
    assert not any("pooler" in name for name in load_file(tmp_path / "plain" / "model.safetensors"))


def deebert(folder: Path, family: str, seed: int = 0) -> Path:
    """A folder of DeeBERT's second stage, as its fork of transformers of 2019 writes it: no model_type, no labels."""
    torch.manual_seed(seed)
    size = {"vocab_size": WORDS, "num_hidden_layers": LAYERS, "num_labels": CLASSES, **SIZES}
    if family == "bert":
        state = dict(randomised(BertForSequenceClassification(BertConfig(**size))).state_dict())
    else:
        state = dict(randomised(RobertaForSequenceClassification(RobertaConfig(**size))).state_dict())
        for kind in ("weight", "bias"):
            state[f"roberta.pooler.dense.{kind}"] = state.pop(f"classifier.dense.{kind}")
            state[f"classifier.{kind}"] = state.pop(f"classifier.out_proj.{kind}")
    for layer in range(LAYERS):
        stem = f"{family}.encoder.highway.{layer}"
        state |= {f"{stem}.pooler.dense.weight": torch.randn(16, 16), f"{stem}.pooler.dense.bias": torch.randn(16)}
        state |= {
            f"{stem}.classifier.weight": torch.randn(CLASSES, 16) / (6 - 4 * layer),
            f"{stem}.classifier.bias": torch.randn(CLASSES),
        }
    return write_folder(folder, {**size, "finetuning_task": "mrpc", "type_vocab_size": 2}, state)


@torch.no_grad()
def reference_exits(folder: Path, asked: dict[str, Tensor], family: str) -> list[Tensor]:
    """The logits of every exit, the model's own last: the layer's state -> pooler -> classifier, in plain torch."""
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    plain = load_trained(folder.parent / "exits")
    states = plain(**asked, output_hidden_states=True).hidden_states[1:]
    stems = [f"{family}.encoder.highway.{layer}." for layer in range(LAYERS - 1)]
    places = [
        *((f"{stem}pooler.dense", f"{stem}classifier") for stem in stems),
        (f"{family}.pooler.dense", "classifier"),
    ]
    logits = []
    for hidden, (pooler, classifier) in zip(states, places, strict=True):
        pooled = torch.tanh(F.linear(hidden[:, 0], state[f"{pooler}.weight"], state[f"{pooler}.bias"]))
        logits.append(F.linear(pooled, state[f"{classifier}.weight"], state[f"{classifier}.bias"]))
    return logits


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_deebert_folder_exits_where_deebert_does(family: str, tmp_path: Path) -> None:
    """Logits and layers of the early-exit model, over thresholds, are those of DeeBERT's rule; the rest is plain."""
    source = deebert(tmp_path / "deebert", family)
    assert exported(source, "--import_from", "deebert", "--output_dir", tmp_path / "exits") == 0
    asked = inputs(8, 9)
    logits = reference_exits(source, asked, family)
    plain = load_trained(tmp_path / "exits").eval()
    assert type(plain).__name__.lower() == f"{family}forsequenceclassification"
    torch.testing.assert_close(plain(**asked).logits, logits[-1], atol=1e-5, rtol=1e-5)
    saved = read_exits(tmp_path / "exits")
    assert (saved.layers, saved.pooling, saved.policy.criterion) == ([1, 2], "first", "entropy")
    entropies = [-(one.softmax(-1) * one.log_softmax(-1)).sum(-1) for one in logits]
    left = set()
    for limit in (0.0, *saved.policy.thresholds[:1], 0.3, 0.6, 0.9, 2.0):
        policy = ExitPolicy(criterion="entropy", thresholds=[limit] * (LAYERS - 1))
        out = with_exits(plain, tmp_path / "exits", policy).eval()(**asked)
        for row in range(8):
            layer = next((n for n in range(1, LAYERS) if entropies[n - 1][row] < limit), LAYERS)
            assert int(out.exit_layers[row]) == layer
            torch.testing.assert_close(out.logits[row], logits[layer - 1][row], atol=1e-5, rtol=1e-5)
            left.add(layer)
    assert left == {1, 2, 3}
    assert load_model(tmp_path / "exits")(**asked).exit_layers.shape == (8,)
    report = json.loads((tmp_path / "exits" / "export.json").read_text())["imported"]
    assert (report["from"], report["exits"]) == ("deebert", [1, 2])


def test_safetensors_are_read_too(tmp_path: Path) -> None:
    """Of a folder that was converted on the way; the same model comes of it."""
    source = masked_bert(tmp_path / "masked", "topK")
    command = ["--import_from", "masked_bert", "--threshold", 0.5]
    assert exported(source, *command, "--output_dir", tmp_path / "one") == 0
    state = torch.load(source / "pytorch_model.bin", weights_only=True)
    save_file({name: value.contiguous() for name, value in state.items()}, source / "model.safetensors")
    (source / "pytorch_model.bin").unlink()
    assert exported(source, *command, "--output_dir", tmp_path / "two") == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one.keys() | two.keys())


def of_config(**fields: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return spoil


def of_weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "pytorch_model.bin"
        state = torch.load(path, weights_only=True)
        torch.save(change(state) or state, path)

    return spoil


QUERY = "bert.encoder.layer.1.attention.self.query"
MASKED = ("masked_bert", "--threshold", "0.15")
CASES: dict[str, tuple[tuple[str, ...], Callable[[Path], Any], str]] = {
    "no threshold": (("masked_bert",), lambda folder: None, "--threshold is missing"),
    "a share of 15": (
        ("masked_bert", "--threshold", "15"),
        lambda folder: None,
        "topK takes the share to keep, above 0",
    ),
    "no number": (("masked_bert", "--threshold", "nan"), lambda folder: None, "--threshold is nan"),
    "another program's": (MASKED, of_config(model_type="bert"), 'says model_type "bert"'),
    "no program's": (MASKED, of_config(model_type=None), "says model_type null"),
    "an unknown method": (MASKED, of_config(pruning_method="random"), '"random": known are topK'),
    "another size": (MASKED, of_config(hidden_size=18), "do not fit its config.json"),
    "another head": (MASKED, of_config(architectures=["MaskedBertForTokenClassification"]), "TokenClassification"),
    "no scores": (
        MASKED,
        of_weights(lambda s: s.pop(f"{QUERY}.mask_scores") is None),
        f"do not go with its matrices and topK: KeyError: '{QUERY}.mask_scores'",
    ),
    "no weights": (
        MASKED,
        of_weights(lambda s: s.pop(f"{QUERY}.weight") is None),
        f'Missing key(s) in state_dict: "{QUERY}.weight"',
    ),
    "no head": (MASKED, of_weights(lambda s: s.pop("classifier.weight") is None), "with classifier.weight"),
    "a list": (MASKED, of_weights(lambda s: [*s]), "cannot be loaded"),
    "junk": (MASKED, lambda folder: (folder / "pytorch_model.bin").write_bytes(b"junk" * 99), "cannot be loaded"),
    "no file": (
        MASKED,
        lambda folder: (folder / "pytorch_model.bin").unlink(),
        "has no weights: it has no model.safetensors or pytorch_model.bin",
    ),
    "no words": (MASKED, lambda folder: (folder / "vocab.txt").unlink(), "masked cannot be loaded"),
    "a masked BERT as a DeeBERT": (("deebert",), lambda folder: None, 'says model_type "masked_bert"'),
    "a plain BERT as a DeeBERT": (
        ("deebert",),
        lambda folder: [of_config(model_type="bert", architectures=[])(folder), of_weights(without_scores)(folder)],
        "not those of DeeBERT's second stage",
    ),
    "a threshold of exits": (("deebert", "--threshold", "0.1"), of_config(model_type="bert"), "drop it"),
    "something to do beside": ((*MASKED, "--onnx"), lambda folder: None, "--import_from goes with --output_dir alone"),
}


def without_scores(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if not name.endswith("mask_scores")}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return masked_bert(tmp_path_factory.mktemp("sound") / "masked", "topK")


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_error(case: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one message, and nothing is written."""
    flags, spoil, words = CASES[case]
    folder = tmp_path / "masked"
    folder.mkdir()
    for path in sound.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    spoil(folder)
    assert exported(folder, "--import_from", *flags, "--output_dir", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["masked"]


def test_a_threshold_alone_and_a_folder_of_its_own(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flag says nothing without a program, and the imported model goes to a folder of its own."""
    assert exported(sound, "--onnx", "--threshold", 0.1) == 2
    assert "--threshold goes with --import_from masked_bert" in capsys.readouterr().err
    assert exported(sound, "--import_from", *MASKED) == 2
    assert "stays as it is: give --output_dir" in capsys.readouterr().err


def test_the_pickle_runs_no_code(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is read as weights only."""
    folder = tmp_path / "masked"
    folder.mkdir()
    for path in sound.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    torch.save({"classifier.bias": Evil(tmp_path / "it_ran")}, folder / "pytorch_model.bin")
    assert exported(folder, "--import_from", *MASKED, "--output_dir", tmp_path / "out") == 2
    assert "cannot be loaded" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["masked"]
    torch.load(folder / "pytorch_model.bin", weights_only=False)  # the test can fail: loaded otherwise, it does run
    assert (tmp_path / "it_ran").exists()
