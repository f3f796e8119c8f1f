#!/usr/bin/env bash
# The whole CPU test suite, as its users and CI run it: bash tests/run.sh [pytest arguments]
#   bash tests/run.sh                            everything (GPU tests are left out where there is no GPU)
#   bash tests/run.sh tests/kernels -k rotary    a part
set -euo pipefail
cd "$(dirname "$0")/.."
MORE_REQUIREMENTS=requirements-test.txt
. examples/setup_env.sh
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec "$PYTHON" -m pytest --quiet --durations=15 "${@:-tests}"
