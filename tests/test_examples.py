"""The examples run, and the pages that scripts write are what the scripts write now."""

import json
import re
import runpy
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from support.exit_folders import make_classifier
from support.launching import ROOT
from tools import write_recipe_docs
from tools.write_matrix import PAGE, README, short
from transformers import BertConfig, BertForSequenceClassification

from ds_trainer.models.folders import train_tokenizer
from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.ranks.failures import UserError


def test_the_server_classifies_a_batch(csv_folder: Path, tmp_path: Path) -> None:
    """Each text gets a label, its probabilities and the layer it left at; what is no request gets status 400."""
    folder = make_classifier(tmp_path / "model", csv_folder, tmp_path / "cache")
    server = runpy.run_path(str(ROOT / "examples/serve.py"))["make_server"](str(folder), 0, 24)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        body = json.dumps({"texts": ["an old apple", "a wren"]}).encode()
        with urllib.request.urlopen(address, data=body, timeout=30) as reply:
            answer = json.loads(reply.read())
        assert len(answer["labels"]) == len(answer["exit_layers"]) == 2
        assert [sum(shares) for shares in answer["probabilities"]] == pytest.approx([1, 1])
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(address, data=b"{}", timeout=30)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_task_of_many_labels_takes_only_what_it_can_score(tmp_path: Path) -> None:
    """A label that is no text is named by its line, a pickle is not read, and logits that are NaN are not scored."""
    tokenizer = train_tokenizer(["a red round ball"] * 5, 40, True)
    tokenizer.save_pretrained(tmp_path)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **sizes))
    model.save_pretrained(tmp_path)
    rows = [{"text": "a red ball", "labels": "red|old"}, {"text": "a ball", "labels": ""}]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "none.jsonl").write_text(json.dumps({"text": "a ball", "labels": None}))
    example = runpy.run_path(str(ROOT / "examples" / "multilabel.py"))
    fields = {"name": "multilabel", "labels": ["red", "round"], "data_dir": str(tmp_path)}
    spec = example["MultilabelSpec"](**fields, train_file="none.jsonl", validation_file="some.jsonl")
    task = example["MultilabelTask"](spec, load_tokenizer(tmp_path), tmp_path, tmp_path / "cache")
    with pytest.raises(UserError, match=r"none\.jsonl, line 1: text and labels must be text"):
        task.examples("train")
    assert task.score("validation", {0: [1.0, -1.0], 1: [-1.0, -1.0]}) == {"f1": 1.0}
    with pytest.raises(UserError, match="logits that are not finite"):
        task.score("validation", {0: [float("nan")] * 2, 1: [0.0, 0.0]})
    assert task.build_model(tmp_path).config.problem_type == "multi_label_classification"
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="--allow_pickle"):
        task.build_model(tmp_path)


def test_the_page_of_recipes_is_what_its_script_writes() -> None:
    """docs/recipes.md has the fields of the schema as they are now."""
    assert write_recipe_docs.PAGE.read_text(encoding="utf-8") == write_recipe_docs.page(), "run write_recipe_docs.py"


def test_the_tests_that_the_matrix_names_exist() -> None:
    """docs/matrix.md proves each "yes" by a test; a test that was renamed must be named anew. So does the README."""
    named = set(re.findall(r"\[(?:yes|neurons)\]\(([^ ]+\.py) \"(test_\w+)\"\)", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 20
    texts = {path: (PAGE.parent / path).read_text(encoding="utf-8") for path, _ in named}
    assert [test for path, test in named if f"def {test}(" not in texts[path]] == [], "run tests/tools/write_matrix.py"
    assert short(PAGE.read_text(encoding="utf-8")) in README.read_text(encoding="utf-8")
