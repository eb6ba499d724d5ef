#!/usr/bin/env bash
# Fill tests/gpu/wheels, on a machine with a network where launch/setup.sh was run, for run.sh on one without.
#
#   bash tests/gpu/wheels.sh [NAME ...]
#
# By default these are all packages that this project needs beside torch and NVIDIA's; names choose some, as where the
# other machine has most of them. PYTHON_VERSION (default 3.12) and MACHINE (default x86_64) are the other machine's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ ! -d .venv ] || export PATH="$PWD/.venv/bin:$PATH"
mkdir -p tests/gpu/wheels
export PYTHON_VERSION=${PYTHON_VERSION:-3.12}
versions=$(python - "$@" <<'PYTHON'
import os
import re
import sys
from importlib.metadata import distribution, requires
from packaging.requirements import Requirement

skipped = re.compile(r"torch$|nvidia|triton|cuda")
target = {"python_version": os.environ["PYTHON_VERSION"], "python_full_version": os.environ["PYTHON_VERSION"] + ".0"}
todo, versions = ["ds_trainer", "pytest", "accelerate"], {}
while todo:
    name = todo.pop().lower().replace("_", "-")
    if name in versions or skipped.match(name):
        continue
    versions[name] = distribution(name).version
    needed = map(Requirement, requires(name) or ())
    todo += [one.name for one in needed if not one.marker or one.marker.evaluate({"extra": "", **target})]
del versions["ds-trainer"]
wanted = [name.lower().replace("_", "-") for name in sys.argv[1:]] or versions
print(*(f"{name}=={versions[name]}" for name in wanted), sep="\n")
PYTHON
)
machine=${MACHINE:-x86_64}
platforms=(--platform "manylinux1_$machine" --platform "manylinux2010_$machine" --platform "manylinux2014_$machine")
for minor in 17 24 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${minor}_$machine"); done
for one in $versions; do
    if [[ $one == deepspeed==* ]]; then # there is no wheel of it; built without kernels, it is for every Python
        DS_BUILD_OPS=0 pip wheel --quiet --no-deps --no-build-isolation -w tests/gpu/wheels "$one"
    else
        pip download --quiet --no-deps --only-binary=:all: --implementation cp -d tests/gpu/wheels \
            --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" "$one"
    fi
done
du -sh tests/gpu/wheels
