"""The example server: texts in, labels out, many requests in one batch."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from launching import ROOT, run_python

from ds_trainer import load_model, serving
from ds_trainer.exit_specs import ExitPolicy, SavedExits
from ds_trainer.models import create_folder, save_folder, train_tokenizer
from ds_trainer.recipe import parse_task
from ds_trainer.tasks import build_task
from ds_trainer.techniques.early_exit import EarlyExitModel
from ds_trainer.techniques.exit_heads import new_heads, save_heads
from ds_trainer.techniques.exit_policy import confidence

TEXTS = ["the old apple", "a hammer and a saw and a drill", ["some wren", "a finch"], "plum"]


@pytest.fixture(scope="module")
def folder(tiny_recipe, tmp_path_factory) -> Path:
    """A tiny classifier with a head after its first layer, at which about half of the texts leave."""
    root = tmp_path_factory.mktemp("served")
    tokenizer = train_tokenizer([" ".join(map(str, TEXTS))], 96, True)
    create_folder(tiny_recipe["model"]["config"], tokenizer, root / "new", seed=0)
    task = build_task(parse_task(tiny_recipe["task"]), root / "new", root / "cache")
    torch.manual_seed(0)
    model = task.build_model(root / "new")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    heads = new_heads(model.eval(), [1], None)
    never = EarlyExitModel(model, heads, ExitPolicy(criterion="confidence", thresholds=[2.0]))
    inputs = [tokenizer(*(text if isinstance(text, list) else [text]), return_tensors="pt") for text in TEXTS]
    shares = torch.stack([confidence(never.all_logits(**row)[0, 0]) for row in inputs])
    policy = ExitPolicy(criterion="confidence", thresholds=[float(shares.sort().values[1:3].mean())])
    saved = SavedExits(layers=[1], pooling="first", policy=policy)
    save_folder(model, tokenizer, root / "model", lambda aside: save_heads(aside, heads, saved))
    return root / "model"


def alone(folder: Path) -> list[dict]:
    """What the model says of each text by itself."""
    model, classifier = load_model(folder), serving.Classifier(str(folder), 1, 32)
    answers = []
    for text in TEXTS:
        inputs = classifier.tokenizer(*(text if isinstance(text, list) else [text]), return_tensors="pt")
        out = model(**inputs)
        shares = out.logits[0].softmax(-1)
        answers.append(
            {
                "label": model.config.id2label[int(shares.argmax())],
                "share": float(shares.max()),
                "layer": int(out.exit_layers),
            }
        )
    return answers


def test_a_batch_answers_each_text_as_alone(folder):
    """Texts and pairs of texts together, in order, with the layers that each went through."""
    found = serving.Classifier(str(folder), 8, 32)(TEXTS)
    expected = alone(folder)
    assert [answer["label"] for answer in found] == [answer["label"] for answer in expected]
    assert [answer["exit_layer"] for answer in found] == [answer["layer"] for answer in expected]
    assert {answer["layer"] for answer in expected} == {1, 2}
    for answer, other in zip(found, expected, strict=True):
        assert answer["probabilities"][answer["label"]] == pytest.approx(other["share"], abs=1e-4)


def test_requests_that_wait_share_a_batch(folder):
    """Eight callers at once get their own answers, in fewer forwards than there are callers."""
    classifier = serving.Classifier(str(folder), 32, 32)
    sizes, started, go_on = [], threading.Event(), threading.Event()
    inner = classifier._answers

    def slow(texts):
        sizes.append(len(texts))
        started.set()
        go_on.wait(30)
        return inner(texts)

    classifier._answers = slow
    answers: dict[int, list] = {}
    callers = [threading.Thread(target=lambda n=n: answers.update({n: classifier([TEXTS[n % 4]])})) for n in range(8)]
    callers[0].start()
    assert started.wait(30)
    for caller in callers[1:]:
        caller.start()
    while classifier._waiting.qsize() < 7:
        pass
    go_on.set()
    for caller in callers:
        caller.join(30)
    assert sizes == [1, 7]
    expected = alone(folder)
    assert [answers[n][0]["label"] for n in range(8)] == [expected[n % 4]["label"] for n in range(8)]


def test_a_batch_that_fails_is_told_to_its_callers_and_the_next_is_served(folder):
    """An error inside a batch does not end the thread that serves."""
    classifier = serving.Classifier(str(folder), 8, 32)
    with pytest.raises(Exception, match=r"text input|str"):
        classifier([7])
    assert len(classifier(TEXTS)) == len(TEXTS)


def test_it_serves_over_http_on_this_machine_only(folder):
    """The command serves; what is no request is told with status 400, and the server lives on."""
    command = [sys.executable, "launch/serve.py", str(folder), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stderr if line.startswith("http://"))
            address = line.split()[0]
            assert address.startswith("http://127.0.0.1:")
            for body in (
                b"{",
                b"[]",
                b'{"texts": []}',
                b'{"texts": [["a", "b", "c"]]}',
                b'{"texts": [1]}',
                b"[" * 9999,
            ):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(address, data=body, timeout=30)
                assert refused.value.code == 400
                assert "error" in json.loads(refused.value.read())
            with urllib.request.urlopen(address, data=json.dumps({"texts": TEXTS}).encode(), timeout=30) as reply:
                answers = json.loads(reply.read())["answers"]
            assert [answer["label"] for answer in answers] == [answer["label"] for answer in alone(folder)]
        finally:
            server.terminate()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/model"], "does not exist"),
        (["{model}", "--max_batch_size", "0"], "--max_batch_size"),
        (["{model}", "--port", "99999"], "--port"),
    ],
)
def test_what_cannot_be_served_is_told(folder, arguments, words):
    """Exit code 2 and one message."""
    done = run_python("launch/serve.py", *(argument.format(model=folder) for argument in arguments))
    assert done.returncode == 2, done.stderr[-2000:]
    assert words in done.stderr
    assert "Traceback" not in done.stderr
