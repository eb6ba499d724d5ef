"""The examples run, and the pages that scripts write are what the scripts write now."""

import contextlib
import http.client
import json
import re
import runpy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import exported_models
from support.exit_folders import make_classifier
from support.launching import ROOT

from ds_trainer.cli.command import run_command
from ds_trainer.cli.export import export_command
from ds_trainer.models.folders import train_tokenizer
from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.ranks.failures import UserError
from tools import write_recipe_docs
from tools.write_matrix import PAGE, README, short


@contextlib.contextmanager
def serving(*arguments: Any) -> Iterator[Callable[..., tuple[int, Any]]]:
    """Serve, and yield a function that sends a body, with headers, and returns the reply's status and its JSON."""
    server = runpy.run_path(str(ROOT / "examples/serve.py"))["make_server"](*arguments)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def ask(body: bytes, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        connection.request("POST", "/", body, {name.replace("_", "-"): value for name, value in headers.items()})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())

    try:
        yield ask
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_server_classifies_a_batch(csv_folder: Path, tmp_path: Path) -> None:
    """Each text gets a label, its probabilities and the layer it left at; what is no request gets status 400.

    So does a size that would be read for ever; a text that the model fails on gets status 500.
    """
    folder = make_classifier(tmp_path / "model", csv_folder, tmp_path / "cache")
    bad = [b"", b"no", b"[" * 9**5, b"[]", b"{}", b"null", b"\xff"]
    bad += [json.dumps({"texts": texts}).encode() for texts in ([], "a wren", None, [1], [["a", "b"]], ["a"] * 257)]
    with serving(str(folder), 0, 24) as ask:
        status, answer = ask(json.dumps({"texts": ["an old apple", "a wren"]}).encode())
        assert status == 200
        assert len(answer["labels"]) == len(answer["exit_layers"]) == 2
        assert [sum(shares) for shares in answer["probabilities"]] == pytest.approx([1, 1])
        for body in bad:
            status, answer = ask(body)
            assert (status, answer["error"][:16]) == (400, 'send {"texts": ['), body
        for size in ("-1", "9" * 9, "many"):
            assert ask(b"", Content_Length=size)[0] == 400
        assert ask(json.dumps({"texts": ["\ud800"]}).encode())[0] == 500
        assert ask(b'{"texts": ["a wren"]}')[0] == 200


def test_the_server_answers_by_an_onnx_file(tmp_path: Path) -> None:
    """As by the model, from the folder that the export wrote alone. What gives no classes of texts is not served."""
    model, out = exported_models.save("cls", tmp_path / "model"), tmp_path / "out"
    assert run_command(export_command, [str(model), "--onnx", "--output_dir", str(out)]) == 0
    body = json.dumps({"texts": exported_models.TEXTS}).encode()
    with serving(str(model), 0) as ask, serving(str(out), 0, None, "model.onnx") as by_file:
        (_, expected), (status, answer) = ask(body), by_file(body)
    assert (status, answer["labels"]) == (200, expected["labels"])
    for ours, theirs in zip(answer["probabilities"], expected["probabilities"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    with (
        pytest.raises(SystemExit, match="holds a BertForQuestionAnswering"),
        serving(str(exported_models.save("qa", tmp_path / "qa")), 0),
    ):
        pass


def test_the_task_of_ratings_takes_only_what_it_can_score(tmp_path: Path) -> None:
    """A rating off the scale is named by its line, and logits that are NaN are not scored."""
    train_tokenizer(["a red round ball"] * 5, 40, True).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    rows = [{"text": "a red ball", "stars": 3}, {"text": "a ball", "stars": "1"}]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "none.jsonl").write_text(json.dumps({"text": "a ball", "stars": 4}))
    example = runpy.run_path(str(ROOT / "examples" / "ratings.py"))
    fields = {"name": "ratings", "stars": 3, "data_dir": str(tmp_path)}
    spec = example["RatingsSpec"](**fields, train_file="none.jsonl", validation_file="some.jsonl")
    task = example["RatingsTask"](spec, load_tokenizer(tmp_path), tmp_path, tmp_path / "cache")
    with pytest.raises(UserError, match=r"none\.jsonl, line 1: it must have a text, and 1 to 3 stars"):
        task.examples("train")
    assert task.collate(task.examples("validation"), [0, 1]).labels.tolist() == [[1, 1], [0, 0]]
    assert task.score("validation", {0: [1.0, -1.0], 1: [-1.0, -1.0]}) == {"stars_off": 0.5}
    with pytest.raises(UserError, match="logits that are not finite"):
        task.score("validation", {0: [float("nan")] * 2, 1: [0.0, 0.0]})


def test_the_page_of_recipes_is_what_its_script_writes() -> None:
    """docs/recipes.md has the fields of the schema as they are now."""
    assert write_recipe_docs.PAGE.read_text(encoding="utf-8") == write_recipe_docs.page(), "run write_recipe_docs.py"


def test_the_tests_that_the_matrix_names_exist() -> None:
    """docs/matrix.md proves each "yes" by a test; a test that was renamed must be named anew. So does the README."""
    named = set(re.findall(r"\[(?:yes|neurons)\]\(([^ ]+\.py) \"(test_\w+)\"\)", PAGE.read_text(encoding="utf-8")))
    assert len(named) >= 15
    texts = {path: (PAGE.parent / path).read_text(encoding="utf-8") for path, _ in named}
    assert [test for path, test in named if f"def {test}(" not in texts[path]] == [], "run tools/write_matrix.py"
    assert short(PAGE.read_text(encoding="utf-8")) in README.read_text(encoding="utf-8")
