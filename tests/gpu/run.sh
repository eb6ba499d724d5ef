#!/usr/bin/env bash
# Check and measure everything on one NVIDIA GPU: the tests of tests/gpu, then benchmarks/gpu.py.
#
#   bash tests/gpu/run.sh [OUT [CASE ...]]
#
# OUT, by default runs/gpu, gets what every step prints. Cases of the bench, such as bert-128, are all by default.
# The torch that PYTHON (default python3) has stays as it is. What is missing beside it is installed into a virtual
# environment: from tests/gpu/wheels where that folder exists (wheels.sh fills it), else from pip's index.
# ONLY=tests and ONLY=bench leave out the other one; TESTS_LIMIT and BENCH_LIMIT are their seconds at most.
# ON_CPU=1 goes through all of it on a CPU, with what needs no GPU, and with tiny models.
set -uo pipefail
out=${1:-runs/gpu}
shift || true
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
python=$(command -v "${PYTHON:-python3}") || { echo "run.sh: there is no ${PYTHON:-python3}" >&2; exit 2; }
venv=${VENV:-/tmp/ds_trainer_gpu_venv}

on_cpu=() quick=()
if [ -n "${ON_CPU:-}" ]; then
    on_cpu=(--on_cpu) quick=(--quick)
elif ! reason=$("$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>&1); then
    echo "run.sh: $python has no torch that sees a GPU: install torch for CUDA, or name another Python by PYTHON" >&2
    tail -n 1 <<< "$reason" >&2
    exit 2
fi

"$python" -m pip --version > /dev/null 2>&1 || {
    echo "run.sh: $python has no pip, which installs what is missing: $python -m ensurepip gives it one" >&2
    exit 2
}

install() {
    [ -x "$venv/bin/python" ] || "$python" -m venv --without-pip "$venv" || return
    # not --system-site-packages: where $python is of a virtual environment itself, that would skip its packages
    "$python" -c 'import site
import os, torch
for path in [*site.getsitepackages(), os.path.dirname(os.path.dirname(torch.__file__))]: print(f"import site; site.addsitedir({path!r})")' \
        > "$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/machine.pth" || return
    "$venv/bin/python" -c 'import re, pathlib
text = pathlib.Path("pyproject.toml").read_text()
wanted = re.findall("\"(.+?)\"", re.search(r"^dependencies = \[(.*?)^\]", text, re.S | re.M)[1])
print(*wanted, "pytest>=8", "accelerate>=1.1", sep="\n")' > "$venv/requirements.txt" || return
    "$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
        > "$venv/constraints.txt" || return
    local source=(--no-index --find-links tests/gpu/wheels)
    [ -d tests/gpu/wheels ] || { source=(); grep -v '^torch==' constraints.txt >> "$venv/constraints.txt"; }
    "$python" -m pip --python "$venv/bin/python" --disable-pip-version-check install --quiet -r "$venv/requirements.txt" \
        -c "$venv/constraints.txt" "${source[@]}"
}

failed=0
step() { # NAME SECONDS COMMAND ...
    local name=$1 limit=$2 code=0
    shift 2
    echo "run.sh: $name, for at most $limit s"
    timeout --kill-after=10 "$limit" "$@" > "$out/$name.txt" 2> "$out/$name.errors.txt" || code=$?
    tail -n 40 "$out/$name.txt"
    [ "$code" = 0 ] && return
    failed=1
    tail -n 20 "$out/$name.errors.txt" >&2
    echo "run.sh: $name ended with $code; all that it printed is in $out/$name.txt and $name.errors.txt" >&2
    return 1
}

export -f install
export python venv
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
step install 300 bash -c install || exit 2
export PATH="$venv/bin:$PATH" PYTHONPATH="$PWD:$PWD/tests"
[ "${ONLY:-tests}" != tests ] || step tests "${TESTS_LIMIT:-1200}" \
    "$venv/bin/python" -m pytest tests/gpu -q -p no:cacheprovider "${on_cpu[@]}"
[ "${ONLY:-bench}" != bench ] || step bench "${BENCH_LIMIT:-1500}" \
    "$venv/bin/python" benchmarks/gpu.py "${quick[@]}" "$@"
exit "$failed"
