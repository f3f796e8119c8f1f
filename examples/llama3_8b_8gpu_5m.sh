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
HOST_GIB=${HOST_GIB:-64}                # of host memory a rank, stages 128k to 5m; plan, stub and longest tell their need
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

help_asked "$@"
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
for stage in "$@"; do
  [[ $stage =~ ^(plan|128k|512k|1m|5m|stub|longest)$ ]] ||
    refuse "$stage is not a stage; plan, 128k, 512k, 1m, 5m, stub or longest works"
done
if [ -z "${PYTHON:-}" ]; then . "$root/examples/setup_env.sh" || exit 1; fi
export PYTHON PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
look_around
check_ranks
for name in LONG STEP; do
  longer=$(((${!name} + NPROC - 1) / NPROC * NPROC))
  [ "${!name}" -eq "$longer" ] || refuse "$name=${!name} is not a multiple of NPROC=$NPROC; $name=$longer works"
done
[ "$COMPUTED" -le "$layers" ] || refuse "COMPUTED=$COMPUTED is more than the $layers layers of $MODEL; COMPUTED=$layers works"
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

within_stage() {  # within_stage COMMAND...: its exit code, 124 when the stage's time is over
  local left=$((TIME_LIMIT_S - SECONDS + begin))
  [ "$left" -gt 0 ] || return 124
  timeout -k 5 "$left" "$@"
}

time_is_over() { [ $((SECONDS - begin)) -ge "$TIME_LIMIT_S" ]; }

more_time() { echo "TIME_LIMIT_S=$((TIME_LIMIT_S < 560 ? 560 : 2 * TIME_LIMIT_S))"; }

ask_planner() {  # ask_planner FLAGS...
  within_stage "$PYTHON" "$root/tools/plan_memory.py" "${job[@]}" --gpus "$NPROC" "$@"
}

tell() {  # tell WHAT...: stage longest also keeps it
  echo "$*"
  [ "$stage" != longest ] ||
    echo "$(date '+%F %T') $MODEL, $NPROC GPUs of $LIMIT_GIB GiB, $MEMORY, COMPUTED=$COMPUTED: $*" >> "$OUT/longest.txt"
}

tell_host() {  # tell_host TOKENS GIB: of a rank
  tell "$1 tokens keep $2 GiB in host memory for a rank, $(awk "BEGIN { printf \"%.1f\", $2 * $NPROC }") GiB for $NPROC ranks of" \
    "a node; HOST_GIB=$HOST_GIB does not count here"
}

kept() { sed -nE 's/^elsewhere +([0-9.]+) GiB of host memory.*/\1/p' "$OUT/stub-$1.log"; }  # kept TOKENS: GiB

stub() {  # stub TOKENS: one step of a rank, rehearsed; 0 fits, 1 does not, 2 the time is over, 3 is other trouble
  local log=$OUT/stub-$1.log code
  within_stage "$PYTHON" "$root/pretrain_llama.py" "${job[@]}" --gpu-memory-limit-gib "$LIMIT_GIB" \
    --seq-length "$1" --train-iters 1 --rehearse-world-size "$NPROC" --rehearse-attention stub \
    --rehearse-layers "$COMPUTED" --rehearse-json "$OUT/stub-$1.json" \
    > "$log" 2>&1
  code=$?
  [ "$code" -eq 0 ] || end_started 0      # what one that had to be killed has left
  if grep -qE '^most' "$log"; then        # also of one that was stopped after its step
    tell "$1 tokens fit: $(awk '/^most/ { print $2 }' "$log") GiB of the GPU at most"
  elif grep -q 'out of GPU memory' "$log"; then
    tell "$1 tokens do not fit"
    return 1
  elif time_is_over; then
    return 2
  else
    tell "$1 tokens: exit code $code, neither fitting nor too large; $log" >&2
    tail -n 3 "$log" >&2
    return 3
  fi
}

guess() {  # guess: sets at to where the search begins
  at=$GUESS
  if [ -z "$at" ]; then
    echo "asking the planner for a context to begin with, of all $LIMIT_GIB GiB (stage plan leaves a tenth to the allocator) ..."
    at=$(ask_planner --longest --gpu-memory-gib "$LIMIT_GIB" --json | sed -nE 's/^ *"longest_seq_length": ([0-9]+),?$/\1/p')
  fi
  if [ -z "$at" ]; then
    echo "the planner names none; the search begins with LONG=$LONG"
    at=$LONG
  fi
  at=$((at < STEP ? STEP : at / STEP * STEP))
}

