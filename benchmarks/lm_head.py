"""MLM distillation with vocabulary logits at the masked positions only, against all positions.

A step (forward of teacher and student, 5 KL + 2 MLM + 1 cosine, backward, AdamW) of a student of 6 layers taught by
one of 12, hidden 384, vocabulary 30,522, 16 x 128 tokens, fp32, 2 threads; `Reference` is the plain way: logits of
both everywhere, then the masked rows. `python benchmarks/lm_head.py`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from figures import Figure, bert_shape, is_quick, ratio, report, use_threads
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from ds_trainer.models.pretrained import load_tokenizer
from ds_trainer.ranks import distributed
from ds_trainer.recipe.task_specs import LmSpec
from ds_trainer.recipe.technique_specs import DistillSpec
from ds_trainer.run.objective import Objective
from ds_trainer.tasks.lm.lm_task import LmTask
from ds_trainer.tasks.task import Forward
from ds_trainer.techniques.distill.distill import Distill
from ds_trainer.techniques.technique import PhaseLength

ROWS, TOKENS, VOCABULARY, TEMPERATURE = 16, 128, 1_000 if is_quick() else 30_522, 2.0
WEIGHTS = {"task": 2.0, "distill.logits": 5.0, "distill.cos": 1.0}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words only, as many as BERT has pieces."""
    words = [*SPECIAL, *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, SPECIAL, strict=True)))


def make_model(layers: int, folder: Path) -> str:
    torch.manual_seed(layers)
    shape = bert_shape(384, layers, heads=12)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **shape, **no_dropout)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def make_text(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("train.txt", "valid.txt"):
        lines = rng.integers(0, VOCABULARY - len(SPECIAL), (4 * ROWS, TOKENS - 2))
        (folder / name).write_text("\n".join(" ".join(f"w{number}" for number in line) for line in lines))


class Ours:
    """What a run does in a step, without DeepSpeed's engine around it."""

    def __init__(self, student: str, teacher: str, folder: Path) -> None:
        spec = LmSpec(name="mlm", data_dir=str(folder), train_file="train.txt", validation_file="valid.txt")
        self.task = LmTask(spec, load_tokenizer(student), student, folder / "cache")
        asked = DistillSpec(teacher=teacher, terms=["logits", "cos"], temperature=TEMPERATURE, restrict_ce_to_mask=True)
        technique = Distill(asked, PhaseLength(1, 0, 0), self.task)
        self.model = technique.attach(self.task.build_model(student))
        technique.start(torch.device("cpu"))
        self.objective = Objective(self.task, [technique], WEIGHTS)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def batch(self, draw: int):
        return self.task.collate(self.task.examples("train"), range(ROWS), draw)

    def step(self, batch) -> float:
        loss, _ = self.objective(Forward(batch, self.model(**batch.inputs), 0))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class Reference:
    """Plain modules: logits of teacher and student at every position."""

    def __init__(self, student: str, teacher: str) -> None:
        self.model = BertForMaskedLM.from_pretrained(student)
        self.teacher = BertForMaskedLM.from_pretrained(teacher).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self, batch) -> float:
        inputs = {name: batch.inputs[name] for name in ("input_ids", "attention_mask")}
        heads = batch.inputs["head_positions"]
        with torch.no_grad():
            teacher = self.teacher(**inputs, output_hidden_states=True)
        out = self.model(**inputs, output_hidden_states=True)
        logits, soft = out.logits.flatten(0, 1)[heads], teacher.logits.flatten(0, 1)[heads]
        kl = F.kl_div(F.log_softmax(logits / TEMPERATURE, -1), F.softmax(soft / TEMPERATURE, -1), reduction="batchmean")
        real = batch.inputs["attention_mask"].bool()
        ours, theirs = out.hidden_states[-1][real], teacher.hidden_states[-1][real]
        cosine = F.cosine_embedding_loss(ours, theirs, torch.ones(len(ours)))
        loss = 5 * kl * TEMPERATURE**2 + 2 * F.cross_entropy(logits, batch.labels) + cosine
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    use_threads(2)
    distributed.keep_freed_memory()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_text(folder)
        student, teacher = make_model(6, folder / "student"), make_model(12, folder / "teacher")
        ours, reference = Ours(student, teacher, folder), Reference(student, teacher)
        draws = iter(range(1, 1000))
        batches = [ours.batch(next(draws)) for _ in range(4)]
        differences = [abs(ours.step(batch) / reference.step(batch) - 1) for batch in batches]
        speed, reference_s, ours_s = ratio(
            lambda: reference.step(batches[0]), lambda: ours.step(batches[0]), rounds=9, warmup=1
        )
    tokens = ROWS * TOKENS
    print(f"all positions {tokens / reference_s:,.0f} tokens/s, masked positions {tokens / ours_s:,.0f} tokens/s")
    report(
        Figure("lm_head/tokens_per_s", speed, 1.5, at_least=True),
        Figure("lm_head/loss_difference", max(differences), 1e-5),
    )


if __name__ == "__main__":
    main()
