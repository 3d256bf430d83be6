#!/usr/bin/env bash
# Build the null GPU: build.sh PACKAGES OUT. PACKAGES has torch's CUDA build; OUT gets libcuda.so.1.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
packages=$(cd "$1" && pwd)
mkdir -p "$2"
cd "$2"
g++ -O1 -fPIC -std=c++17 -w -I"$packages"/nvidia/cu13/include -I"$packages/triton/backends/nvidia/include" \
  -c "$here/null_cuda.cpp" -o written.o
nm written.o | awk '$2 == "T" { print $3 }' | sort -u > written.txt
# What torch's libraries import, Triton's driver looks up, and torch looks up by name.
{
  for library in libtorch_cuda libc10_cuda libtorch_python libtorch_cuda_linalg libcaffe2_nvrtc; do
    nm -D --undefined-only "$packages/torch/lib/$library.so" | awk '{ print $2 }' | sed 's/@.*//' |
      grep -E '^(__cuda|cuda|cublas|cudnn|nccl|cu[A-Z])' || true
  done
  grep -oE '\bcu[A-Z][A-Za-z0-9]+\b' "$packages/triton/backends/nvidia/driver.c" | grep -v '_t$'
  strings -a "$packages"/torch/lib/lib{c10,torch}_cuda.so |
    grep -E '^cu(Init|Mem|Device|Stream|Get|Ctx|Multi|Launch|Tensor|Kernel|Func|Module|Library|Event|Green)[A-Za-z_0-9]*$'
  strings -a "$packages/torch/lib/libc10_cuda.so" | grep -E '^nvml[A-Z][A-Za-z_0-9]*$'
  echo cuInit
} | grep -vE '^(cuFile|cusolver|cusparse|cufft|curand|cuGetProc)' | sort -u > wanted.txt
comm -23 wanted.txt written.txt | sed 's/.*/int &() { return 0; }/' > others.c
gcc -O1 -fPIC -w -c others.c -o others.o
g++ -shared -o libcuda.so.1 written.o others.o -ldl -Wl,-soname,libcuda.so.1
ln -sf libcuda.so.1 libcuda.so
ln -sf libcuda.so.1 libnvidia-ml.so.1 # torch opens it for segments that grow
