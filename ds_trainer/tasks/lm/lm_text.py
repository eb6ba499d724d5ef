"""Where the documents of language modelling come from: .txt and .jsonl files, or a hub data set.

Files are read one after another, so that a corpus larger than the memory can lie in parts ("part-*.txt"). The module
loads neither torch nor numpy before the hub is read, and does not tokenise.
"""

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from ds_trainer.config.task_specs import LmSpec
from ds_trainer.files.messages import quoted
from ds_trainer.files.reading import content_hash
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks import records
from ds_trainer.tasks.records import FileRecords, HubRecords, Records

SPLITS = ("train", "validation")


def check_data_files(spec: LmSpec, splits: Sequence[str] | None = None) -> list[str]:
    """Return every mistake in the task's settings, and every missing folder, file or column.

    `splits` defaults to training and validation. For "mlm" the train_file is always checked, since its tokens are
    counted before any split can be masked.
    """
    mistakes = spec.source_mistakes()
    if mistakes or spec.dataset:
        return mistakes
    wanted = set(splits or SPLITS) | ({"train"} if spec.name == "mlm" and spec.train_file else set())
    return records.mistakes_of(partial(_check_split, spec), [split for split in SPLITS if split in wanted])


def training_texts(spec: LmSpec) -> list[str]:
    """Return every document of the training split."""
    return list(documents(spec, "train"))


def documents(spec: LmSpec, split: str) -> Iterator[str]:
    """Yield the texts of a split, except blank ones; an error in a file is raised when its line is reached."""
    if spec.dataset:
        texts = _texts(spec, HubRecords(spec.dataset, split, [spec.text_column]))
    else:
        texts = chain.from_iterable(_texts_of_file(spec, path) for path in files(spec, split))
    return filter(str.strip, texts)


def fingerprint(spec: LmSpec, split: str) -> str:
    """Return a hash that changes whenever the documents may have changed, and is the same on every host."""
    if spec.dataset:
        return HubRecords(spec.dataset, split, [spec.text_column]).fingerprint()
    digest = hashlib.blake2b(digest_size=16)
    for path in files(spec, split):
        digest.update(path.suffix.lower().encode())
        digest.update(content_hash(path))
    return digest.hexdigest()


def files(spec: LmSpec, split: str) -> list[Path]:
    """Return the files of a split, in the order of their names; the error lists the paths that were tried."""
    name = records.file_of(spec, split)
    path = records.in_data_dir(spec, name)
    if os.path.isfile(path):
        paths = [path]
    else:  # only the file name is a pattern: the path of data_dir itself may contain a bracket or a star
        pattern = os.path.join(glob.escape(str(records.in_data_dir(spec))), os.path.expanduser(name))
        paths = sorted(Path(match) for match in glob.glob(pattern, recursive=True) if os.path.isfile(match))
    if not paths:
        raise records.missing_file(spec, split, [path])
    for path in paths:
        if path.suffix.lower() not in (".txt", ".jsonl"):
            raise UserError(f"{path}: the ending {quoted(path.suffix)} is unknown: use .txt or .jsonl")
        if not path.stat().st_size:
            raise UserError(f"{path} is empty")
    return paths


def _check_split(spec: LmSpec, split: str) -> None:
    for path in files(spec, split):
        if path.suffix.lower() == ".jsonl":
            FileRecords(path, [spec.text_column]).check()


def _texts_of_file(spec: LmSpec, path: Path) -> Iterable[str]:
    if path.suffix.lower() == ".jsonl":
        return _texts(spec, FileRecords(path, [spec.text_column]))
    if spec.line_by_line:
        return (line.removesuffix("\n").removesuffix("\r") for line in records.lines(path))
    return ["".join(records.lines(path))]


def _texts(spec: LmSpec, source: Records) -> Iterator[str]:
    return (text for _, text in source.parsed(lambda record: records.text_in(record, spec.text_column)))
