"""Plugins: what a file or a module of a user's own may do, and which of its errors are told how."""

from __future__ import annotations

import json
import sys

import pytest

from ds_trainer.cli.plugins import load_plugin, register
from ds_trainer.ranks.failures import UserError
from ds_trainer.tasks.task import Task


@pytest.mark.parametrize("name", ["squad", "mlm", "sst2", "text"])
def test_a_plugin_cannot_take_the_name_of_a_task_of_this_library(name):
    with pytest.raises(ValueError, match=f'a plugin has the task "{name}", which is one of this library'):
        register(tasks={name: Task})


def test_a_plugin_stands_in_for_no_other_module(tmp_path):
    """A file that is named like one of Python's own modules is loaded beside it."""
    (tmp_path / "json.py").write_text("TASKS = TECHNIQUES = {}\n")
    with pytest.raises(UserError, match="neither TASKS nor TECHNIQUES"):
        load_plugin(str(tmp_path / "json.py"))
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("open('/nowhere/vocabulary.txt')", FileNotFoundError),
        ("import no_such_module", ModuleNotFoundError),
        ("import pl", ModuleNotFoundError),
    ],
)
def test_an_error_inside_a_plugin_keeps_its_traceback(code, error, tmp_path, monkeypatch):
    """Only the absence of the plugin itself is reported as such; what it misses is a bug of the plugin."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the current folder is added
    (tmp_path / "plugin.py").write_text(code)
    for name in ("plugin.py", "plugin"):
        with pytest.raises(error):
            load_plugin(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("examples/absent.py", "--plugin examples/absent.py: there is no such file"),
        ("no.such.module", "--plugin no.such.module: there is no such module"),
        ("examples/serve.py", "--plugin examples/serve.py: the module has neither TASKS nor TECHNIQUES"),
    ],
)
def test_a_plugin_that_is_missing_is_named(name, message):
    with pytest.raises(UserError, match=message):
        load_plugin(name)
