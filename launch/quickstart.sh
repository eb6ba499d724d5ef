#!/usr/bin/env bash
# From a clean clone to a smaller model: set up, fine-tune a small BERT on the docstrings of the installed packages, prune it
# to 10% by movement pruning, cut it to a quarter of its heads and neurons, compare all. Downloads neither model nor data.
# Usage: bash launch/quickstart.sh [OUTPUT_DIR]
set -euo pipefail
here=$PWD
source "$(dirname "$0")/setup.sh" "[plots,onnx]"
output=${1:-runs/quickstart}
case $output in /*) ;; *) output=$here/$output ;; esac

deepspeed launch/train.py --deepspeed_config ds_configs/zero2.json --recipe ds_configs/recipes/quickstart.json \
    --output_dir "$output" --overwrite_output_dir
python launch/evaluate.py "$output/model" --recipe "$output/recipe.json"
