# Sourced by measure_gpus.sh and llama3_8b_8gpu_5m.sh: what is checked before they begin, and how they are stopped.
#   refuse WHAT...                        says so and exits with 2
#   help_asked WORDS...                   prints the head of the script and ends it if -h or --help is among the words
#   check_one PATTERN VALUE NAME...       variables that are one word of that pattern; VALUE is what works
#   check_each PATTERN VALUE NAME...      variables that are one word or more, each of that pattern
#   check_flags FLAGS...                  flags for the steps of measure_gpus.sh; leaves their --device in device, in data the flag
#                                         of made-up documents unless they name others
#   look_around                           MODEL is known; leaves the number of GPUs in gpus, MODEL's layers, query_heads, kv_heads
#   check_ranks                           NPROC ranks can share the heads of MODEL
#   check_gpus DEVICE                     NPROC ranks have a GPU each where there are any
#   take_out                              makes OUT, as an absolute path, which no other run uses until this one has ended
#   within SECONDS GRACE_S LOG COMMAND... exit code of the command, 124 or 137 when it is out of time; a signal stops it
#   end_started SECONDS                   ends all that this script has started and that still runs; SIGKILL after so long
#   stop_on_signals SECONDS               Ctrl-C, SIGTERM and SIGHUP end_started, call on_stop (the script's own) and exit
COUNT='[1-9][0-9]{0,14}'
METHOD="a2a|upipe|upipe-$COUNT"
DECIMAL='(0\.0*)?[1-9][0-9]{0,8}(\.[0-9]{1,9})?'
export MEASURED_BY=$$                   # in the environment of all that is started: ranks have sessions of their own

refuse() {
  echo "${0##*/}: $*" >&2
  exit 2
}

help_asked() {
  local word
  for word in "$@"; do
    [[ $word != -h && $word != --help ]] || { sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0"; exit 0; }
  done
}

check_one() {
  local name
  for name in "${@:3}"; do
    [[ ${!name} =~ ^($1)$ ]] || refuse "$name=${!name} cannot be used; $name=$2 works"
  done
}

check_each() {
  local name word words
  for name in "${@:3}"; do
    read -rd '' -a words <<< "${!name}"
    [ ${#words[@]} -gt 0 ] || refuse "$name is blank, so there is nothing to do; $name=$2 works"
    for word in "${words[@]}"; do
      [[ $word =~ ^($1)$ ]] || refuse "$name: $word cannot be used; $name=$2 works"
    done
  done
}

check_flags() {
  local word flag instead before=''
  device=auto data=(--mock-data)
  for word in "$@"; do
    flag=${word%%=*} instead=''
    case $flag in
      --seq-length) instead=LENGTHS=262144 ;;
      --cp-comm-type | --upipe-heads-per-stage) instead='METHODS="upipe a2a upipe-16"' ;;
      --upipe-prefetch) instead='PREFETCH="0 1"' ;;
      --model | --load-hf) instead=MODEL=llama3-8b ;;
      --context-parallel-size) instead=NPROC=8 ;;
      --train-iters) instead=STEPS=5 ;;
      --rehearse-*) instead=REHEARSED_STEPS=3 ;;
      --log-jsonl | --tensorboard-dir | --profile-dir) instead=OUT=runs/measure-gpus ;;
      --profile*) refuse "$flag: the last step of each row is traced, on rank 0; without that flag it works" ;;
      --save | --save-interval | --load | --eval-* | --dry-run)
        refuse "$flag: every row is a few steps and their rehearsal, which keep nothing; without that flag it works" ;;
      --data-path | --train-data-path) data=() ;;
      --device) [ "$flag" = "$word" ] || device=${word#*=} ;;
    esac
    [ -z "$instead" ] || refuse "$flag would say what the names of the rows do not; in the environment $instead works"
    [ "$before" != --device ] || device=$word
    before=$word
  done
}

