#!/usr/bin/env bash
# Run a Python program on GPUs that are not there, with the packages of .venv: run.sh PROGRAM [ARGS]. Without a program,
# only install what it needs: torch's CUDA build (2 GB of downloads, 5 GB on disk) in $NULL_GPU_DIR, which stays from
# clone to clone, and the null GPU in build/null_gpu. Needs g++. Exit code 3: the build cannot be downloaded.
#   NULL_GPUS  number of GPUs; default 1
#   NULL_LOG   directory for one log per process; with it, NCCL's ranks wait for each other instead of being pretended
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../.." && pwd)
python=$project/.venv/bin/python
version=$(sed -n 's/^torch==//p' "$project/constraints.txt")
tag=$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
torch=${NULL_GPU_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/raytrain-gpt}/torch-$version-cuda-$tag
library=$project/build/null_gpu
if [[ ! -d $torch ]]; then
  # Three =: PyPI's build, not a local one for CPUs.
  "$python" -m pip install -q --no-compile --upgrade --target "$torch.unfinished" -c "$project/constraints.txt" \
    "torch===$version" || exit 3
  mv "$torch.unfinished" "$torch"
fi
if [[ ! $library/libcuda.so -nt $here/null_cuda.cpp ]]; then
  "$here/build.sh" "$torch" "$library"
fi
[[ $# -gt 0 ]] || exit 0
export LD_PRELOAD=$library/libcuda.so.1 TRITON_LIBCUDA_PATH=$library NULL_GPU=$library/libcuda.so.1
export LD_LIBRARY_PATH=$library${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export TORCHINDUCTOR_CACHE_DIR=$library/inductor TRITON_CACHE_DIR=$library/triton
export PYTHONPATH=$torch:$here/site:$project TORCHINDUCTOR_COMPILE_THREADS=1
unset PYTHONDONTWRITEBYTECODE  # else every process compiles torch's modules
exec "$python" "$@"
