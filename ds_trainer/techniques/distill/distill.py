"""Knowledge distillation: train a student to answer as a frozen teacher does.

The teacher is any trained model of the same task (`teacher.py`). It has the student's tokens or, where answers belong
to a text or a word, any others, in which it reads the same texts. It runs on every batch beside the student, or its
answers to the training set are computed once and read from disk. A recipe gives weights to any of these terms. Each is
a mean over examples or tokens, as its unit says:

| term | compares | source |
|---|---|---|
| `distill.logits` | softened classes: a `divergence` at temperature T, by default KL, times T**2 | arXiv 1503.02531 |
| `distill.mse` | logits: squared difference, summed over the classes | DistilBERT, arXiv 1910.01108 |
| `distill.cos` | hidden states: 1 - cosine | DistilBERT |
| `distill.hidden` | hidden states: squared difference | TinyBERT, arXiv 1909.10351 |

The temperature divides the gradient by T**2, which the factor T**2 makes up for. A regression has no classes: its
logits term is the squared error. Nor have the vectors of an embedding task: the term compares how similar each text is
to the others of its micro-batch, and `distill.mse` compares the vectors themselves. Of a query's documents the term
compares the margins (arXiv 2010.02666), and `distill.mse` the scores themselves. SQuAD has two sets of logits (start
and end), and a term is the mean over the sets; a language model has a row of logits for every position with a loss. The
formulas are in `tasks/losses.py`. How the student is made smaller is not decided here.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_trainer.models.pretrained import load_config, load_tokenizer
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.recipe import GroupRule
from ds_trainer.recipe.technique_specs import DistillSpec
from ds_trainer.tasks import losses
from ds_trainer.tasks.task import PAD_LOGIT, Batch, Forward, Predict, Task, Unit
from ds_trainer.techniques.distill.teacher import (
    Outputs,
    Teacher,
    cached_teacher,
    has_own_tokens,
    own_reader,
    remembering,
    teacher_ids,
)
from ds_trainer.techniques.technique import PhaseLength, Technique

_PROJECTION = "distill_projection"
_FROZEN = {
    "freeze_pos_embs": ("*position_embeddings*", "*.wpe.*", "*embed_positions*"),
    "freeze_token_type_embds": ("*token_type_embeddings*",),
}


class Distill(Technique):
    name: ClassVar[str] = "distill"
    Spec = DistillSpec

    def __init__(self, spec: DistillSpec, length: PhaseLength, task: Task) -> None:
        self.spec, self.task = spec, task
        units: dict[str, Unit] = {"cos": "token", "hidden": "token"}
        units |= {"logits": "example"} if task.by_query else {}
        self.term_units = {f"distill.{term}": units.get(term, task.logits_unit) for term in spec.terms}
        self.projection: nn.Linear | None = None
        self._returned_states = False  # whether the student's config asked for its states before
        self._teacher_ids: Tensor | None = None  # of the student's tokens, where the heads differ
        self._own_tokens = False  # whether the teacher reads the texts by its own tokenizer
        self._teacher: Teacher | None = None
        self._targets: Callable[[Batch], Outputs] | None = None  # the teacher, or the cache of its answers
        if spec.cache_teacher and task.inputs_vary:
            raise UserError("cache_teacher: this task's inputs differ from epoch to epoch (random masking): drop it")
        if spec.top_k and not task.over_vocabulary:
            raise UserError("cache_teacher: top_k is for logits over a vocabulary, which this task has not: write true")
        if spec.divergence != "forward" and task.regression and not task.vectors:
            raise UserError("divergence: a regression has no classes, and compares by the squared error: drop it")

    def attach(self, model: Any) -> nn.Module:
        """Check that student and teacher can be compared, and have the student return the layers that the terms need.

        Where the two differ in width, a projection of the student's states to the teacher's is added and trained
        (TinyBERT).
        """
        tokenizer = load_tokenizer(self.spec.teacher)
        self._own_tokens = has_own_tokens(self.task, self.spec, tokenizer)
        self._teacher_ids = None if self._own_tokens else teacher_ids(self.task, tokenizer)
        student = model.config.get_text_config()
        teacher = load_config(self.spec.teacher, self.task.head).get_text_config()
        if self.task.over_vocabulary and self._teacher_ids is None and student.vocab_size != teacher.vocab_size:
            # one tokenizer, and a head is padded: both have its tokens, whose numbers are the same
            self._teacher_ids = torch.arange(max(self.task.tokenizer.get_vocab().values()) + 1)
        compared = teacher.vocab_size if self._teacher_ids is None else len(self._teacher_ids)
        if 0 < compared <= self.spec.top_k:
            raise UserError(f"cache_teacher: top_k {self.spec.top_k} is not below the {compared} tokens of the teacher")
        for index, (who, config) in enumerate((("student", student), ("teacher", teacher))):
            layer, depth = max(pair[index] for pair in self.spec.layer_pairs), config.num_hidden_layers
            if layer > depth:
                raise UserError(
                    f"distill: layer_pairs names layer {layer} of the {who}, which has {depth}: write -1 to {depth}"
                )
        compares_vectors = self.task.vectors and "mse" in self.spec.terms
        if (self.spec.compared_layers or compares_vectors) and student.hidden_size != teacher.hidden_size:
            self.projection = nn.Linear(student.hidden_size, teacher.hidden_size)
            model.add_module(_PROJECTION, self.projection)
        self._returned_states = model.config.output_hidden_states
        model.config.output_hidden_states |= bool(self.spec.compared_layers)
        return model

    def check(self, optimizer: str, travel: float) -> None:
        """Raise UserError where a text cannot be read by the teacher's own tokenizer."""
        if self._own_tokens:
            own_reader(self.task, self.spec)

    def parameter_rules(self, model: nn.Module) -> Sequence[GroupRule]:
        rules = [GroupRule(params=f"{_PROJECTION}.*")] if self.projection is not None else []
        names = [name for name, _ in model.named_parameters()]
        for field in filter(lambda field: getattr(self.spec, field), _FROZEN):
            matching = [pattern for pattern in _FROZEN[field] if any(fnmatchcase(name, pattern) for name in names)]
            if not matching:
                raise UserError(f"distill: {field} is true, and the student has no such embeddings: drop it")
            rules += [GroupRule(params=pattern, frozen=True) for pattern in matching]
        return rules

    def start(self, device: torch.device) -> None:
        self.task.check_trained(self.spec.teacher)
        self._teacher = self._make_teacher(device)
        self._targets = cached_teacher(self._teacher) if self.spec.cache_teacher else self._teacher

    def rehearse(self, device: torch.device) -> None:
        self._teacher = self._make_teacher(device)
        # a rehearsal takes its batches again: what it computes once stands for what training reads from the cache
        self._targets = remembering(self._teacher) if self.spec.cache_teacher else self._teacher

    def bytes_held(self) -> tuple[int, int]:
        """Return the size of the teacher, whole or partitioned. One whose answers are cached is gone in training."""
        assert self._teacher is not None, "rehearse() comes first"
        size = 0 if self.spec.cache_teacher else self._teacher.size
        return (0, size) if self.spec.teacher_zero_stage == 3 else (size, 0)

    def stop(self) -> None:
        if self._teacher is not None:
            self._teacher.close()
        self._teacher = self._targets = None

    def terms(self, forward: Forward) -> dict[str, Tensor]:
        assert self._targets is not None, "start() comes before the first forward"
        teacher = self._targets(forward.batch)
        # the teacher's logits over a vocabulary are those of the tokens: the student's head may be padded
        tokens = len(self._teacher_ids) if self.task.over_vocabulary and self._teacher_ids is not None else None
        logits = [each[:, :tokens] for each in self.task.logits(forward.out, forward.batch)]
        pairs = list(zip(logits, teacher.logits, strict=True))
        if self._own_tokens and self.task.label_names:
            # a word that the teacher cuts away has no logits: the student's are compared with themselves, without loss
            missing = [(theirs == PAD_LOGIT).any(-1, keepdim=True) for _, theirs in pairs]
            pairs = [(s, torch.where(none, s.detach(), t)) for (s, t), none in zip(pairs, missing, strict=True)]
        project, mask = self.projection or nn.Identity(), forward.batch.mask
        states = [(project(forward.out.hidden_states[s]), teacher.hidden[t]) for s, t in self.spec.compared_layers]
        terms: dict[str, list[Tensor]] = {}
        if "cos" in self.spec.terms:
            terms["cos"] = [losses.hidden_cosine(*pair, mask) for pair in states]
        if "hidden" in self.spec.terms:
            terms["hidden"] = [losses.hidden_mse(*pair, mask) for pair in states]
        if "mse" in self.spec.terms:
            projected = [(project(ours), theirs) for ours, theirs in pairs] if self.task.vectors else pairs
            terms["mse"] = [losses.logit_mse(*pair) for pair in projected]
        if "logits" in self.spec.terms:  # comes last: to save memory it overwrites the teacher's logits
            how = self.spec.temperature, self.spec.divergence
            if self.task.vectors:
                terms["logits"] = [losses.similarity_divergence(*pair, *how) for pair in pairs]
            elif self.task.by_query:
                terms["logits"] = [losses.margin_mse(*pair, forward.batch) for pair in pairs]
            else:
                terms["logits"] = [losses.soft_target_loss(self.task, *pair, *how) for pair in pairs]
        return {f"distill.{term}": torch.stack(values).mean() for term, values in terms.items()}

    def views(self, forward: Forward, predict: Predict) -> dict[str, Any]:
        return {"teacher": self._teacher.predict(forward.batch)} if self._teacher is not None else {}

    def _make_teacher(self, device: torch.device) -> Teacher:
        reader = own_reader(self.task, self.spec) if self._own_tokens else None
        return Teacher(self.task, self.spec, device, self._teacher_ids, reader)

    def fold(self, model: Any) -> nn.Module:
        model.config.output_hidden_states = self._returned_states
        if self.projection is not None:
            delattr(model, _PROJECTION)
        return model
