#!/usr/bin/env bash
# What one GPU gives: GPT-2 124M and 350M, eager and compiled, in bf16, against a plain PyTorch loop.
#
#   benchmarks/gpu.sh [FILE] [flags of gpu.py]      FILE, else $OUT/gpu.json, else gpu.json: one JSON object
#
# Without a GPU, or with --tiny, a tiny model shows on the CPU that everything works. PYTHON names the
# interpreter. What is done stands in the file at once, so that a run that is cut off keeps it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-.}/gpu.json
if [[ $# -gt 0 && $1 != -* ]]; then
  out=$1
  shift
fi
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=$here/../.venv/bin/python
  [[ -x $PYTHON ]] || PYTHON=python3
fi
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" "$here/gpu.py" --out="$out" "$@"
