"""Limit how long OpenMP's threads spin while they wait for each other; it must be set before torch is loaded."""

import os

SPINS = 10_000
"""About 20 microseconds. libgomp's default is minutes, as long as there are not more threads than cores: on a machine
with another busy process, a waiting thread then takes the core of the thread that it waits for, and training falls to a
fortieth of its speed. `benchmarks/openmp_spinning.py` shows both."""
_SET_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> None:
    """Set libgomp's limit in this process's environment, unless the user has set how its threads wait."""
    if not any(name in os.environ for name in _SET_BY_USER):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
