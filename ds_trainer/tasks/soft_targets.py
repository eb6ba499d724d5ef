"""The loss on a teacher's logits, which distillation and exit heads share."""

from torch import Tensor

from ds_trainer.tasks import losses
from ds_trainer.tasks.task import Task


def soft_target_loss(task: Task, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Compare logits (rows, classes) by KL at a temperature, or a regression's, which has no classes, by their square.

    May overwrite `teacher`, to save memory.
    """
    if task.regression:
        return losses.logit_mse(student, teacher)
    return losses.distillation_kl(student, teacher, temperature)
