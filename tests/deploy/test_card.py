"""Cards describe models and load them, and none of a user's own is replaced; the hub gets a folder when asked."""

from __future__ import annotations

import base64
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from support.launching import ROOT

from ds_trainer.cli.command import run_command
from ds_trainer.cli.export import export_command
from ds_trainer.cli.train import read_train_job, train
from ds_trainer.config.recipe import ModelSpec, parse_recipe
from ds_trainer.deploy.card import write_cards
from ds_trainer.files.run_folder import CARD, RunFolder

TASK = {"name": "text", "data_dir": "/home/me/secret/data", "validation_file": "validation.csv", "held_out": 0.2}


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of version 0.1 with three phases: plain, cut, and with an exit."""
    return Path(shutil.copytree(ROOT / "tests" / "fixtures" / "version_0_1" / "run", tmp_path / "run"))


def write(run: Path, model: str) -> dict[str, ModelCard]:
    recipe = parse_recipe(json.loads((run / "recipe.json").read_text()) | {"task": TASK})
    write_cards(run, recipe.model_copy(update={"model": ModelSpec(name_or_path=model)}))
    return {name: ModelCard.load(run / name / "model" / CARD) for name in ("finetune", "prune", ".")}


def test_the_cards_of_a_run_describe_and_load_its_models(run):
    """With the scores as the hub reads them, the table of the phases, and the recipe without places of this machine."""
    cards = write(run, "google/bert_uncased")
    for name, card in cards.items():
        (result,) = card.data.eval_results
        assert (result.task_type, result.metric_type, result.metric_value) == ("text-classification", "accuracy", 0.375)
        assert (card.data.base_model, card.data.library_name) == ("google/bert_uncased", "transformers")
        assert "| parameters | 4,786 | 3,054 | 3,054 |" in card.text
        assert '".../data"' in card.text
        assert "secret" not in card.text
        blocks = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
        assert ["trust_remote_code" in blocks[0], len(blocks)] == [name != "finetune", 1 + (name == ".")]
    loaded: dict = {}
    exec(blocks[1].replace("FOLDER", str(run / "model")), loaded)
    assert type(loaded["model"]).__name__ == "EarlyExitModel"


def test_a_card_of_the_user_stays(run, tmp_path):
    """Where our mark is gone from it; ours are replaced, and deleted with the run, and name the model's own base."""
    write(run, "google/bert_uncased")
    mine = run / "prune" / "model" / CARD
    mine.write_text("mine")
    start = shutil.copytree(run / "model", tmp_path / "start")
    ours = write(run, str(start))["."]
    assert ours.data.base_model == "google/bert_uncased"
    assert "from google/bert_uncased, for" in ours.text
    command = [str(start), "--compact", "fp16", "--output_dir", str(mine.parent), "--overwrite"]
    assert run_command(export_command, command) == 0
    assert mine.read_text() == "mine"
    RunFolder(run).open(overwrite=True)
    assert list(run.rglob(CARD)) == [mine]


class _Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of the hub to upload a folder of small files, which a commit has in base64."""

    received: dict[str, bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        step = self.path.split("?")[0].split("/")[-2:]
        if step == ["repos", "create"]:
            name = json.loads(body)
            answer = {"url": f"http://{self.headers['Host']}/{name['organization']}/{name['name']}"}
        elif step[0] == "preupload":
            files = json.loads(body)["files"]
            answer = {
                "files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            }
        elif step[0] == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.received[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": f"http://{self.headers['Host']}/me/small/commit/1", "commitOid": "1"}
        else:
            answer = {}
        self.send_response(401 if "me/small" not in self.path and step[0] in ("preupload", "commit") else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch):
    """A stand-in of the hub; the files of commits are in `received`."""
    server = HTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"received": {}}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    yield server.RequestHandlerClass
    server.shutdown()
    server.server_close()


def test_a_folder_is_sent_to_the_hub_when_asked(run, hub, tmp_path, capsys, monkeypatch):
    """A model as it is, one that is exported first, and that of a run; a refusal is an error that names the folder."""
    write(run, "google/bert_uncased")
    folder, out = run / "prune" / "model", tmp_path / "out"
    assert run_command(export_command, [str(folder), "--compact", "fp16", "--output_dir", str(out)]) == 0
    assert hub.received == {}
    for sent, more in ((folder, []), (out, ["--compact", "fp16", "--output_dir", str(out), "--overwrite"])):
        assert run_command(export_command, [str(folder), *more, "--push_to_hub", "me/small"]) == 0
        assert hub.received == {path.name: path.read_bytes() for path in sent.iterdir()}
        assert ModelCard(hub.received[CARD].decode()).data.base_model == "google/bert_uncased"
        hub.received.clear()
    monkeypatch.setattr("ds_trainer.run.run", lambda job: {})
    files = ["--deepspeed_config", "zero0", "--recipe", "quickstart", "--output_dir", str(run)]
    train(read_train_job([*files, "--overwrite_output_dir", "--push_to_hub", "me/small"]))
    assert hub.received == {path.name: path.read_bytes() for path in (run / "model").iterdir()}
    assert run_command(export_command, [str(folder), "--push_to_hub", "other/small"]) == 2
    assert f"--push_to_hub other/small: {folder} is whole here, and was not sent: " in capsys.readouterr().err
    assert run_command(export_command, [str(folder), "--push_to_hub", "a/b/c"]) == 2
