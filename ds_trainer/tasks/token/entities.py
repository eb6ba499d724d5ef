"""Score tags by `seqeval`, which reads IOB1, IOB2 and IOBES as the script of CoNLL-2000 does.

An entity is predicted rightly if its kind, its first and its last word are all right.
"""

import re
from collections.abc import Sequence

from seqeval.metrics.sequence_labeling import get_entities

from ds_trainer.files.messages import listed
from ds_trainer.ranks.failures import UserError

OUTSIDE = "O"
"""The tag of a word that is in no entity."""
_TAG = re.compile(r"[BIES]-(.+)")


def kinds_of(tags: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of entities that the tags name, sorted. Tags such as NOUN name none.

    Of B, I and O alone the only kind is `_`, as seqeval calls it. UserError for a mixture of both sorts.
    """
    if set(tags) <= set("BIESO"):
        return ("_",)
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
    pairs = [pair for sentences in zip(gold, predicted, strict=True) for pair in zip(*sentences, strict=True)]
    accuracy = {"accuracy": sum(one == other for one, other in pairs) / len(pairs)}
    if not kinds:
        return accuracy
    true, given = set(get_entities(gold)), set(get_entities(predicted))  # (kind, first, last)
    right = true & given

    def f1(kind: str | None = None) -> float:
        hits, *sizes = (sum(kind in (None, entity[0]) for entity in some) for some in (right, true, given))
        return 2 * hits / max(1, sum(sizes))

    shares = {"precision": len(right) / max(1, len(given)), "recall": len(right) / max(1, len(true))}
    return {"f1": f1()} | shares | accuracy | {f"f1/{kind}": f1(kind) for kind in kinds}
