"""What a limit on OpenMP's spinning costs on a quiet machine, and what it saves beside a busy process.

A thread of libgomp that waits at a barrier spins, by default for so long that on a busy machine it keeps the core from
the thread that it waits for. `ranks/distributed.py` sets GOMP_SPINCOUNT. The step here is the worst case: forward,
backward and AdamW of a BERT of 4 layers x 128 on 8 sentences of 16 tokens, on 2 threads. Runs of 100 steps, and of 30
beside the busy process, each in a process of its own, with the limit and without, in turns:
`python benchmarks/openmp_spinning.py [SPINCOUNT]`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from figures import Figure, is_quick, report

from ds_trainer.ranks.distributed import SPINS

RUNS, STEPS = (1, 2) if is_quick() else (10, 100)
BUSY_RUNS, BUSY_STEPS = 3, 30
_STEPS = """
import sys, time, torch
from transformers import BertConfig, BertForSequenceClassification
torch.set_num_threads(2)
model = BertForSequenceClassification(
    BertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, vocab_size=8192)
)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
ids, labels = torch.randint(5, 8000, (8, 16)), torch.zeros(8, dtype=torch.long)
def step():
    model(input_ids=ids, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
step()
started = time.perf_counter()
for _ in range(int(sys.argv[1])):
    step()
print(int(sys.argv[1]) / (time.perf_counter() - started))
"""


def steps_per_second(spins: int | None, steps: int) -> float:
    limit = {} if spins is None else {"GOMP_SPINCOUNT": str(spins)}
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_NUM_THREADS")}
    command = [sys.executable, "-c", _STEPS, str(steps)]
    done = subprocess.run(command, env=plain | limit, capture_output=True, text=True, check=True)
    return float(done.stdout)


def compared(spins: int, runs: int, steps: int) -> float:
    """Steps per second with the limit over those without, the median of pairs in turns."""
    pairs = [(steps_per_second(spins, steps), steps_per_second(None, steps)) for _ in range(runs)]
    print("  ".join(f"{limited:.1f}/{plain:.1f}" for limited, plain in pairs), flush=True)
    return statistics.median(limited / plain for limited, plain in pairs)


def main() -> None:
    spins = int(next((word for word in sys.argv[1:] if word.isdigit()), SPINS))
    quiet = compared(spins, RUNS, STEPS)
    beside = quiet
    if not is_quick():
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
            beside = compared(spins, BUSY_RUNS, BUSY_STEPS)
            busy.kill()
    figures = {"quiet": (quiet, 0.97), "beside_a_busy_process": (beside, 2.0)}
    report(*(Figure(f"openmp_spinning/{name}", *values, at_least=True) for name, values in figures.items()))


if __name__ == "__main__":
    main()
