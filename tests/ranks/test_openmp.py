"""The limit on OpenMP's spinning: set for every command, unless the user has set how threads wait."""

from __future__ import annotations

import pytest
from support.launching import run_python

_PRINT = "import os; from ds_trainer.ranks import openmp; {} openmp.limit_spinning(); print(os.environ.get('{}'))"


@pytest.mark.parametrize(
    ("before", "name", "value"),
    [
        ("", "GOMP_SPINCOUNT", "10000"),
        ("os.environ['GOMP_SPINCOUNT'] = '5';", "GOMP_SPINCOUNT", "5"),
        ("os.environ['OMP_WAIT_POLICY'] = 'active';", "GOMP_SPINCOUNT", "None"),
    ],
)
def test_the_users_own_setting_wins(before, name, value):
    done = run_python("-c", _PRINT.format(before, name))
    assert done.stdout.strip() == value, done.stderr


def test_a_command_limits_it_before_torch_is_loaded():
    """OpenMP's library reads the variable when it is loaded."""
    code = (
        "import os, sys; from ds_trainer.cli import command, main; sys.argv = ['x', '--help'];"
        "command.run_command = lambda *_: print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules) or 0;"
        "main.main('doctor')"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == "10000 False", done.stderr
