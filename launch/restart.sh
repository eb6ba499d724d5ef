#!/usr/bin/env bash
# Run a training command until it is finished, at most so many times. The command needs --resume, which also starts a
# new run. A failure that a restart cannot mend ends the loop: a mistake of the user (2), a loss that is not finite (3),
# a request to stop (5), too little memory (6).
#
#   bash launch/restart.sh 10 OUT deepspeed --num_gpus 2 launch/train.py ... --output_dir OUT --resume
set -u
if [ $# -lt 3 ] || ! [ "$1" -gt 0 ] 2>/dev/null; then
    echo "usage: restart.sh ATTEMPTS OUTPUT_DIR COMMAND [ARGUMENT ...]" >&2
    exit 2
fi
attempts=$1 output=$2
shift 2
# a signal for this shell is meant for the run, and ends the loop with it
stopping='' run=''
trap 'stopping=1; [ -n "$run" ] && kill -TERM "$run" 2>/dev/null' TERM INT USR1
for ((attempt = 1; attempt <= attempts; attempt++)); do
    rm -f "$output/status.json" # that of the last attempt
    "$@" &
    run=$!
    wait "$run"
    code=$?
    while kill -0 "$run" 2>/dev/null; do wait "$run"; code=$?; done
    # the launcher can end with 0 though the run was killed: only the state that the run wrote counts
    state=$(sed -n 's/^ *"state": "\(.*\)",\{0,1\}$/\1/p' "$output/status.json" 2>/dev/null)
    case "$state:$code" in
        finished:0) exit 0 ;;
        stopped:* | *:2 | *:3 | *:5 | *:6) exit "$code" ;;
    esac
    [ -z "$stopping" ] || exit "$((code ? code : 5))"
    echo "restart: attempt $attempt of $attempts ended with $code, the run is ${state:-not begun}" >&2
done
exit "$((code ? code : 1))"
