"""The loss on a teacher's logits, which distillation and exit heads share."""

from torch import Tensor

from ds_trainer.tasks import losses
from ds_trainer.tasks.divergences import Kind, TopK, divergence
from ds_trainer.tasks.task import Task


def soft_target_loss(
    task: Task, student: Tensor, teacher: Tensor | TopK, temperature: float, kind: Kind = "forward"
) -> Tensor:
    """Compare logits of classes by a divergence at a temperature, or a regression's, without classes, by their square.

    May overwrite `teacher`, to save memory.
    """
    if task.regression:
        assert isinstance(teacher, Tensor)
        return losses.logit_mse(student, teacher)
    return divergence(student, teacher, temperature, kind)
