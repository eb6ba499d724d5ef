"""A small HTTP server for a text classifier: requests that wait are answered together, in one batch.

Early exit pays on batches too: samples that are sure leave, and the rest go on. Standard library only, on this machine
only (127.0.0.1): an example of serving to start from.
"""

from __future__ import annotations

import json
import queue
import signal
import sys
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn, TypeAlias

import torch

from ds_trainer.models.pretrained import (
    CLASSIFIER,
    check_fits,
    input_names,
    load_config,
    load_tokenizer,
    pad_token_id,
)
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.techniques.exits.early_exit import EarlyExitModel, load_for_inference

_MAX_BYTES = 1 << 20
_MAX_WAITING = 1024
"""Texts, of all requests."""
_TIMEOUT = 30
"""Seconds that a client may take to send its request, or to read its answer."""

_Row: TypeAlias = tuple[Any, "Future[dict[str, Any]]"]


class OverloadedError(RuntimeError):
    """More texts wait than may; to be asked again later."""


class Classifier:
    """Answers texts in batches; safe to call from many threads, whose texts share batches. To be closed."""

    def __init__(self, folder: str, max_batch_size: int, max_seq_length: int) -> None:
        config = load_config(folder, CLASSIFIER)
        if not CLASSIFIER.trained_in(config):
            raise UserError(f"{folder} is no trained {CLASSIFIER.name}: it cannot be served")
        if max_batch_size < 1 or max_seq_length < 4:
            raise UserError(
                f"--max_batch_size {max_batch_size}, --max_seq_length {max_seq_length}: give 1 and 4 or more"
            )
        self.model: Any = load_for_inference(folder).to(distributed.device())
        self.tokenizer = load_tokenizer(folder)
        pad_token_id(self.tokenizer)  # a tokenizer without one is given one
        plain = self.model.model if isinstance(self.model, EarlyExitModel) else self.model
        check_fits(plain, self.tokenizer, max_seq_length)
        self.max_batch_size, self.max_seq_length = max_batch_size, max_seq_length
        self._inputs = input_names(config, CLASSIFIER)
        self._tokenizing = threading.Lock()  # truncation is a state of the tokenizer
        self._waiting: queue.Queue[_Row | None] = queue.Queue(_MAX_WAITING)
        self._worker = threading.Thread(target=self._work, daemon=True)
        self._worker.start()

    def __call__(self, texts: list[Any]) -> list[dict[str, Any]]:
        """For each text, or pair of texts: label and probabilities, or score; and `exit_layer`, the layers it took."""
        return self.answers(self.rows(texts))

    def rows(self, texts: list[Any]) -> list[Any]:
        """The tokens of each text, as the model takes them. ValueError for what has none, or for too many texts."""
        if len(texts) > _MAX_WAITING:
            raise UserError(f"there are {len(texts)} texts: send {_MAX_WAITING} at most")
        rows = []
        for number, text in enumerate(texts, start=1):
            try:
                with self._tokenizing:
                    row = self.tokenizer(
                        *(text if isinstance(text, list) else [text]),
                        truncation=True,
                        max_length=self.max_seq_length,
                        return_token_type_ids=True,
                    )
            except Exception as error:  # the tokenizers library raises nothing narrower
                raise UserError(f"text {number} cannot be tokenised: {type(error).__name__}: {error}") from error
            rows.append({name: value for name, value in row.items() if name in self._inputs | {"attention_mask"}})
        return rows

    def answers(self, rows: list[Any]) -> list[dict[str, Any]]:
        """What `__call__` gives, of `rows`. OverloadedError where too many texts wait; or what the model raises."""
        asked: list[_Row] = [(row, Future()) for row in rows]
        try:
            for one in asked:
                self._waiting.put_nowait(one)
        except queue.Full:
            for _, future in asked:
                future.cancel()
            raise OverloadedError(f"{_MAX_WAITING} texts wait already: try again later") from None
        return [future.result() for _, future in asked]

    def close(self) -> None:
        """Answer what waits, and end the thread that does."""
        self._waiting.put(None)
        self._worker.join()

    def _work(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while batch[-1] is not None and len(batch) < self.max_batch_size and not self._waiting.empty():
                batch.append(self._waiting.get())
            self._answer_all([row for row in batch if row is not None and row[1].set_running_or_notify_cancel()])
            if batch[-1] is None:
                return

    def _answer_all(self, batch: list[_Row]) -> None:
        """Answer a batch; where it fails, each row by itself, so that only those that fail alone are told so."""
        if not batch:
            return
        try:
            answers = self._answers([row for row, _ in batch])
        except Exception as error:  # noqa: BLE001 - the request gets it, and the next ones are served
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            for row in batch:
                self._answer_all([row])
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            future.set_result(answer)

    @torch.no_grad()
    def _answers(self, rows: list[Any]) -> list[dict[str, Any]]:
        padded = self.tokenizer.pad(rows, return_tensors="pt").to(self.model.device)
        out = self.model(**{name: value for name, value in padded.items() if name in self._inputs})
        answers = [self._answer(row) for row in out.logits.float().cpu()]
        for answer, layer in zip(answers, out.get("exit_layers", []), strict=False):
            answer["exit_layer"] = int(layer)
        return answers

    def _answer(self, logits: torch.Tensor) -> dict[str, Any]:
        if not logits.isfinite().all():
            raise FloatingPointError("the model gives logits that are not finite (NaN or infinity): it is broken")
        if len(logits) == 1:
            return {"score": float(logits)}
        names = self.model.config.id2label
        shares = logits.softmax(-1).tolist()
        probabilities = {names[index]: share for index, share in enumerate(shares)}
        return {"label": max(probabilities, key=probabilities.__getitem__), "probabilities": probabilities}


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # those that answer are waited for

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is no error of the server's."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def serve(folder: str, port: int, max_batch_size: int, max_seq_length: int) -> None:
    """Answer POSTs of {"texts": [text, [first, second], ...]} until Ctrl-C or SIGTERM, which let answers be finished.

    To be called in the main thread. ValueError where it cannot start.
    """
    classifier = Classifier(folder, max_batch_size, max_seq_length)
    try:
        server = _Server(("127.0.0.1", port), _handler_of(classifier))
    except (OSError, OverflowError) as error:
        classifier.close()
        raise UserError(f"--port {port} cannot be listened on: {error}; give another") from error
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        distributed.info(f"http://127.0.0.1:{server.server_port} serves {folder}")
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        classifier.close()
    distributed.info("stopped")


def _interrupt(number: int, _: Any) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second one does not wait
    raise KeyboardInterrupt


def _handler_of(classifier: Classifier) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT

        def do_POST(self) -> None:
            try:
                rows = classifier.rows(_texts_of(self.rfile.read(self._length())))
            except ValueError as error:
                self._reply(400, {"error": str(error)})
                return
            value: dict[str, Any]
            try:
                status, value = 200, {"answers": classifier.answers(rows)}
            except OverloadedError as error:
                status, value = 503, {"error": str(error)}
            except Exception as error:  # noqa: BLE001 - the one who asked gets it, and the next ones are served
                status, value = 500, {"error": f"{type(error).__name__}: {error}"}
            self._reply(status, value)

        def log_message(self, *_: Any) -> None:
            """Texts are not for a log."""

        def _length(self) -> int:
            given = self.headers.get("Content-Length") or "0"
            length = int(given) if given.isascii() and given.isdigit() else -1
            if not 0 < length <= _MAX_BYTES:
                raise UserError(f"the body's Content-Length is {given[:20]}: send 1 to {_MAX_BYTES} bytes")
            return length

        def _reply(self, status: int, value: Any) -> None:
            body = json.dumps(value, allow_nan=False).encode()
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
        raise UserError(f"the body is not JSON: {error}") from None
    texts = value.get("texts") if isinstance(value, dict) else None
    if not isinstance(texts, list) or not texts:
        raise UserError('send {"texts": ["a text", ...]}, each a text or a list of two')
    for text in texts:
        parts = text if isinstance(text, list) else [text]
        if not 1 <= len(parts) <= 2 or not all(isinstance(part, str) for part in parts):
            raise UserError(f"a text, or a list of two, was expected, and {json.dumps(text)[:80]} found")
    return texts
