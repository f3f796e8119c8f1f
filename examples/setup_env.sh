# Sourced by the quickstart and the tests: a Python with what requirements.txt lists, CPU or GPU.
# An active virtual environment (or conda environment) is used as it is; otherwise .venv is made beside README.md.
# Leaves $PYTHON set and the environment's own commands (python, torchrun) first in PATH. Reads
#   PYTHON_FOR_VENV      the interpreter that .venv is made from (default python3, 3.10 or newer)
#   MORE_REQUIREMENTS    a further file beside requirements.txt, such as requirements-test.txt
# and no arguments: a sourced file sees those of the script that sources it, which are flags of something else.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [ -n "${VIRTUAL_ENV:-}" ]; then
  PYTHON=$VIRTUAL_ENV/bin/python
elif [ -n "${CONDA_PREFIX:-}" ]; then
  PYTHON=$CONDA_PREFIX/bin/python
else
  if [ ! -x "$root/.venv/bin/python" ]; then
    echo "making $root/.venv"
    "${PYTHON_FOR_VENV:-python3}" -m venv "$root/.venv" || return 1
  fi
  PYTHON=$root/.venv/bin/python
fi

# A pip that is asked for plain torch fetches gigabytes of CUDA libraries, also where there is no GPU. So torch comes first,
# and one that is there already is kept.
if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
  echo "installing torch (a minute or more)"
  if command -v nvidia-smi >/dev/null 2>&1; then
    "$PYTHON" -m pip install --quiet "torch>=2.11,<2.15" || return 1
  else
    "$PYTHON" -m pip install --quiet "torch==${TORCH_VERSION:-2.13.0}" || return 1
  fi
fi

# The stamp makes a second run start at once. The project itself is installed in place, so that the tools find it from any folder;
# PYTHONPATH says which checkout where an environment serves several.
more=${MORE_REQUIREMENTS:-}
stamp=$("$PYTHON" -c 'import sys; print(sys.prefix)')/.megacp-requirements${more:+-$more}
wanted=$(cat "$root/requirements.txt" ${more:+"$root/$more"} | cksum)" $root"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "installing requirements.txt $more"
  "$PYTHON" -m pip install --quiet --requirement "$root/requirements.txt" ${more:+--requirement "$root/$more"} || return 1
  "$PYTHON" -m pip install --quiet --no-deps --editable "$root" || return 1
  echo "$wanted" > "$stamp"
fi
export PYTHON PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PATH="$(dirname "$PYTHON"):$PATH"
