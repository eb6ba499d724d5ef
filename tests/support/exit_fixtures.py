"""The fixtures of tests on folders with exits, made once a session; a module names this one in `pytest_plugins`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.exit_folders import make_classifier, make_regressor, spec_of

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


@pytest.fixture(scope="session")
def regressor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regression model with exits; tests leave it as it is."""
    return make_regressor(tmp_path_factory.mktemp("regressor"))


@pytest.fixture
def task(csv_folder: Path, classifier: Path, cache: Path) -> Task:
    """240 rows to train, a quarter of them held out, and 61 to validate."""
    return build_task(spec_of(csv_folder), classifier, cache)
