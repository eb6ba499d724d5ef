"""Some layers of an embedding model, trained to give its vectors, as sentence-transformers' own examples do it.

`python layers_by_sentence_transformers.py REQUEST.json`, in an environment that has sentence-transformers. The student
keeps the named layers of the dense model; `MSELoss` compares its vectors with the dense model's, which are computed
once. The minutes are those of the training and of these vectors.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.losses import MSELoss


def main(request_file: str) -> None:
    request: dict[str, Any] = json.loads(Path(request_file).read_text())
    torch.manual_seed(request["seed"])
    dense: Any = SentenceTransformer(request["dense"], device="cpu")
    student: Any = SentenceTransformer(request["dense"], device="cpu")
    for model in (dense, student):
        model.max_seq_length = request["max_seq_length"]
        model.append(Normalize())
    layers = student[0].auto_model.encoder.layer
    student[0].auto_model.encoder.layer = torch.nn.ModuleList(layers[place] for place in request["layers"])
    student[0].auto_model.config.num_hidden_layers = len(request["layers"])
    started, texts, size = time.perf_counter(), request["texts"], request["train_batch_size"]
    vectors = dense.encode(texts, convert_to_tensor=True, batch_size=32)
    epochs = -(-request["max_steps"] * size // len(texts))
    order = torch.cat([torch.randperm(len(texts)) for _ in range(epochs)]).tolist()
    optimizer = torch.optim.AdamW(student.parameters(), lr=request["learning_rate"], weight_decay=0.0)
    warmup, steps = round(request["warmup_steps"] * request["max_steps"]), request["max_steps"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup))
    )
    loss, _ = MSELoss(student), student.train()
    for step in range(steps):
        chosen = order[step * size : (step + 1) * size]
        features = student.preprocess([texts[place] for place in chosen])
        loss([features], vectors[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    seconds = time.perf_counter() - started
    student.save(str(Path(request["out"], "model")))
    Path(request["out"], "seconds.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1])
