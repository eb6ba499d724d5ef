"""The examples run."""

import json
import runpy
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.exit_folders import make_classifier
from support.launching import ROOT


def test_the_server_classifies_a_batch(csv_folder: Path, tmp_path: Path) -> None:
    """Each text gets a label, its probabilities and the layer it left at; what is no request gets status 400."""
    folder = make_classifier(tmp_path / "model", csv_folder, tmp_path / "cache")
    server = runpy.run_path(str(ROOT / "examples" / "serve.py"))["make_server"](str(folder), 0, 24)
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
