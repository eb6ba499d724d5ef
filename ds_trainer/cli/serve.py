"""`launch/serve.py`: serve a text classifier over HTTP, with early exits where its folder has them.

    curl -d '{"texts": ["a fine film", ["a pair of", "texts"]]}' http://127.0.0.1:8000

answers each text's label, probabilities (or score), and the layers it went through. Texts that arrive while a batch
runs make up the next one. It is an example to start from: one process, this machine only, no encryption.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_trainer.cli.command import Parser
from ds_trainer.cli.flags import add_trust_flags, trust_of
from ds_trainer.config.trust import trusting


def serve_command(arguments: Sequence[str]) -> None:
    """Serve a model folder until the process is stopped."""
    parser = Parser("serve", "Serve a text classifier over HTTP.")
    parser.add_argument("model", help="model folder")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max_batch_size", type=int, default=32)
    parser.add_argument("--max_seq_length", type=int, default=128)
    add_trust_flags(parser)
    flags = parser.parse_args(list(arguments))
    from ds_trainer.deploy.serving import serve

    with trusting(trust_of(flags)):
        serve(flags.model, flags.port, flags.max_batch_size, flags.max_seq_length)
