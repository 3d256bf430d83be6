#!/usr/bin/env bash
# Count what the product does on a GPU that is not there: run.sh [cases of check.py], or run.sh -- PROGRAM [ARGS],
# which runs a Python program on it. The first call downloads torch's CUDA build (2 GB, 5.5 GB on disk) and the
# product's other packages into a virtual environment of its own, in $NULL_GPU_DIR (default: .null_gpu). It needs g++
# and takes 10 to 15 minutes, and then 5 to 10.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../.." && pwd)
directory=${NULL_GPU_DIR:-$project/.null_gpu}
mkdir -p "$directory/tmp"
directory=$(cd "$directory" && pwd)
if [[ ! -e $directory/venv/installed ]]; then
  version=$(sed -n 's/^torch==//p' "$project/constraints.txt")
  python3 -m venv "$directory/venv"
  "$directory/venv/bin/pip" install -q "torch===$version"  # three =: PyPI's build, not a local one for CPUs
  "$directory/venv/bin/pip" install -q -c "$project/constraints.txt" "$project"
  "$directory/venv/bin/pip" uninstall -q -y raytrain-gpt  # the working tree's is used
  touch "$directory/venv/installed"
fi
"$here/build.sh" "$directory/venv" "$directory/library"
library=$directory/library
export NULL_GPU=$library/libcuda.so.1 LD_PRELOAD=$library/libcuda.so.1 TRITON_LIBCUDA_PATH=$library
export LD_LIBRARY_PATH=$library${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export TMPDIR=$directory/tmp TORCHINDUCTOR_CACHE_DIR=$directory/inductor TRITON_CACHE_DIR=$directory/triton
export PYTHONPATH=$project PYTHONDONTWRITEBYTECODE=1 TORCHINDUCTOR_COMPILE_THREADS=1
[[ ${1:-} != -- ]] || { shift; exec "$directory/venv/bin/python" "$@"; }
exec "$directory/venv/bin/python" "$here/check.py" "$@"
