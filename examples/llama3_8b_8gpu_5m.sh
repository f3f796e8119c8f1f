#!/usr/bin/env bash
# Llama3-8B at up to 5M tokens on a node of 8 GPUs that are held to 80 GB each: what it reaches, and the longest context that fits.
#   bash examples/llama3_8b_8gpu_5m.sh                            all stages, one after the other: an hour
#   bash examples/llama3_8b_8gpu_5m.sh 128k 5m                    these only; each takes less than TIME_LIMIT_S
#   PYTHON=python3 OUT=/results bash examples/llama3_8b_8gpu_5m.sh longest
# | stage   | what runs                                                                  | GPUs |
# |---------|----------------------------------------------------------------------------|------|
# | plan    | predicted memory and time at 5M, the longest context                       | none |
# | 128k    | whole steps at 128K tokens, upipe and a2a, beside their rehearsals         | all  |
# | 512k    | the same at 512K                                                           | all  |
# | 1m      | a whole step at 1M, upipe (METHODS=a2a: a2a)                               | all  |
# | 5m      | a step at 5M of LAYERS layers, real attention                              | all  |
# | stub    | the memory of a step at 5M of all layers: COMPUTED compute, no attention   | one  |
# | longest | that at longer and longer contexts, until none a STEP longer fits          | one  |
OUT=${OUT:-runs/llama3-8b-5m}
NPROC=${NPROC:-8}
MODEL=${MODEL:-llama3-8b}
LIMIT_GIB=${LIMIT_GIB:-74.5}            # of a GPU for PyTorch: 80 GB; a card of that name has 79.6 GiB, CUDA and NCCL the rest
HOST_GIB=${HOST_GIB:-64}                # of host memory a rank: 32 layers of 1M tokens keep 64 GiB
LAYERS=${LAYERS:-1}                     # of stage 5m: three minutes each
COMPUTED=${COMPUTED:-2}                 # layers that compute in stages stub and longest; the others only take their memory
LONG=${LONG:-5242880}                   # tokens of stages 5m and stub
STEP=${STEP:-524288}                    # tokens: how sharp the longest context is
MEMORY=${MEMORY:---activation-memory lean}   # of the stages at 5M and beyond, with --upipe-query-chunk TOKENS if wished
GUESS=${GUESS:-}                        # tokens: where the search for the longest context begins (default: what is predicted)
TIME_LIMIT_S=${TIME_LIMIT_S:-560}       # seconds of a stage
DEVICE=${DEVICE:-auto}
set -uo pipefail
root=$(CDPATH='' cd -- "$(dirname "$0")/.." && pwd)
. "$root/examples/measuring.sh"
STOP_S=20                               # SIGKILL after so long for what a signal is to stop; measure_gpus.sh stops its own sooner