longest() {  # steps away from the guess that double, until one context fits and a longer one does not; then halves
  local at fits=0 too_long=0 away=$STEP so_far
  guess
  while [ "$fits" -eq 0 ] || [ "$too_long" -eq 0 ] || [ $((too_long - fits)) -gt "$STEP" ]; do
    [ "$at" -gt 0 ] || { tell "not even $STEP tokens fit in LIMIT_GIB=$LIMIT_GIB"; return 1; }
    stub "$at"
    case $? in
      0) fits=$at ;;
      1) too_long=$at ;;
      *)
        so_far="so far $([ "$fits" -gt 0 ] && echo "$fits tokens fit" || echo "none is known to fit"),"
        so_far+=" $([ "$too_long" -gt 0 ] && echo "$too_long do not" || echo "none is known not to")"
        if time_is_over; then
          so_far="time is over at $at tokens: $so_far; GUESS=$at goes on from here, or $(more_time) goes further at once"
        fi
        tell "$so_far"
        return 1
        ;;
    esac
    if [ "$too_long" -eq 0 ]; then
      at=$((at + away)) away=$((2 * away))
    elif [ "$fits" -eq 0 ]; then
      at=$((at - away > 0 || at <= STEP ? at - away : STEP)) away=$((2 * away))
    else
      at=$(((fits + too_long) / 2 / STEP * STEP))
    fi
  done
  tell "longest context on $NPROC GPUs of $LIMIT_GIB GiB: $fits tokens; $too_long do not fit"
  tell_host "$fits" "$(kept "$fits")"
}

plan() {
  local code=0 question at planned=$OUT/plan.txt host=()  # host: tokens and GiB, in turn
  for question in "--seq-length $LONG" --longest; do
    ask_planner --gpu H200 --gpu-memory-limit-gib "$LIMIT_GIB" $question > "$planned" || code=1
    cat "$planned"
    ! time_is_over || { echo "$question: not answered in TIME_LIMIT_S=$TIME_LIMIT_S; $(more_time) gives it longer"; return 1; }
    host+=($(sed -nE "s/^$MODEL, ([0-9,]+) tokens on.*/\1/p; s/^  host +([0-9.]+).*/\1/p" "$planned" | tr -d ,))
  done
  echo "planned with nine tenths of $LIMIT_GIB GiB, the rest is the allocator's; stage longest begins with what all would hold"
  for ((at = 0; at < ${#host[@]}; at += 2)); do
    tell_host "${host[@]:at:2}"
  done
  return "$code"
}

whole_step() {
  stub "$LONG"
  case $? in
    0) sed -n '/^rehearsal/,$p' "$OUT/stub-$LONG.log"; tell_host "$LONG" "$(kept "$LONG")" ;;
    2) echo "$LONG tokens: not done in TIME_LIMIT_S=$TIME_LIMIT_S; $(more_time) gives it longer"; return 1 ;;
    *) return 1 ;;
  esac
}

run() {  # run STAGE
  case $1 in
    plan) plan ;;
    128k) LENGTHS=131072 STEPS=4 REHEARSED_STEPS=2 METHODS=${METHODS:-upipe a2a} PREFETCH=1 measure 128k ;;
    512k)
      LENGTHS=524288 STEPS=2 REHEARSED_STEPS=1 METHODS=${METHODS:-upipe a2a} PREFETCH=1 PART_LIMIT_S=250 LINKS="" measure 512k ;;
    1m) LENGTHS=1048576 STEPS=1 METHODS=${METHODS:-upipe} PREFETCH=1 PART_LIMIT_S=400 LINKS="" measure 1m ;;
    5m) LENGTHS=$LONG STEPS=1 METHODS=upipe PREFETCH=0 PART_LIMIT_S=400 LINKS="" measure 5m --num-layers "$LAYERS" $MEMORY ;;
    stub) whole_step ;;
    longest) longest ;;
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
