#!/usr/bin/env bash
# Run every script of benchmarks, one after the other, and collect their figures. It takes hours, on a quiet machine.
#
#   bash benchmarks/all.sh [--quick] [OUT [SCRIPT ...]]
#   python tools/write_speed_table.py OUT/figures.jsonl
#
# With names of scripts, such as "mask_cost lm_head", it runs these alone. OUT, by default runs/bench, lies in this
# project's folder. It gets what every script prints, and figures.jsonl, to which a line is added for each figure, with
# its command; the table has the last line of each. With --quick, which only shows that the scripts run, there are no
# figures, and OUT is runs/quick/bench.
# A script that needs what is not there is left out with a line: a GPU, the data and the model of ../shared, or, with
# --quick, a trained model. PYTHON (default python) runs them. The exit code is 1 if a script failed or a bar did not hold.
set -uo pipefail
quick=()
[ "${1:-}" = --quick ] && quick=(--quick) && shift
out=${1:-runs/${quick:+quick/}bench}
only=" ${*:2} "
cd "$(dirname "${BASH_SOURCE[0]}")/.." && mkdir -p "$out" || exit 2
python=${PYTHON:-python} failed=0
shared=../shared
unset OMP_NUM_THREADS  # each script takes the threads that it is about

bench() { # SCRIPT ARGUMENT ...: run a script of benchmarks, keep what it prints, and collect its figures
    local name=$1 command="python benchmarks/$1.py${2:+ ${*:2}}"
    [[ $only = "  " || $only = *" $1 "* ]] || return
    echo "all.sh: $command"
    if ! "$python" "benchmarks/$1.py" "${@:2}" "${quick[@]}" > "$out/$name.txt" 2> "$out/$name.errors.txt"; then
        failed=1
        echo "all.sh: $name ended with an error, or a bar does not hold: see $out/$name.txt and $out/$name.errors.txt"
    fi
    [ ${#quick[@]} = 0 ] || return
    sed -n "/^{\"name\"/s|}\$|, \"command\": \"$command\"}|p" "$out/$name.txt" >> "$out/figures.jsonl"
}

for script in loop_overhead against_hf_trainer mask_cost grad_cache lm_head teacher_cache top_k_cache length_grouping \
    packing openmp_spinning structured_speed cut_speed memory_model; do
    bench $script
done
bench tune
bench faults --kills 50 --others 6
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then
    bench gpu
else
    echo "all.sh: left out gpu: there is no GPU"
fi
if [ -d $shared ]; then
    bench recipes --output "$out/recipes"
    bench decoder_cuts "$out/decoder_cuts"
    bench speculation
    bench front_page --output "$out/front_page"
    bench cut_quality --output "$out/cut_quality"
    bench against_pruners --output "$out/against_pruners"
else
    echo "all.sh: left out recipes, decoder_cuts, speculation, front_page, cut_quality and against_pruners: there is" \
        "no $shared"
fi
if [ -d $shared ] && [ ${#quick[@]} = 0 ]; then
    bench exit_speed "$out/recipes/sst2_exits_0/model"
    bench student_speed "$out/recipes/sst2_methods_0/finetune/model" "$out/recipes/sst2_student_0/model"
else
    echo "all.sh: left out exit_speed and student_speed: they need the models that recipes trains with $shared"
fi
exit $failed
