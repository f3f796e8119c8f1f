#!/usr/bin/env bash
# What the GPUs of this node reach together, and how well one of them foretells it: links, training steps with a profile, the
# rehearsal of the same steps on one GPU, and a table of the differences. On CPUs it runs small, to see that it works.
#   bash examples/measure_gpus.sh                                           llama3.2-1b, 256K tokens, all GPUs, made-up documents
#   NPROC=8 MODEL=llama3-8b LENGTHS="131072 524288" bash examples/measure_gpus.sh --data-path data/text --tokenizer-model tok.json
#   NPROC=2 MODEL=llama-tiny LENGTHS=2048 bash examples/measure_gpus.sh --device cpu
# Arguments are flags of pretrain_llama.py, for the steps and their rehearsals alike. What to measure is in the environment:
NPROC=${NPROC:-}                        # ranks, all of them context parallel (default: the GPUs, or 2 without any)
MODEL=${MODEL:-llama3.2-1b}
LENGTHS=${LENGTHS:-262144}              # tokens of a sequence, several in quotes
METHODS=${METHODS:-upipe a2a}           # a2a; upipe, or upipe-16 for 16 heads a stage
PREFETCH=${PREFETCH:-0 1}               # with upipe: --upipe-prefetch
STEPS=${STEPS:-5}                       # of each; the last one is traced, the first one not counted
REHEARSED_STEPS=${REHEARSED_STEPS:-$((STEPS < 3 ? STEPS : 3))}  # 0: no rehearsals
LINKS=${LINKS-256K 1M 4M 16M 64M 256M 1G}  # bytes a rank of the collectives; "": not measured
PART_LIMIT_S=${PART_LIMIT_S:-150}       # seconds of a part; one that fails or takes longer is told in the table, the next one runs
TIME_LIMIT_S=${TIME_LIMIT_S:-1800}      # seconds of all; parts for which none are left are not begun
OUT=${OUT:-runs/measure-gpus}           # gets logs, reports, traces/NAME, all_to_all.json, summary.txt
# PYTHON=/path/to/python takes that one as it is and installs nothing.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then . examples/setup_env.sh || exit 1; fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
GRACE_S=40                              # after SIGTERM ranks go on with their step, and torchrun kills them 30 s later

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') || exit 1
NPROC=${NPROC:-$((gpus > 1 ? gpus : 2))}
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$((GRACE_S - 10)) PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export CUDA_DEVICE_MAX_CONNECTIONS=8
ranks=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC")
mkdir -p "$OUT"
printf '%-52s %-22s %8s\n' part result seconds > "$OUT/summary.txt"
: > "$OUT/comparison.txt"
device=auto
case " $* " in *" --device cpu "* | *" --device=cpu "*) device=cpu ;; esac
data=(--mock-data)
case " $* " in *" --data-path"* | *" --train-data-path"*) data=() ;; esac

part() {  # part NAME COMMAND...: within its time, its output in OUT/NAME.log
  local name=$1 limit=$((TIME_LIMIT_S - SECONDS - GRACE_S)) begin=$SECONDS grace=2 code result
  shift
  case $* in *torch.distributed.run*) grace=$GRACE_S ;; esac
  if [ "$limit" -lt 5 ]; then
    result="not run: no time" code=1
  else
    limit=$((limit < PART_LIMIT_S ? limit : PART_LIMIT_S))
    { timeout -k "$grace" "$limit" "$@" > "$OUT/$name.log" 2>&1; } 2> /dev/null  # bash's own line on a killed command
    code=$?
    case $code in 0) result=done ;; 124 | 137) result="out of time" ;; *) result="failed, exit code $code" ;; esac
  fi
  printf '%-52s %-22s %8d\n' "$name" "$result" $((SECONDS - begin)) | tee -a "$OUT/summary.txt"
  [ "$code" -eq 0 ] || [ ! -s "$OUT/$name.log" ] || grep -E 'error:|Error' "$OUT/$name.log" | head -n 3
  return "$code"
}

steps() {  # steps NAME FLAGS...: training on all ranks, its rehearsal, what the trace says, and how they compare
  local name=$1 calibration=()
  shift
  local flags=(--model "$MODEL" --context-parallel-size "$NPROC" "${data[@]}" "$@")
  rm -rf "$OUT/traces/$name" "$OUT/$name.jsonl" "$OUT/$name.rehearsal.json"
  part "$name" "${ranks[@]}" pretrain_llama.py "${flags[@]}" --train-iters "$STEPS" --log-jsonl "$OUT/$name.jsonl" \
    --profile --profile-step-start "$STEPS" --profile-step-end $((STEPS + 1)) --profile-dir "$OUT/traces/$name" &&
    part "$name.trace" "$PYTHON" tools/trace_summary.py "$OUT/traces/$name"/*.json.gz && cat "$OUT/$name.trace.log"
  [ "$REHEARSED_STEPS" -gt 0 ] &&
    part "$name.rehearsal" "$PYTHON" pretrain_llama.py "${flags[@]}" --train-iters "$REHEARSED_STEPS" \
      --rehearse-world-size "$NPROC" --rehearse-json "$OUT/$name.rehearsal.json"
  if [ -s "$OUT/$name.jsonl" ] && [ -s "$OUT/$name.rehearsal.json" ]; then
    if [ "$device" != cpu ] && [ -s "$OUT/all_to_all.json" ]; then
      calibration=(--calibrate "$OUT/$name.rehearsal.json" "$OUT/all_to_all.json")
    fi
    part "$name.compared" "$PYTHON" tools/plan_memory.py --measured "$OUT/$name.jsonl" --rehearsal "$OUT/$name.rehearsal.json" \
      "${calibration[@]}" && cat "$OUT/$name.compared.log" >> "$OUT/comparison.txt"
  fi
}

if [ -n "$LINKS" ]; then
  part links "${ranks[@]}" tools/measure_all_to_all.py --device "$device" --sizes $LINKS --output "$OUT/all_to_all.json" &&
    cat "$OUT/links.log"
fi
for length in $LENGTHS; do
  for method in $METHODS; do
    case $method in
      a2a) steps "$MODEL-$length-a2a" --seq-length "$length" --cp-comm-type a2a "$@" ;;
      upipe | upipe-*)
        heads=()
        [ "$method" = upipe ] || heads=(--upipe-heads-per-stage "${method#upipe-}")
        for prefetch in $PREFETCH; do
          steps "$MODEL-$length-$method-prefetch$prefetch" --seq-length "$length" --cp-comm-type upipe "${heads[@]}" \
            --upipe-prefetch "$prefetch" "$@"
        done
        ;;
      *) echo "METHODS: $method is not known; a2a, upipe or upipe-16 works" >&2; exit 2 ;;
    esac
  done
done
printf '\n'
cat "$OUT/comparison.txt" >> "$OUT/summary.txt"
cat "$OUT/summary.txt"
! grep -qE 'failed|out of time|not run' "$OUT/summary.txt"
