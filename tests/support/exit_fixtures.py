"""The fixtures of tests on folders with exits, made once a session; a module names this one in `pytest_plugins`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.exit_folders import WORDS, make_classifier, make_folder, make_tagger, spec_of, tags_spec, with_key

from ds_trainer.recipe.exit_specs import ExitPolicy
from ds_trainer.recipe.task_specs import TextSpec
from ds_trainer.tasks.registry import build_task
from ds_trainer.tasks.task import Task


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where these tests keep tokenised data."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory, csv_folder: Path, cache: Path) -> Path:
    """A classifier of the CSV task with exits, trained without a quarter of the rows; tests leave it as it is."""
    return make_classifier(tmp_path_factory.mktemp("classifier"), csv_folder, cache)


@pytest.fixture
def task(csv_folder: Path, classifier: Path, cache: Path) -> Task:
    """240 rows to train, a quarter of them held out, and 61 to validate."""
    return build_task(spec_of(csv_folder), classifier, cache)


@pytest.fixture(scope="session")
def tagger(tmp_path_factory: pytest.TempPathFactory, csv_folder: Path, cache: Path) -> Path:
    """A tagger of the CoNLL files beside that task, with exits; tests leave it as it is."""
    return make_tagger(tmp_path_factory.mktemp("tagger"), csv_folder, cache)


@pytest.fixture
def tags_task(csv_folder: Path, tagger: Path, cache: Path) -> Task:
    return build_task(tags_spec(csv_folder), tagger, cache)


@pytest.fixture(scope="session")
def scores_spec(tmp_path_factory: pytest.TempPathFactory) -> TextSpec:
    """Texts with the number of their words as the score."""
    folder, rng = tmp_path_factory.mktemp("scores"), random.Random(1)
    for file in ("train.csv", "validation.csv"):
        texts = [rng.choices(WORDS, k=rng.randint(1, 9)) for _ in range(40)]
        rows = "".join(f"{' '.join(text)},{len(text)}\n" for text in texts)
        (folder / file).write_text(f"text,score\n{rows}")
    return spec_of(folder, regression=True, label_column="score")


@pytest.fixture(scope="session")
def regressor(tmp_path_factory: pytest.TempPathFactory, scores_spec: TextSpec, cache: Path) -> Path:
    """A regression model of that task with exits; tests leave it as it is."""
    policy = ExitPolicy(criterion="patience", thresholds=[0.3] * 3, patience=1)
    folder = make_folder(tmp_path_factory.mktemp("regressor"), [], policy)
    return with_key(folder, build_task(scores_spec, folder, cache))


@pytest.fixture
def scores_task(regressor: Path, scores_spec: TextSpec, cache: Path) -> Task:
    return build_task(scores_spec, regressor, cache)
