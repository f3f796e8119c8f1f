#!/usr/bin/env bash
# What the GPUs of this node reach together, and how well one of them foretells it: links, training steps with a profile, the
# rehearsal of the same steps on one GPU, and a table of the differences. On CPUs it runs small, to see that it works.
#   bash examples/measure_gpus.sh                                           llama3.2-1b, 256K tokens, all GPUs, made-up documents
#   NPROC=8 MODEL=llama3-8b LENGTHS="131072 524288" bash examples/measure_gpus.sh --data-path data/text --tokenizer-model tok.json
#   NPROC=2 MODEL=llama-tiny LENGTHS=2048 bash examples/measure_gpus.sh --device cpu
# Arguments are flags of pretrain_llama.py, for the steps and their rehearsals alike. What to measure is in the environment:
NPROC=${NPROC-}                         # ranks, all of them context parallel (default: the GPUs, or 2 without any)
MODEL=${MODEL:-llama3.2-1b}
LENGTHS=${LENGTHS:-262144}              # tokens of a sequence, several in quotes
METHODS=${METHODS:-upipe a2a}           # a2a; upipe, or upipe-16 for 16 heads a stage
PREFETCH=${PREFETCH:-0 1}               # with upipe: --upipe-prefetch
STEPS=${STEPS:-5}                       # of each; neither the first nor the last one, which is traced, counts where there are others
REHEARSED_STEPS=${REHEARSED_STEPS-}     # the last one counts; 0: no rehearsals (default: 3, or STEPS if that is less)
LINKS=${LINKS-256K 1M 4M 16M 64M 256M 1G}  # bytes a rank of the collectives; "": not measured
PART_LIMIT_S=${PART_LIMIT_S:-150}       # seconds of a part; one that fails or takes longer is told in the table, the next one runs
TIME_LIMIT_S=${TIME_LIMIT_S:-1800}      # seconds of all; parts for which none are left are not begun
OUT=${OUT:-runs/measure-gpus}           # gets logs, reports, traces/NAME, all_to_all.json, summary.txt; a further run adds to them
# PYTHON=/path/to/python takes that one as it is and installs nothing. Ctrl-C ends all that runs and tells what is done.
set -uo pipefail
check_heads() {  # of MODEL, where no flags give it others
  local method
  check_ranks
  for method in $METHODS; do
    [[ $method != upipe-* ]] || [ $((query_heads % ${method#upipe-})) -eq 0 ] ||
      refuse "METHODS: $method does not divide the $query_heads heads of $MODEL; METHODS=upipe-$NPROC works"
  done
}
root=$(CDPATH='' cd -- "$(dirname "$0")/.." && pwd)
. "$root/examples/measuring.sh"
GRACE_S=40                              # after SIGTERM ranks go on with their step, and torchrun kills them 30 s later
STOP_S=5                                # that grace when the script is stopped

[ -z "$NPROC" ] || check_one "$COUNT" 8 NPROC
check_each "$COUNT" 262144 LENGTHS
check_each "$METHOD" '"upipe a2a upipe-16"' METHODS
check_each '[01]' '"0 1"' PREFETCH
check_one "$COUNT" 5 STEPS
REHEARSED_STEPS=${REHEARSED_STEPS:-$((STEPS < 3 ? STEPS : 3))}
check_one "0|$COUNT" 3 REHEARSED_STEPS
[ -z "$LINKS" ] || check_each "[0-9]{0,9}[1-9][0-9]{0,9}[kmgKMG]?" '"1M 64M"' LINKS
check_one "$COUNT" 150 PART_LIMIT_S
check_one "$COUNT" 1800 TIME_LIMIT_S
help_asked "$@"
check_flags "$@"

if [ -z "${PYTHON:-}" ]; then . "$root/examples/setup_env.sh" || exit 1; fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
look_around
NPROC=${NPROC:-$((gpus > 1 ? gpus : 2))}
[[ " $*" == *" --num-attention-heads"* || " $*" == *" --num-query-groups"* ]] || check_heads
check_gpus "$device"
[ "$NPROC" -gt 1 ] || [ -z "$LINKS" ] || refuse "NPROC=1 has no links to measure; NPROC=2 works, or LINKS="
for length in $LENGTHS; do
  longer=$(((length + NPROC - 1) / NPROC * NPROC))
  [ "$length" -eq "$longer" ] || refuse "LENGTHS: $length is not a multiple of NPROC=$NPROC; LENGTHS=$longer works"
done
for method in $METHODS; do
  heads=${method##*[!0-9]}
  [[ $method != upipe-* ]] || [ $((heads % NPROC)) -eq 0 ] ||
    refuse "METHODS: the heads of $method are no multiple of NPROC=$NPROC; METHODS=upipe-$NPROC works"
done
take_out

cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$((GRACE_S - 10)) PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export CUDA_DEVICE_MAX_CONNECTIONS=8
ranks=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC")
failures=0 cut_short=0 running=''
printf '\n' | tee -a "$OUT/comparison.txt" >> "$OUT/summary.txt"
told=$(wc -l < "$OUT/summary.txt")      # lines of earlier runs
settings="$MODEL, $NPROC ranks, LENGTHS='$LENGTHS' METHODS='$METHODS' STEPS=$STEPS REHEARSED_STEPS=$REHEARSED_STEPS $*"
printf '%s: %s\n' "$(date '+%F %T')" "$settings" | tee -a "$OUT/comparison.txt" >> "$OUT/summary.txt"
printf '%-52s %-22s %8s\n' part result seconds >> "$OUT/summary.txt"
compared=$(wc -l < "$OUT/comparison.txt")

row() {  # row NAME RESULT
  printf '%-52s %-22s %8d\n' "$1" "$2" $((SECONDS - begin)) | tee -a "$OUT/summary.txt"
}

summary() {
  tail -n "+$((compared + 1))" "$OUT/comparison.txt" >> "$OUT/summary.txt"
  printf '\n'
  tail -n "+$((told + 1))" "$OUT/summary.txt"
  [ "$cut_short" -eq 0 ] || echo "TIME_LIMIT_S=$TIME_LIMIT_S kept $cut_short parts from PART_LIMIT_S=$PART_LIMIT_S of their own;" \
    "TIME_LIMIT_S=$((SECONDS + GRACE_S + cut_short * PART_LIMIT_S)) gives them that"
}

part() {  # part NAME COMMAND...: within its time, its output in OUT/NAME.log
  local limit=$((TIME_LIMIT_S - SECONDS - GRACE_S)) grace=2 code=1 result='not run: no time'
  local cut=$((limit < PART_LIMIT_S))
  running=$1 begin=$SECONDS
  local log=$OUT/$running.log
  shift
  rm -f "$log"
  case $* in *torch.distributed.run*) grace=$GRACE_S ;; esac
  if [ "$limit" -ge 5 ]; then
    limit=$((limit < PART_LIMIT_S ? limit : PART_LIMIT_S))
    within "$limit" "$grace" "$log" "$@"
    code=$? result="failed, exit code $?"
    [ "$code" -ne 0 ] || result=done
    [[ $code != 124 && $code != 137 ]] || [ $((SECONDS - begin)) -lt "$limit" ] || result='out of time'  # else: of memory
  fi
  row "$running" "$result"
  running=''
  [ "$code" -ne 0 ] || return 0
  failures=$((failures + 1))
  [[ $result != *time ]] || cut_short=$((cut_short + cut))
  [ ! -s "$log" ] || grep -m 3 -E 'error:|Error|^(plan_memory|trace_summary|measure_all_to_all): ' "$log" || tail -n 3 "$log"
  return "$code"
}

steps() {  # steps NAME FLAGS...: training on all ranks, its rehearsal, what the trace says, and how they compare
  local name=$1 calibration=()
  local measured=$OUT/$1.jsonl rehearsal=$OUT/$1.rehearsal.json
  shift
  local flags=(--model "$MODEL" --context-parallel-size "$NPROC" "${data[@]}" "$@")
  rm -rf "$OUT/traces/$name" "$measured" "$rehearsal" "$OUT/$name".{trace,rehearsal,compared}.log
  part "$name" "${ranks[@]}" "$root/pretrain_llama.py" "${flags[@]}" --train-iters "$STEPS" --log-jsonl "$measured" \
    --profile --profile-step-start "$STEPS" --profile-step-end $((STEPS + 1)) --profile-dir "$OUT/traces/$name" &&
    part "$name.trace" "$PYTHON" "$root/tools/trace_summary.py" "$OUT/traces/$name"/*.json.gz && cat "$OUT/$name.trace.log"
  [ "$REHEARSED_STEPS" -gt 0 ] &&
    part "$name.rehearsal" "$PYTHON" "$root/pretrain_llama.py" "${flags[@]}" --train-iters "$REHEARSED_STEPS" \
      --rehearse-world-size "$NPROC" --rehearse-json "$rehearsal"
  if [ -s "$measured" ] && [ -s "$rehearsal" ]; then
    if ! grep -q '"device": "cpu"' "$rehearsal" && grep -qsE "\"gpus\": $NPROC,?\$" "$OUT/all_to_all.json"; then
      calibration=(--calibrate "$rehearsal" "$OUT/all_to_all.json")
    fi
    part "$name.compared" "$PYTHON" "$root/tools/plan_memory.py" --measured "$measured" --rehearsal "$rehearsal" \
      "${calibration[@]}" &&
      { printf '\n'; cat "$OUT/$name.compared.log"; } >> "$OUT/comparison.txt"
  fi
}

on_stop() {
  [ -z "$running" ] || row "$running" stopped
  summary
}

stop_on_signals "$STOP_S"
if [ -n "$LINKS" ]; then
  rm -f "$OUT/all_to_all.json"
  part links "${ranks[@]}" "$root/tools/measure_all_to_all.py" --device "$device" --sizes $LINKS --output "$OUT/all_to_all.json" &&
    cat "$OUT/links.log"
fi
for length in $LENGTHS; do
  for method in $METHODS; do
    if [ "$method" = a2a ]; then
      steps "$MODEL-$length-a2a" --seq-length "$length" --cp-comm-type a2a "$@"
      continue
    fi
    heads=()
    [ "$method" = upipe ] || heads=(--upipe-heads-per-stage "${method#upipe-}")
    for prefetch in $PREFETCH; do
      steps "$MODEL-$length-$method-prefetch$prefetch" --seq-length "$length" --cp-comm-type upipe "${heads[@]}" \
        --upipe-prefetch "$prefetch" "$@"
    done
  done
done
summary
[ "$failures" -eq 0 ]
