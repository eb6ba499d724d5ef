"""The example server: texts in, labels out, many requests in one batch."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from support.launching import ROOT, run_python
from transformers import AutoModelForSequenceClassification

from ds_trainer import load_model
from ds_trainer.config.exit_specs import ExitPolicy, SavedExits
from ds_trainer.config.recipe import parse_task
from ds_trainer.deploy import serving
from ds_trainer.models.folders import create_folder, save_folder, train_tokenizer
from ds_trainer.tasks.registry import build_task
from ds_trainer.techniques.exits.early_exit import EarlyExitModel
from ds_trainer.techniques.exits.heads import new_heads, save_heads
from ds_trainer.techniques.exits.policy import confidence

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
    never = EarlyExitModel(model, heads, ExitPolicy(criterion="confidence", thresholds=[1.0]))
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


def until(condition) -> None:
    """Wait for what other threads are about to do; fail where it takes half a minute."""
    pause, end = threading.Event(), time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        pause.wait(0.001)


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
    until(lambda: classifier._waiting.qsize() == 7)
    go_on.set()
    for caller in callers:
        caller.join(30)
    assert sizes == [1, 7]
    expected = alone(folder)
    assert [answers[n][0]["label"] for n in range(8)] == [expected[n % 4]["label"] for n in range(8)]


@pytest.mark.parametrize("text", ["\ud800", 7, ["a", 7]])
def test_what_cannot_be_tokenised_is_the_asker_s_mistake(folder, text):
    """Told before it waits with others' texts; a lone surrogate is a string to Python and no text to a tokenizer."""
    classifier = serving.Classifier(str(folder), 8, 32)
    with pytest.raises(ValueError, match="text 2 cannot be tokenised"):
        classifier.rows(["fine", text])
    classifier.close()


def test_who_shares_a_batch_with_one_that_fails_gets_an_answer(folder):
    """It is run row by row: only the one that fails alone is told so, and the next are served."""
    classifier = serving.Classifier(str(folder), 8, 32)
    inner = classifier._answers
    bad = classifier.rows(["owl owl owl"])[0]

    def failing(rows):
        if bad in rows:
            raise RuntimeError("a broken row")
        return inner(rows)

    classifier._answers = failing
    asked = [(row, Future()) for row in [*classifier.rows(TEXTS), bad]]
    for _, future in asked:
        future.set_running_or_notify_cancel()
    classifier._answer_all(asked)
    answers = [future.result(0)["label"] for _, future in asked[:-1]]
    assert answers == [answer["label"] for answer in alone(folder)]
    with pytest.raises(RuntimeError, match="a broken row"):
        classifier.answers([bad])
    assert len(classifier(TEXTS)) == len(TEXTS)


def test_threads_that_tokenise_at_once_do_not_meet(folder):
    """Eight at once, of long texts: each gets its own, cut; truncation is a state that the threads share."""
    classifier = serving.Classifier(str(folder), 8, 8)
    long = [" ".join(["apple saw wren"] * 20_000)] * 2
    found = []
    callers = [
        threading.Thread(target=lambda: found.append([len(row["input_ids"]) for row in classifier.rows(long)]))
        for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert found == [[8, 8]] * 8


@pytest.fixture
def blocked(folder):
    """A classifier whose worker has taken one text, says so, and waits to be let go on."""
    classifier, started, go_on = serving.Classifier(str(folder), 2, 32), threading.Event(), threading.Event()
    inner = classifier._answers
    classifier._answers = lambda rows: (started.set(), go_on.wait(30), inner(rows))[2]
    yield classifier, started, go_on
    go_on.set()


def test_more_than_may_wait_are_sent_away(blocked, monkeypatch):
    """At once, so that they can ask another; what waits is answered, and nothing of the refused is computed."""
    classifier, started, go_on = blocked
    classifier._waiting.maxsize = 3
    answers = []
    caller = threading.Thread(target=lambda: answers.append(classifier(["plum"])))
    caller.start()
    assert started.wait(30)
    with pytest.raises(serving.OverloadedError, match="try again later"):
        classifier(["a"] * 4)
    monkeypatch.setattr(serving, "_MAX_WAITING", 3)
    with pytest.raises(ValueError, match="there are 4 texts: send 3 at most"):
        classifier.rows(["a"] * 4)
    ran = []
    inner = classifier._answer
    classifier._answer = lambda row: (ran.append(1), inner(row))[1]
    go_on.set()
    caller.join(30)
    classifier.close()
    assert len(answers[0]) == len(ran) == 1


def test_closing_answers_what_waits(blocked):
    """And ends the thread."""
    classifier, started, go_on = blocked
    answers = []
    callers = [threading.Thread(target=lambda: answers.append(classifier(["plum"]))) for _ in range(5)]
    callers[0].start()
    assert started.wait(30)  # alone: the others would else be taken with it
    for caller in callers[1:]:
        caller.start()
    until(lambda: classifier._waiting.qsize() == 4)
    go_on.set()
    classifier.close()
    for caller in callers:
        caller.join(30)
    assert len(answers) == 5
    assert not classifier._worker.is_alive()


def test_a_model_that_says_nan_is_told(folder):
    """JSON has no NaN; the texts are not to blame."""
    classifier = serving.Classifier(str(folder), 8, 32)
    for parameter in classifier.model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        classifier(TEXTS)


def test_token_types_go_only_to_models_that_tell_two_texts_by_them(folder, tmp_path):
    """A RoBERTa has one type, and a second text's would be beyond its table; BERT gets those it was trained with."""
    assert set(serving.Classifier(str(folder), 8, 32).rows([["a", "b"]])[0]) >= {"token_type_ids", "attention_mask"}
    config = {"model_type": "roberta", "type_vocab_size": 1, "hidden_size": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 40}
    tokenizer = train_tokenizer([" ".join(map(str, TEXTS))], 96, True)
    create_folder(config, tokenizer, tmp_path / "new", seed=0)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "new")
    save_folder(model, tokenizer, tmp_path / "roberta")
    classifier = serving.Classifier(str(tmp_path / "roberta"), 8, 32)
    assert "token_type_ids" not in classifier.rows([["a", "b"]])[0]
    assert len(classifier([["a saw", "a drill"], "plum"])) == 2


