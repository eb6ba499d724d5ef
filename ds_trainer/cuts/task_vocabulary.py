"""Cut the vocabulary of a model down to the tokens that a task's training texts have, or to those of a list."""

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

from ds_trainer.cuts.vocabulary import cut_vocabulary
from ds_trainer.files.messages import listed
from ds_trainer.ranks.failures import UserError
from ds_trainer.recipe.cut_specs import VocabularySpec
from ds_trainer.recipe.task_specs import TaskBase
from ds_trainer.tasks.lm.sequences import tokenised_documents
from ds_trainer.tasks.registry import training_texts
from ds_trainer.tasks.table_rows import lines


def cut_vocabulary_for(spec: VocabularySpec, task: TaskBase, model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Return the model and the tokenizer with the tokens that `spec` keeps; the texts of `task` are read on this rank.

    UserError for a file without tokens or with unknown ones, and wherever `cut_vocabulary` raises one.
    """
    if spec.file:
        return cut_vocabulary(model, tokenizer, _listed_tokens(spec.file, tokenizer))
    documents = chain.from_iterable(tokenised_documents(training_texts(task), tokenizer))
    counts_by_id = Counter(chain.from_iterable(documents))
    counts = Counter({tokenizer.convert_ids_to_tokens(id): count for id, count in counts_by_id.items()})
    ids = tokenizer.get_vocab()
    if isinstance(spec.keep, str):
        return cut_vocabulary(model, tokenizer, counts)
    # among equally frequent tokens, and those that never occur, the first ones of the tokenizer
    return cut_vocabulary(model, tokenizer, sorted(ids, key=lambda token: (-counts[token], ids[token])), spec.keep)


def _listed_tokens(path: Path, tokenizer: Any) -> list[str]:
    """Read the tokens of a file, one in each line, which is blank or one that the tokenizer has."""
    tokens = [token for line in lines(path) if (token := line.rstrip("\r\n"))]
    if not tokens:
        raise UserError(f'vocabulary.keep: {path} has no tokens: write one in each line, or keep "seen"')
    unknown = sorted(set(tokens) - tokenizer.get_vocab().keys())
    if unknown:
        raise UserError(
            f"vocabulary.keep: {path} lists {len(unknown):,} tokens that the tokenizer does not have, such as "
            f"{listed(unknown, 3)}: write them as the tokenizer does (##ing, Ġthe, ▁the)"
        )
    return tokens