[ $# -gt 0 ] || set -- plan 128k 512k 1m 5m stub longest
check_one "$COUNT" 8 NPROC
check_one "$COUNT" 1 LAYERS
check_one "$COUNT" 2 COMPUTED
check_one "$COUNT" 5242880 LONG
check_one "$COUNT" 524288 STEP
check_one "|$COUNT" 5242880 GUESS
check_one "$COUNT" 560 TIME_LIMIT_S
check_one "$DECIMAL" 74.5 LIMIT_GIB
check_one "$DECIMAL" 64 HOST_GIB
check_one 'auto|cpu|cuda' auto DEVICE
[ -z "${METHODS:-}" ] || check_each "$METHOD" '"upipe a2a"' METHODS
for name in LONG STEP; do
  longer=$(((${!name} + NPROC - 1) / NPROC * NPROC))
  [ "${!name}" -eq "$longer" ] || refuse "$name=${!name} is not a multiple of NPROC=$NPROC; $name=$longer works"
done
for stage in "$@"; do
  [[ $stage =~ ^(plan|128k|512k|1m|5m|stub|longest)$ ]] ||
    refuse "$stage is not a stage; plan, 128k, 512k, 1m, 5m, stub or longest works"
done
if [ -z "${PYTHON:-}" ]; then . "$root/examples/setup_env.sh" || exit 1; fi
export PYTHON PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
look_around
[[ " $* " != *" "[0-9]* ]] || check_gpus "$DEVICE"
take_out
stages_done=''
on_stop() { echo "stages done:${stages_done:- none}; stopped: $stage"; }
stop_on_signals "$STOP_S"
common=(--gpu-memory-limit-gib "$LIMIT_GIB" --host-memory-gib "$HOST_GIB" --attention-mask causal --device "$DEVICE")
job=(--model "$MODEL" --context-parallel-size "$NPROC" --mock-data --attention-mask causal $MEMORY --device "$DEVICE")

measure() {  # measure NAME FLAGS...: examples/measure_gpus.sh with what is in the environment
  NPROC=$NPROC MODEL=$MODEL OUT=$OUT/$1 TIME_LIMIT_S=$TIME_LIMIT_S bash "$root/examples/measure_gpus.sh" "${common[@]}" "${@:2}"
}

stub() {  # stub TOKENS: one step of a rank, rehearsed; 0 fits, 1 does not, other codes are other troubles
  local log=$OUT/stub-$1.log left=$((TIME_LIMIT_S - SECONDS + begin)) code
  [ "$left" -gt 0 ] ||
    { echo "$1 tokens: no time is left of TIME_LIMIT_S=$TIME_LIMIT_S; GUESS=$1 goes on from here" >&2; return 2; }
  timeout -k 5 "$left" "$PYTHON" "$root/pretrain_llama.py" "${job[@]}" --gpu-memory-limit-gib "$LIMIT_GIB" \
    --seq-length "$1" --train-iters 1 --rehearse-world-size "$NPROC" --rehearse-attention stub \
    --rehearse-layers "$COMPUTED" --rehearse-json "$OUT/stub-$1.json" \
    > "$log" 2>&1
  code=$?
  if [ "$code" -eq 0 ]; then
    echo "$1 tokens fit: $(grep -E '^most' "$log")"
  elif grep -q 'out of GPU memory' "$log"; then
    echo "$1 tokens do not fit"
    return 1
  else
    echo "$1 tokens: exit code $code, neither fitting nor too large; $log" >&2
    tail -n 3 "$log" >&2
    return 2
  fi
}

longest() {  # steps away from the guess that double, until one context fits and a longer one does not; then halves
  local at fits=0 too_long=0 away=$STEP
  at=${GUESS:-$("$PYTHON" "$root/tools/plan_memory.py" "${job[@]}" --gpus "$NPROC" --longest --gpu-memory-gib "$LIMIT_GIB" --json |
    "$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["longest_seq_length"])')}
  at=$((at / STEP * STEP))
  while [ "$fits" -eq 0 ] || [ "$too_long" -eq 0 ] || [ $((too_long - fits)) -gt "$STEP" ]; do
    [ "$at" -gt 0 ] || { echo "not even $STEP tokens fit in --gpu-memory-limit-gib $LIMIT_GIB"; return 1; }
    stub "$at"
    case $? in 0) fits=$at ;; 1) too_long=$at ;; *) return 1 ;; esac
    if [ "$too_long" -eq 0 ]; then
      at=$((at + away)) away=$((2 * away))
    elif [ "$fits" -eq 0 ]; then
      at=$((at - away > 0 || at <= STEP ? at - away : STEP)) away=$((2 * away))
    else
      at=$(((fits + too_long) / 2 / STEP * STEP))
    fi
  done
  echo "longest context on $NPROC GPUs of $LIMIT_GIB GiB: $fits tokens; $too_long do not fit"
}

plan() {
  local asked=("$PYTHON" "$root/tools/plan_memory.py" "${job[@]}" --gpus "$NPROC" --gpu H200 --gpu-memory-limit-gib "$LIMIT_GIB")
  "${asked[@]}" --seq-length "$LONG" && "${asked[@]}" --longest
}

run() {  # run STAGE
  case $1 in
    plan) plan ;;
    128k) LENGTHS=131072 STEPS=4 REHEARSED_STEPS=2 METHODS=${METHODS:-upipe a2a} PREFETCH=1 measure 128k ;;
    512k)
      LENGTHS=524288 STEPS=2 REHEARSED_STEPS=1 METHODS=${METHODS:-upipe a2a} PREFETCH=1 PART_LIMIT_S=250 LINKS="" measure 512k ;;
    1m) LENGTHS=1048576 STEPS=1 METHODS=${METHODS:-upipe} PREFETCH=1 PART_LIMIT_S=400 LINKS="" measure 1m ;;
    5m) LENGTHS=$LONG STEPS=1 METHODS=upipe PREFETCH=0 PART_LIMIT_S=400 LINKS="" measure 5m --num-layers "$LAYERS" $MEMORY ;;
    stub) stub "$LONG" && sed -n '/^rehearsal/,$p' "$OUT/stub-$LONG.log" ;;
    longest) longest | tee -a "$OUT/longest.txt" ;;
  esac
}

failed=0
for stage in "$@"; do
  printf '\n== %s\n' "$stage"
  begin=$SECONDS
  run "$stage" &                        # a signal ends the wait
  if wait $!; then
    stages_done+=" $stage"
  else
    failed=1
    echo "== $stage failed"
  fi
done
exit "$failed"
