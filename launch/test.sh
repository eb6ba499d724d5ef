#!/usr/bin/env bash
# Set up and run the whole test suite. Arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/setup.sh" "[test,plots]"
python -m pytest "$@"
