#!/usr/bin/env bash
# Everything that needs a GPU, in under 8 minutes, what would stop the rest first:
#   1. every kernel beside its reference          tests/kernels                      180 s at most
#   2. prompts through all tiers, to the bit      python -m bench.gpu_life           120 s
#   3. copies and compute, timed                  python -m bench.transfer           160 s
#
#   bench/gpu_check.sh            figures go to $OUT/transfer_cuda.json, and as the section "On a GPU" of
#                                 docs/measurements.md to $OUT/measurements_gpu.md ($OUT: the current folder)
#   PYTHON=... bench/gpu_check.sh another interpreter than .venv/bin/python or python3: with torch, triton and the dev extra
#
# Without a CUDA device the kernels run in Triton's interpreter, and it ends there, with exit status 3.
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
if [ "$interpret" = 1 ]; then
  echo "The kernels equal their references in the interpreter. What comes next needs a GPU, and torch sees none: run this" \
    "where nvidia-smi shows one and torch is a build for CUDA ($("$python" -c 'import torch; print(torch.__version__)') here)." >&2
  exit 3
fi
timeout 120 "$python" -m bench.gpu_life --device cuda
timeout 160 "$python" -m bench.transfer --device cuda --json "$out/transfer_cuda.json"
"$python" -m bench.gpu_report "$out/transfer_cuda.json" | tee "$out/measurements_gpu.md"
