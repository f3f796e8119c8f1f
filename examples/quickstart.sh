#!/usr/bin/env bash
# From nothing to a Llama that trains on long real documents with UPipe context parallelism, in a few minutes on 2 CPU cores.
#   bash examples/quickstart.sh                                the whole way; further arguments go to pretrain_llama.py
#   bash examples/quickstart.sh --train-iters 200              longer
#   OUT=/somewhere NPROC=4 bash examples/quickstart.sh --context-parallel-size 4
# The text is the Python standard library's own source code. Everything is written below OUT (default quickstart-output); a second run
# starts training anew, puts the checkpoints of the one before aside, and makes again only what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-quickstart-output}
. examples/setup_env.sh

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
NPROC=${NPROC:-$((gpus > 1 ? 2 : gpus == 1 ? 1 : 2))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$OUT"

say() { printf '\n== %s\n' "$*"; }

say "1/4  corpus: the standard library's sources, one document a file"
[ -s "$OUT/stdlib.jsonl" ] || "$PYTHON" tools/build_stdlib_corpus.py --output "$OUT/stdlib.jsonl"

say "2/4  tokenizer: SentencePiece, 4,096 pieces"
[ -s "$OUT/tokenizer.model" ] ||
  "$PYTHON" tools/train_tokenizer.py --input "$OUT/stdlib.jsonl" --output-prefix "$OUT/tokenizer" --vocab-size 4096

say "3/4  tokens: $OUT/stdlib.bin and .idx"
[ -s "$OUT/stdlib.idx" ] ||
  "$PYTHON" tools/preprocess_data.py --input "$OUT/stdlib.jsonl" --output-prefix "$OUT/stdlib" \
    --tokenizer-type SentencePiece --tokenizer-model "$OUT/tokenizer.model" --append-eod --workers 2

say "4/4  training on $NPROC ranks"
case " $* " in
  *" --load "* | *" --load="*) ;;  # goes on from there
  *) [ ! -d "$OUT/checkpoints" ] || { rm -rf "$OUT/checkpoints.before" && mv "$OUT/checkpoints" "$OUT/checkpoints.before"; } ;;
esac
case " $* " in
  *" --train-iters"*) warmup=() ;;  # may be fewer than the warmup's
  *) warmup=(--lr-warmup-iters 5) ;;
esac
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" pretrain_llama.py \
  --model llama-tiny --seq-length 8192 --context-parallel-size "$NPROC" --cp-comm-type upipe \
  --data-path "$OUT/stdlib" --split 100,0,0 --tokenizer-type SentencePiece --tokenizer-model "$OUT/tokenizer.model" \
  --train-iters 40 --lr 2e-3 --min-lr 2e-4 ${warmup[@]+"${warmup[@]}"} \
  --save "$OUT/checkpoints" --tensorboard-dir "$OUT/tensorboard" --log-jsonl "$OUT/log.jsonl" "$@"
"$PYTHON" tools/plot_loss.py "$OUT/log.jsonl" --output "$OUT/loss.png"

cat <<TEXT

Made in $OUT:
  loss.png                   the loss curve, from log.jsonl (one object a step)
  tensorboard/               tensorboard --logdir $OUT/tensorboard
  checkpoints/               the model and optimizer after the last step
  stdlib.bin, stdlib.idx     the tokens, in Megatron's format
  tokenizer.model            SentencePiece

What to try next (. examples/setup_env.sh gives you \$PYTHON):
  a longer run that goes on from here      bash examples/quickstart.sh --load $OUT/checkpoints --train-iters 80
  Ulysses instead of UPipe                 bash examples/quickstart.sh --cp-comm-type a2a
  your own text                            \$PYTHON tools/preprocess_data.py --help
  every flag                               \$PYTHON pretrain_llama.py --help
  a node of 8 GPUs                         examples/pretrain_llama3_8b_8gpu.sh
TEXT
