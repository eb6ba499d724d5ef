# Sourced by quickstart.sh and test.sh: makes .venv, unless it exists, and installs the project into it, with the
# versions of constraints.txt. Usage: source launch/setup.sh "" | "[EXTRA]"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

if [ ! -x .venv/bin/python ]; then
    echo "setup: making .venv"
    "${PYTHON:-python3}" -m venv .venv || exit 1
fi
export PATH="$PWD/.venv/bin:$PATH"
export VIRTUAL_ENV="$PWD/.venv"

stamp=".venv/installed$1"
wanted=$(cat constraints.txt pyproject.toml | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "setup: installing ds_trainer$1"
    # torch first: nothing else may pull another build of it
    pip install --quiet -c constraints.txt torch || exit 1
    pip install --quiet -c constraints.txt -e ".$1" || exit 1
    echo "$wanted" > "$stamp"
fi
