#!/usr/bin/env bash
# Measure one GPU: GPT-2 in bf16 with its preset's micro-batches. Three commands, each taking minutes:
#
#   benchmarks/gpu.sh 124m [flags of gpu.py]     the training loop against a plain PyTorch loop
#   benchmarks/gpu.sh 350m [flags of gpu.py]     the same for the larger model
#   benchmarks/gpu.sh run  [flags of gpu.py]     124M by `raytrain-gpt train`, with Ray and a dataset
#
# Each writes one JSON object after every case, so that an interrupted command keeps its results. The file is
# $OUT/gpu-124m.json and so on, or in the current directory if OUT is unset. Without a GPU, or with --tiny, a
# tiny model on the CPU checks that everything works. PYTHON sets the interpreter.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=$here/../.venv/bin/python
  [[ -x $PYTHON ]] || PYTHON=python3
fi
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" "$here/gpu.py" "$@"
