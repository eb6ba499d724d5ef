"""Distillation from a frozen teacher while training: DistilBERT's terms (arXiv 1910.01108), and TinyBERT's on layers.

`logits` is the KL of arXiv 1503.02531, the same for classes, for the start and end of an answer and for vocabularies;
a regression's is the squared error. `mse` is on logits, `cos`, `hidden` and `attention` on layers, with one projection
where student and teacher differ in width (arXiv 1909.10351). How a student is made smaller is not decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_trainer.config.recipe import DistillSpec, GroupRule
from ds_trainer.models.pretrained import load_config, load_tokenizer
from ds_trainer.ranks import distributed
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks import losses
from ds_trainer.tasks.task import Forward, Predict, Task, Unit
from ds_trainer.techniques.distill.teacher import Outputs, Teacher, Teaches, Wanted, check_vocabulary
from ds_trainer.techniques.distill.teacher_cache import cached_teacher
from ds_trainer.techniques.technique import Clock, Technique

_PROJECTION = "distill_projection"
_LAYER_UNITS: dict[str, Unit] = {"cos": "token", "hidden": "token", "attention": "pair"}
"""The terms that compare layers, and what each is a mean over."""
_FROZEN = {
    "freeze_pos_embs": ("*position_embeddings*", "*.wpe.*", "*embed_positions*"),
    "freeze_token_type_embds": ("*token_type_embeddings*",),
}


class Distill(Technique):
    name: ClassVar[str] = "distill"

    def __init__(self, spec: DistillSpec, clock: Clock, task: Task) -> None:
        self.spec, self.task = spec, task
        units = {"logits": task.logits_unit, "mse": task.logits_unit} | _LAYER_UNITS
        self.term_units = {f"distill.{term}": units[term] for term in spec.terms}
        self.projection: nn.Linear | None = None
        self._ask_student = _layers_wanted(spec, side=0)
        self._ask_teacher = _layers_wanted(spec, side=1)
        self._undo: list[Any] = []
        self._teacher: Teacher | None = None
        self._says: Teaches | None = None
        self._counts = (torch.zeros(()), 0)  # rows on which both agree, rows compared
        if spec.cache_teacher and task.inputs_vary:
            raise UserError(
                "cache_teacher: the inputs of this task differ from epoch to epoch (random masking): drop it"
            )

    def attach(self, model: nn.Module) -> nn.Module:
        """Add a projection where widths differ; have the model give the states that are compared."""
        check_vocabulary(self.task, load_tokenizer(self.spec.teacher), self.spec.teacher)
        student: Any = model.config
        teacher = load_config(self.spec.teacher, self.task.head).get_text_config()
        self._check_vocabularies(student.get_text_config(), teacher)
        self._check_layers(student.get_text_config().num_hidden_layers, teacher.num_hidden_layers)
        self._ask_student = self._ask_student.of_model(student.get_text_config(), "student")
        self._ask_teacher = self._ask_teacher.of_model(teacher, "teacher")
        widths = student.get_text_config().hidden_size, teacher.hidden_size
        if self._ask_student.hidden and widths[0] != widths[1]:
            self.projection = nn.Linear(*widths)
            model.add_module(_PROJECTION, self.projection)
        self._undo.append(self._ask_student.ask(model))
        return model

    def parameter_rules(self, model: nn.Module) -> Sequence[GroupRule]:
        rules = [GroupRule(params=f"{_PROJECTION}.*")] if self.projection is not None else []
        for field, patterns in _FROZEN.items():
            if not getattr(self.spec, field):
                continue
            matching = [p for p in patterns if any(fnmatchcase(name, p) for name, _ in model.named_parameters())]
            if not matching:
                raise UserError(f"distill: {field} is true, and the student has no such embeddings: drop it")
            rules += [GroupRule(params=pattern, frozen=True) for pattern in matching]
        return rules

    def start(self, device: torch.device) -> None:
        self.task.check_trained(self.spec.teacher)
        self._teacher = Teacher(self.task, self.spec, self._ask_teacher, device)
        self._says = self._teacher
        if self.spec.cache_teacher:
            self._says = cached_teacher(self._teacher)

    def stop(self) -> None:
        if self._teacher is not None:
            self._teacher.close()
        self._teacher = self._says = None

    def terms(self, forward: Forward) -> dict[str, Tensor]:
        assert self._says is not None, "start() comes before the first forward"
        teacher = self._says(forward.batch)
        student = self._ask_student.of(forward.out, self.task.logits(forward.out, forward.batch))
        self._compare(student, teacher)
        mask = forward.batch.mask
        of_layers = [term for term in self.spec.terms if term in _LAYER_UNITS]
        found = {f"distill.{term}": self._layer_term(term, student, teacher, mask) for term in of_layers}
        if "mse" in self.spec.terms:
            found["distill.mse"] = _mean([losses.logit_mse(*pair) for pair in _logit_pairs(student, teacher)])
        if "logits" in self.spec.terms:  # the last to look at the teacher's logits: they are overwritten
            found["distill.logits"] = _mean([self._soft_targets(*pair) for pair in _logit_pairs(student, teacher)])
        return found

    def readings(self) -> dict[str, float]:
        """Share of the rows of logits since the last time on which both say the same, over all ranks; collective."""
        if self.task.regression:
            return {}
        agreed, compared = self._mean_counts()
        self._counts = (torch.zeros(()), 0)
        return {"distill/agreement": agreed / compared} if compared else {}

    def state(self) -> dict[str, Any]:
        """The counts since the last readings; collective."""
        return {"counts": self._mean_counts()}

    def resume(self, state: Mapping[str, Any]) -> None:
        agreed, compared = state["counts"]
        self._counts = (torch.tensor(agreed), compared)

    def _mean_counts(self) -> list[float]:
        """Rows on which both agree, and rows compared; the mean over all ranks."""
        agreed, compared = self._counts
        pair = torch.stack([agreed.float(), torch.full_like(agreed, compared, dtype=torch.float32)])
        return distributed.mean(pair).tolist()

    def views(self, forward: Forward, predict: Predict) -> dict[str, Any]:
        return {"teacher": self._teacher.predict(forward.batch)} if self._teacher is not None else {}

    def fold(self, model: nn.Module) -> nn.Module:
        for undo in self._undo:
            undo()
        if self.projection is not None:
            delattr(model, _PROJECTION)
        return model

    def _soft_targets(self, student: Tensor, teacher: Tensor) -> Tensor:
        if self.task.regression:
            return losses.logit_mse(student, teacher)
        return losses.distillation_kl(student, teacher, self.spec.temperature)

    def _layer_term(self, term: str, student: Outputs, teacher: Outputs, mask: Tensor) -> Tensor:
        pairs = self.spec.layer_pairs
        if term == "attention":
            return _mean([losses.attention_mse(student.attention[s], teacher.attention[t], mask) for s, t in pairs])
        compare = losses.hidden_cosine if term == "cos" else losses.hidden_mse
        return _mean([compare(self._projected(student.hidden[s]), teacher.hidden[t], mask) for s, t in pairs])

    def _projected(self, hidden: Tensor) -> Tensor:
        return hidden if self.projection is None else self.projection(hidden)

    @torch.no_grad()
    def _compare(self, student: Outputs, teacher: Outputs) -> None:
        """Count on how many rows both find the same class likeliest; nothing leaves the device."""
        for ours, theirs in [] if self.task.regression else _logit_pairs(student, teacher):
            agreed, compared = self._counts
            same = (ours.argmax(-1) == theirs.argmax(-1)).sum()
            self._counts = (agreed.to(same.device) + same, compared + len(ours))

    def _check_vocabularies(self, student: Any, teacher: Any) -> None:
        """Models of one tokenizer may have heads of different sizes: some are padded."""
        compares = {"logits", "mse"} & set(self.spec.terms)
        if self.task.logits_of == "position" and compares and student.vocab_size != teacher.vocab_size:
            raise UserError(
                f"distill: the teacher {self.spec.teacher} gives {teacher.vocab_size} logits and the student "
                f"{student.vocab_size}: give the student's config the teacher's vocab_size"
            )

    def _check_layers(self, student: int, teacher: int) -> None:
        for pair in self.spec.layer_pairs:
            for layer, have, who in zip(pair, (student, teacher), ("student", "teacher"), strict=True):
                if layer > have:
                    raise UserError(
                        f"distill: layer_pairs names layer {layer} of the {who}, which has {have}: write 1 to {have}, "
                        f"0 for the embeddings or -1 for the last"
                    )


def _layers_wanted(spec: DistillSpec, side: int) -> Wanted:
    """What the student's (0) or the teacher's (1) layers are asked for."""
    layers = tuple(dict.fromkeys(pair[side] for pair in spec.layer_pairs))
    states, maps = {"cos", "hidden"} & set(spec.terms), "attention" in spec.terms
    return Wanted(hidden=layers if states else (), attention=layers if maps else ())


def _logit_pairs(student: Outputs, teacher: Outputs) -> list[tuple[Tensor, Tensor]]:
    return list(zip(student.logits, teacher.logits, strict=True))


def _mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean()