look_around() {
  local found names model code
  code='import torch; from megacp.model.config import PRESETS; '
  code+='told = (f"{name}:{it.num_layers}:{it.num_attention_heads}:{it.num_query_groups}" for name, it in PRESETS.items());'
  found=$("$PYTHON" -c "$code print(torch.cuda.device_count(), *told)") || exit 1
  gpus=${found%% *} names=$(grep -oE '[^ ]+(:[0-9]+){3}' <<< "$found" | cut -d : -f 1 | paste -sd ' ')
  [[ " $names " == *" $MODEL "* ]] || refuse "MODEL=$MODEL is not known; MODEL=${names// / or } works"
  for model in $found; do
    [[ $model != "$MODEL:"* ]] || IFS=: read -r _ layers query_heads kv_heads <<< "$model"
  done
}

check_ranks() {
  local ranks=$((NPROC < query_heads ? NPROC : query_heads))
  while [ $((query_heads % ranks)) -gt 0 ] || [ $((kv_heads % ranks)) -gt 0 -a $((ranks % kv_heads)) -gt 0 ]; do
    ranks=$((ranks - 1))
  done
  [ "$NPROC" -eq "$ranks" ] ||
    refuse "NPROC=$NPROC ranks cannot share the $query_heads heads and $kv_heads KV heads of $MODEL; NPROC=$ranks works"
}

check_gpus() {
  [ "$1" = cpu ] || [ "$gpus" -eq 0 ] || [ "$NPROC" -le "$gpus" ] ||
    refuse "NPROC=$NPROC is more than the $gpus GPUs here; NPROC=$gpus works, or on CPUs, to try it out, --device cpu"
}

take_out() {
  local given=$OUT trouble owner holders
  trouble=$({ mkdir -p -- "$given" && : >> "$given/.lock"; } 2>&1) ||
    refuse "OUT=$given: no files can be made there (${trouble##*: }); OUT=/tmp/${0##*/} works"
  OUT=$(CDPATH='' cd -- "$given" && pwd)
  exec 9>> "$OUT/.lock"
  flock -n 9
  if [ $? -eq 1 ]; then
    exec 9>&-
    owner=$(cat "$OUT/.lock")
    holders=$(find -L /proc/[0-9]*/fd -maxdepth 1 -samefile "$OUT/.lock" 2> /dev/null | cut -d / -f 3 | sort -un | paste -sd ' ')
    [[ -z $holders || " $holders " == *" $owner "* ]] ||
      refuse "OUT=$given is in use by what a killed run (process $owner) has left; kill $holders works, or OUT=$given-2"
    refuse "OUT=$given is in use by a run (process $owner); to end that one works, or OUT=$given-2"
  fi
  echo $$ > "$OUT/.lock"
}

started() {  # their process ids
  MEASURED_BY='' grep -lszxF "MEASURED_BY=$$" /proc/[0-9]*/environ | MEASURED_BY='' cut -d / -f 3
}

end_started() {
  local found kill_at=$((SECONDS + $1)) signal=TERM
  found=$(started)
  while [ -n "$found" ] && [ "$SECONDS" -le $((kill_at + 10)) ]; do
    [ "$SECONDS" -lt "$kill_at" ] || signal=KILL
    [ -z "$signal" ] || kill -s "$signal" $found 2> /dev/null
    signal=''
    sleep 0.2
    found=$(started)
  done
}

within() {
  timeout -k "$2" "$1" "${@:4}" > "$3" 2>&1 &
  { wait $!; } 2> /dev/null             # bash's own line on a killed command
  local code=$?
  end_started 0                         # ranks of a torchrun that had to be killed
  return "$code"
}

stop_on_signals() {
  trap "stopped $1 130 Ctrl-C" INT
  trap "stopped $1 143 SIGTERM" TERM
  trap "stopped $1 129 SIGHUP" HUP
}

stopped() {
  trap '' INT TERM HUP PIPE
  kill $(jobs -p) 2> /dev/null
  end_started "$1"
  echo "${0##*/}: stopped by $3"
  on_stop
  exit "$2"
}
