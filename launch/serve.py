"""Serve a sequence classifier over HTTP, with early exits where its folder has them: `python launch/serve.py FOLDER`.

    curl -d '{"texts": ["a fine film", ["a pair of", "texts"]]}' http://127.0.0.1:8000

answers each text's label, probabilities (or score), and the layers it went through. What arrives while a batch runs
makes up the next one. An example to start from: one process, this machine only, no encryption.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ds_trainer.cli.train import add_trust_flags, run_command
from ds_trainer.config.trust import Trust, trusting
from ds_trainer.ranks.distributed import leave


def serve_command(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="serve.py", description="Serve a text classifier over HTTP.")
    parser.add_argument("model", help="model folder")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max_batch_size", type=int, default=32)
    parser.add_argument("--max_seq_length", type=int, default=128)
    add_trust_flags(parser)
    flags = parser.parse_args(arguments)
    from ds_trainer.deploy.serving import serve

    with trusting(Trust(flags.allow_pickle, flags.trust_remote_code)):
        serve(flags.model, flags.port, flags.max_batch_size, flags.max_seq_length)


if __name__ == "__main__":
    leave(run_command(serve_command, sys.argv[1:]))
