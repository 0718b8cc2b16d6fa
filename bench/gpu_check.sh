#!/usr/bin/env bash
# Compare every kernel with its reference, then time the copies: in all under 6 minutes.
#
#   bench/gpu_check.sh            figures go to $OUT/transfer_cuda.json ($OUT: the current folder)
#   PYTHON=... bench/gpu_check.sh another interpreter than .venv/bin/python or python3: with torch, triton and the dev extra
#
# Without a CUDA device the kernels run in Triton's interpreter, and the figures are missing, which is said.
set -euo pipefail
out=$(cd "${OUT:-.}" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

interpret=$("$python" -c 'import torch; print(int(not torch.cuda.is_available()))')
if [ "$interpret" = 1 ]; then
  echo "No CUDA device: kernels run in the interpreter."
else
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true
fi
status=0
TRITON_INTERPRET=$interpret timeout 180 "$python" -m pytest -q tests/kernels || status=$?
if [ "$status" != 0 ]; then
  echo "The kernels differ from their references, or could not be compared (exit status $status): no figures." >&2
  exit "$status"
fi
timeout 160 "$python" -m bench.transfer --device cuda --json "$out/transfer_cuda.json"
