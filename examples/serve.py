"""Serve a text classifier over HTTP on this machine, one request at a time: an example to start from.

python examples/serve.py OUT/model
curl -d '{"texts": ["a fine film", "a dull one"]}' http://127.0.0.1:8000
"""

import argparse
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from transformers import AutoTokenizer

import ds_trainer


def load_classifier(folder: str, max_length: int) -> Callable[[list[str]], dict[str, Any]]:
    """Return a function that classifies texts in one batch."""
    model: Any = ds_trainer.load_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def classify(texts: list[str]) -> dict[str, Any]:
        out = model(**tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt"))
        probabilities = out.logits.softmax(-1)
        labels = [model.config.id2label[index] for index in probabilities.argmax(-1).tolist()]
        layers = out.exit_layers.tolist() if "exit_layers" in out else None  # None: the model has no exit heads
        return {"labels": labels, "probabilities": probabilities.tolist(), "exit_layers": layers}

    return classify


def make_server(folder: str, port: int, max_length: int) -> HTTPServer:
    """Return a server on 127.0.0.1 that answers POSTs of {"texts": [...]}."""
    classify = load_classifier(folder, max_length)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = 200, classify(json.loads(body)["texts"])
            except (KeyError, TypeError, ValueError) as error:
                status, answer = 400, {"error": f'send {{"texts": ["a text", ...]}} ({error})'}
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

    return HTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="the model folder")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max_length", type=int, default=128, help="in tokens; longer texts are cut")
    make_server(**vars(parser.parse_args())).serve_forever()
