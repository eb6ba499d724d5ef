"""Score tags by `seqeval`, which reads IOB1, IOB2 and IOBES as the script of CoNLL-2000 does.

An entity counts as found if its kind, its first and its last word are all right.
"""

import re
from collections.abc import Sequence

from ds_trainer.files.messages import listed
from ds_trainer.ranks.failures import UserError

OUTSIDE = "O"
"""The tag of a word that is in no entity."""
_TAG = re.compile(r"[BIES]-(.+)")


def kinds_of(tags: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of entities that tags name, sorted; none where they are no tags of entities, such as NOUN.

    UserError where some are and others are not.
    """
    kinds = {match[1] for tag in tags if (match := _TAG.fullmatch(tag))}
    others = [tag for tag in tags if not _TAG.fullmatch(tag) and tag != OUTSIDE]
    if kinds and others:
        raise UserError(
            f"the tags {listed(others)} name no entity, and others do: write O, or B-, I-, E- or S- before a kind, "
            f"such as B-person"
        )
    return tuple(sorted(kinds))


def score(gold: list[list[str]], predicted: list[list[str]], kinds: Sequence[str]) -> dict[str, float]:
    """Return F1, precision and recall of the entities, the accuracy of the tags, and F1 for each kind as `f1/KIND`.

    The lists have a list of tags for each sentence. Without kinds there is only the accuracy.
    """
    from seqeval.metrics import accuracy_score, classification_report

    accuracy = {"accuracy": float(accuracy_score(gold, predicted))}
    if not kinds:
        return accuracy
    report = classification_report(gold, predicted, output_dict=True, zero_division=0)
    names = {"f1": "f1-score", "precision": "precision", "recall": "recall"}
    scores = {name: float(report["micro avg"][column]) for name, column in names.items()} | accuracy
    return scores | {f"f1/{kind}": float(report[kind]["f1-score"]) if kind in report else 0.0 for kind in kinds}