@contextlib.contextmanager
def serving_at(classifier) -> Iterator[str]:
    """The address of a server of this classifier, in this process."""
    with serving._Server(("127.0.0.1", 0), serving._handler_of(classifier)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def asked(address: str, body: bytes) -> tuple[int, dict]:
    """Status and JSON of the reply."""
    try:
        with urllib.request.urlopen(address, data=body, timeout=30) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_every_failure_is_a_reply_in_json(folder):
    """400 for what was sent, 503 where too many wait, 500 with the cause for all else."""
    classifier = serving.Classifier(str(folder), 8, 32)
    body = json.dumps({"texts": ["plum"]}).encode()

    def failing(error):
        def answers(_):
            raise error

        return answers

    with serving_at(classifier) as address:
        assert asked(address, b'{"texts": ["\\ud800"]}')[0] == 400
        for error, status in ((ValueError("of the model"), 500), (serving.OverloadedError("later"), 503)):
            classifier.answers = failing(error)
            found = asked(address, body)
            assert found[0] == status
            assert str(error) in found[1]["error"]
        del classifier.answers
        assert asked(address, body)[0] == 200


def test_a_client_that_says_nothing_is_given_up(folder, monkeypatch, capsys):
    """Its thread would be kept for ever; one that has gone away is no traceback."""
    classifier = serving.Classifier(str(folder), 8, 32)
    handler = serving._handler_of(classifier)
    assert handler.timeout == 30
    monkeypatch.setattr(serving, "_TIMEOUT", 0.2)
    with serving_at(classifier) as address:
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(b"POST / HTTP/1.0\r\nContent-Length: 50\r\n\r\n{")
            assert client.recv(10) == b"", "closed, unanswered"
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"POST / HTTP/1.0\r\nContent-Length: 50\r\n\r\n{")
    assert "Traceback" not in capsys.readouterr().err


def test_it_serves_over_http_on_this_machine_only(folder):
    """The command serves; what is no request is told with status 400, and the server lives on until it is ended."""
    command = [sys.executable, "launch/serve.py", str(folder), "--port", "0", "--max_seq_length", "32"]
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
                b'{"texts": ["\\ud800"]}',
                b"[" * 9999,
            ):
                status, reply = asked(address, body)
                assert status == 400
                assert "error" in reply
            status, reply = asked(address, json.dumps({"texts": TEXTS}).encode())
            assert [answer["label"] for answer in reply["answers"]] == [answer["label"] for answer in alone(folder)]
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
            assert server.stderr.read().strip() == "stopped"
        finally:
            server.kill()


def test_ctrl_c_ends_it(folder):
    """With exit code 0 and a word, not a traceback."""
    command = [sys.executable, "launch/serve.py", str(folder), "--port", "0", "--max_seq_length", "32"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            next(line for line in server.stderr if line.startswith("http://"))
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
            assert server.stderr.read().strip() == "stopped"
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/model"], "does not exist"),
        (["{model}", "--max_batch_size", "0"], "--max_batch_size"),
        (["{model}", "--port", "99999", "--max_seq_length", "32"], "--port"),
        (["{model}", "--max_seq_length", "33"], "the model has 32 positions"),
    ],
)
def test_what_cannot_be_served_is_told(folder, arguments, words):
    """Exit code 2 and one message."""
    done = run_python("launch/serve.py", *(argument.format(model=folder) for argument in arguments))
    assert done.returncode == 2, done.stderr[-2000:]
    assert words in done.stderr
    assert "Traceback" not in done.stderr
