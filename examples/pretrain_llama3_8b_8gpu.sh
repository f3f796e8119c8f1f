#!/usr/bin/env bash
# Llama3-8B on one node of 8 GPUs, a million tokens a sequence, UPipe context parallelism over all 8.
#   DATA=/data/books TOKENIZER=/models/llama3/tokenizer.json bash examples/pretrain_llama3_8b_8gpu.sh
#   … --train-iters 10                 any flag of pretrain_llama.py can be added or overridden
#   LAUNCHER=python WORLD_SIZE=8 DATA=… TOKENIZER=… bash examples/pretrain_llama3_8b_8gpu.sh --dry-run      check it without GPUs
set -euo pipefail
cd "$(dirname "$0")/.."

DATA=${DATA:?the prefix of a .bin/.idx pair made by tools/preprocess_data.py}
TOKENIZER=${TOKENIZER:?the tokenizer.json that the data was made with}
OUT=${OUT:-runs/llama3-8b-1m}
LAUNCHER=${LAUNCHER:-torchrun --standalone --nproc-per-node 8}

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=900   # seconds that a step and its save have after SIGTERM or Ctrl-C; torchrun's own 30 kill both
export CUDA_DEVICE_MAX_CONNECTIONS=8    # copies, collectives and compute queue separately
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

PARALLEL=(
  --context-parallel-size 8
  --cp-comm-type upipe
  --upipe-heads-per-stage 8             # 4 stages of 8 query heads: the least memory
)
MODEL=(
  --model llama3-8b
  --rotary-base 50000000                # slow the rotary positions for a context far beyond 8,192
  --max-position-embeddings 1048576
)
TRAINING=(
  --seq-length 1048576
  --global-batch-size 4                 # 4 M tokens a step, 4 micro-batches accumulated
  --train-iters 1000
  --lr 2e-5 --min-lr 2e-6 --lr-warmup-iters 20 --lr-decay-style cosine
  --weight-decay 0.1 --clip-grad 1.0
  --bf16
)
INPUT=(
  --data-path "$DATA"
  --tokenizer-type HuggingFace --tokenizer-model "$TOKENIZER"
  --attention-mask document
)
OUTPUT=(
  --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval 10 --ckpt-keep 3
  --tensorboard-dir "$OUT/tensorboard" --log-jsonl "$OUT/log.jsonl"
)

exec $LAUNCHER pretrain_llama.py "${PARALLEL[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${INPUT[@]}" "${OUTPUT[@]}" "$@"
