#!/usr/bin/env bash
# Set up and run the whole test suite. Arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/setup.sh" "[test,plots,onnx,tune]"
unset PYTHONDONTWRITEBYTECODE  # every process would compile the project and its tests again
# two workers, or TEST_WORKERS; a file a worker: much of the time passes in starting processes
python -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile "$@"
