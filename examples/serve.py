"""Serve a text classifier over HTTP on this machine, one request at a time: an example to start from.

python examples/serve.py OUT/model
python examples/serve.py OUT/onnx --onnx
curl -d '{"texts": ["a fine film", "a dull one"]}' http://127.0.0.1:8000

With --onnx the folder's .onnx file answers, in onnxruntime, and torch is not loaded.
"""

import argparse
import json
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

MOST_BYTES, MOST_TEXTS = 1 << 20, 256
"""The limits of a request: all its texts are one batch."""
Forward = Callable[[Any], tuple[Any, list[int] | None]]
"""Gives the logits of tokenised texts, and the layers they left at where the model has exit heads."""


class BadRequestError(ValueError):
    """A request that is not what this server answers."""


def by_torch(folder: str) -> Forward:
    import torch

    import ds_trainer

    model: Any = ds_trainer.load_model(folder)

    @torch.inference_mode()
    def forward(tokens: Any) -> tuple[Any, list[int] | None]:
        out = model(**tokens.convert_to_tensors("pt"))
        return out.logits.numpy(), out.exit_layers.tolist() if "exit_layers" in out else None

    return forward


def by_onnxruntime(path: Path) -> Forward:
    import onnxruntime

    options = onnxruntime.SessionOptions()  # fused, addition and layer norm take longer in an int8 file than apart
    options.add_session_config_entry("optimization.disable_specified_optimizers", "SkipLayerNormFusion")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def forward(tokens: Any) -> tuple[Any, None]:
        (logits,) = session.run(None, {name: np.array(tokens[name], np.int64) for name in names})
        return logits, None

    return forward


def load_classifier(folder: str, max_length: int | None, onnx: str | None) -> Callable[[list[str]], dict[str, Any]]:
    """Return a function that classifies texts in one batch."""
    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    (architecture,) = config["architectures"]
    several = config.get("problem_type") == "multi_label_classification"
    if not architecture.endswith("ForSequenceClassification") or config.get("problem_type") == "regression":
        sys.exit(f"{folder} holds a {architecture}, and this server answers with classes of texts")
    forward = by_onnxruntime(Path(folder, onnx)) if onnx else by_torch(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    named = config.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # transformers does not write its default
    names = [named[str(index)] for index in range(len(named))]
    length = max_length or min(tokenizer.model_max_length, 512)  # a tokenizer without a length says 10**30

    def classify(texts: list[str]) -> dict[str, Any]:
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=length, return_token_type_ids=bool(onnx))
        logits, layers = forward(tokens)
        if several:
            probabilities = 1 / (1 + np.exp(-logits))
            labels: list[Any] = [[names[index] for index in np.flatnonzero(row > 0.5)] for row in probabilities]
        else:
            powers = np.exp(logits - logits.max(-1, keepdims=True))
            probabilities = powers / powers.sum(-1, keepdims=True)
            labels = [names[index] for index in probabilities.argmax(-1)]
        return {"labels": labels, "probabilities": probabilities.tolist(), "exit_layers": layers}

    return classify


def texts_of(body: bytes) -> list[str]:
    """Return the texts of a request."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"this is no JSON: {error}") from None
    texts = request.get("texts") if isinstance(request, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadRequestError("texts must be a list of texts")
    if not 1 <= len(texts) <= MOST_TEXTS:
        raise BadRequestError(f"there are {len(texts)} texts, and a request has 1 to {MOST_TEXTS}")
    return texts


def make_server(folder: str, port: int, max_length: int | None = None, onnx: str | None = None) -> HTTPServer:
    """Return a server on 127.0.0.1 that answers POSTs of {"texts": [...]}."""
    classify = load_classifier(folder, max_length, onnx)

    class Handler(BaseHTTPRequestHandler):
        timeout = 10
        """In seconds: a client that sends less than it says would keep all others waiting."""

        def do_POST(self) -> None:
            try:
                size = self.headers.get("Content-Length", "")
                if not (size.isdecimal() and int(size) <= MOST_BYTES):
                    raise BadRequestError(f"Content-Length is {size or 'missing'}, and at most {MOST_BYTES}")
                status, answer = 200, classify(texts_of(self.rfile.read(int(size))))
            except BadRequestError as error:
                status, answer = 400, {"error": f'send {{"texts": ["a text", ...]}}: {error}'}
            except TimeoutError:
                raise
            except Exception as error:  # noqa: BLE001 - one text that the model fails on must not end in no reply
                status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

    return HTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="the model folder, or the folder of an ONNX export")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max_length", type=int, help="in tokens; longer texts are cut, by default as in training")
    file = "answer by this file of the folder, in onnxruntime; model.onnx by default"
    parser.add_argument("--onnx", nargs="?", const="model.onnx", metavar="FILE", help=file)
    make_server(**vars(parser.parse_args())).serve_forever()
