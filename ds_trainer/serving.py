"""A small HTTP server for a text classifier: requests that wait are answered together, in one batch.

Early exit pays on batches too: samples that are sure leave, and the rest go on. Standard library only, on this machine
only (127.0.0.1): an example of serving to start from.
"""

from __future__ import annotations

import json
import queue
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from ds_trainer import distributed
from ds_trainer.tasks.pretrained import CLASSIFIER, load_config, load_tokenizer, pad_token_id
from ds_trainer.techniques.early_exit import load_model

_MAX_BYTES = 1 << 20


class Classifier:
    """Answers texts in batches; safe to call from many threads, whose texts share batches."""

    def __init__(self, folder: str, max_batch_size: int, max_seq_length: int) -> None:
        if not CLASSIFIER.trained_in(load_config(folder, CLASSIFIER)):
            raise ValueError(f"{folder} is no trained {CLASSIFIER.name}: it cannot be served")
        if max_batch_size < 1 or max_seq_length < 4:
            raise ValueError(
                f"--max_batch_size {max_batch_size}, --max_seq_length {max_seq_length}: give 1 and 4 or more"
            )
        self.model: Any = load_model(folder).to(distributed.device())
        self.tokenizer = load_tokenizer(folder)
        pad_token_id(self.tokenizer)  # a tokenizer without one is given one
        self.max_batch_size, self.max_seq_length = max_batch_size, max_seq_length
        self._waiting: queue.Queue[tuple[Any, Future[dict[str, Any]]]] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def __call__(self, texts: list[Any]) -> list[dict[str, Any]]:
        """For each text, or pair of texts: label and probabilities, or score; and `exit_layer`, the layers it took."""
        futures: list[Future[dict[str, Any]]] = [Future() for _ in texts]
        for text, future in zip(texts, futures, strict=True):
            self._waiting.put((text, future))
        return [future.result() for future in futures]

    def _work(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < self.max_batch_size and not self._waiting.empty():
                batch.append(self._waiting.get())
            texts, futures = zip(*batch, strict=True)
            try:
                for future, answer in zip(futures, self._answers(texts), strict=True):
                    future.set_result(answer)
            except Exception as error:  # noqa: BLE001 - the request gets it, and the next ones are served
                for future in futures:
                    if not future.done():
                        future.set_exception(error)

    @torch.no_grad()
    def _answers(self, texts: tuple[Any, ...]) -> list[dict[str, Any]]:
        parts = [text if isinstance(text, list) else [text] for text in texts]
        rows = [self.tokenizer(*part, truncation=True, max_length=self.max_seq_length) for part in parts]
        out = self.model(**self.tokenizer.pad(rows, return_tensors="pt").to(self.model.device))
        answers = [self._answer(row) for row in out.logits.float().cpu()]
        for answer, layer in zip(answers, out.get("exit_layers", []), strict=False):
            answer["exit_layer"] = int(layer)
        return answers

    def _answer(self, logits: torch.Tensor) -> dict[str, Any]:
        if len(logits) == 1:
            return {"score": float(logits)}
        names = self.model.config.id2label
        shares = logits.softmax(-1).tolist()
        probabilities = {names[index]: share for index, share in enumerate(shares)}
        return {"label": max(probabilities, key=probabilities.__getitem__), "probabilities": probabilities}


def serve(folder: str, port: int, max_batch_size: int, max_seq_length: int) -> None:
    """Answer POSTs of {"texts": [text, [first, second], ...]} until interrupted; ValueError where it cannot start."""
    classifier = Classifier(folder, max_batch_size, max_seq_length)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler_of(classifier))
    except (OSError, OverflowError) as error:
        raise ValueError(f"--port {port} cannot be listened on: {error}; give another") from error
    distributed.info(f"http://127.0.0.1:{server.server_port} serves {folder}")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        distributed.info("stopped")
    finally:
        server.server_close()


def _handler_of(classifier: Classifier) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                texts = _texts_of(self.rfile.read(self._length()))
            except ValueError as error:
                self._reply(400, {"error": str(error)})
                return
            self._reply(200, {"answers": classifier(texts)})

        def log_message(self, *_: Any) -> None:
            """Texts are not for a log."""

        def _length(self) -> int:
            length = int(self.headers.get("Content-Length") or 0)
            if not 0 < length <= _MAX_BYTES:
                raise ValueError(f"the body has {length} bytes: send 1 to {_MAX_BYTES}")
            return length

        def _reply(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _texts_of(body: bytes) -> list[Any]:
    """The texts of a request; ValueError tells what else was found."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    texts = value.get("texts") if isinstance(value, dict) else None
    if not isinstance(texts, list) or not texts:
        raise ValueError('send {"texts": ["a text", ...]}, each a text or a list of two')
    for text in texts:
        parts = text if isinstance(text, list) else [text]
        if not 1 <= len(parts) <= 2 or not all(isinstance(part, str) for part in parts):
            raise ValueError(f"a text, or a list of two, was expected, and {json.dumps(text)[:80]} found")
    return texts
