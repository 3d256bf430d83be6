#!/usr/bin/env bash
# Paths on null GPUs that `make test-gpus` does not run: paths.sh OUT [NAME …], by default all, in half an hour. OUT gets
# runs, logs and outputs. A line per path: name, GPUs, exit code, a line of its output, and what compare.py says.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../.." && pwd)
mkdir -p "$1" && cd "$1" && shift
wanted=" $* "
killed=
[[ -d data ]] || "$project/.venv/bin/raytrain-gpt" prepare stdlib --out data > /dev/null

# row NAME GPUS SHOWN FLAGS-OF-COMPARE ARGUMENTS…: run, print the last line of output that matches SHOWN, and compare.
row() {
  local name=$1 gpus=$2 shown=$3 flags=$4
  shift 4
  [[ $wanted = "  " || $wanted = *" $name "* ]] || return 0
  rm -rf "calls/$name" "runs/$name" && mkdir -p "calls/$name"
  NULL_GPUS=$gpus NULL_LOG=$PWD/calls/$name "$here/run.sh" "$@" > "$name.txt" 2>&1
  local code=$?
  printf '%s | %s | exit %s | %s | %s\n' "$name" "$gpus" "$code" "$(grep -E "$shown" "$name.txt" | tail -n 1 | cut -c 1-150)" \
    "$(python3 "$here/compare.py" "calls/$name" $flags $killed 2>&1 | tail -n 1)"
}
# train NAME GPUS FLAGS…, on Ray; torchrun NAME GPUS PROCESSES FLAGS…
short=(--preset=quickstart --data_path=data --max_steps=8 --eval_every_steps=4 --checkpoint_every_steps=4)
end="finished at step|^error"
train() { row "$1" "$2" "$end" "" -m raytrain_gpt.cli train "${short[@]}" --run_name="$1" --num_workers="$2" "${@:3}"; }
torchrun() {
  row "$1" "$2" "$end|error:|Error" "" -m torch.distributed.run --nproc_per_node="$3" "$project/train.py" "${short[@]}" \
    --run_name="$1" --num_workers=0 --min_workers=null "${@:4}"
}
# during NAME ACTION: in the background, when the run has a checkpoint, send SIGNAL to a rank or to the command.
during() {
  rm -rf "runs/$1" "calls/$1"
  [[ $wanted = "  " || $wanted = *" $1 "* ]] || return 0
  (
    until compgen -G "runs/$1/checkpoints/step=*" > /dev/null; do sleep 0.2; done
    case $2 in
    command) kill -INT "$(pgrep -f "raytrain_gpt.cli.*run_name=$1( |$)|distributed.run.*run_name=$1( |$)" | head -n 1)" ;;
    *) kill -"$2" "$(basename "$(grep -l $'INIT.*\trank 1 of' calls/"$1"/*.log | head -n 1)" .log)" ;;
    esac
  ) &
}
long=(--max_steps=3000 --eval_every_steps=3000 --checkpoint_every_steps=50)

train ddp-muon-bf16 2 --precision=bf16
train ddp-muon-fp32 2
train ddp-adamw-gpt2 4 --architecture=gpt2 --optimizer=adamw --micro_batch_sequences=2
train auto-8 8 --num_workers=auto --micro_batch_sequences=auto --activation_checkpointing=auto
train fsdp-8 8 --parallel=fsdp --micro_batch_sequences=1
row fsdp-8-to-4 4 "$end" "" -m raytrain_gpt.cli train --run_name=fsdp-8 --num_workers=4 --min_workers=4 --max_steps=12
train exact-accumulated 2 --exact=true --micro_batch_sequences=4
train compile-ddp 2 --compile=true --precision=bf16
train bf16-gradients 2 --gradient_dtype=bf16 --precision=bf16
train fp16 2 --precision=fp16
train profile 2 --profile_steps=3
train out-of-memory 2 --num_layers=48 --embd_size=1024 --seq_len=1024 --global_batch_tokens=1048576 --micro_batch_sequences=512 --num_samples=0
killed=--killed
during stopped-rank STOP; train stopped-rank 2 "${long[@]}" --hang_timeout_s=40
during stopped-rank-default STOP; train stopped-rank-default 2 "${long[@]}"
killed=
during ctrl-c-ray command; train ctrl-c-ray 2 "${long[@]}" --max_steps=100000 --parallel=fsdp
during ctrl-c-torchrun command; torchrun ctrl-c-torchrun 2 2 "${long[@]}" --max_steps=100000 --parallel=fsdp
torchrun torchrun-ddp 2 2
torchrun torchrun-cpu 2 2 --use_gpu=false
cat > raises.py << 'END'
import os
from raytrain_gpt.extend import schedule


@schedule("raises")
def raises(step, max_steps, settings):
    assert os.environ.get("RANK") != "1" or step < 4, "rank 1 raises"
    return 1.0
END
killed=--killed
torchrun torchrun-rank-raises 2 2 --code=raises.py --schedule=raises
killed=
torchrun torchrun-2-of-8 8 2
torchrun torchrun-4-on-2 2 4
row local-on-8 8 "$end" "" -m raytrain_gpt.cli train "${short[@]}" --run_name=local-on-8 --num_workers=0
for gpus in 2 4 8; do row "doctor-$gpus" "$gpus" "PASS|FAIL" "" -m raytrain_gpt.cli doctor --data_path=data --num_workers="$gpus" --micro_batch_sequences=1; done
row estimate 8 time "" -m raytrain_gpt.cli estimate --preset=gpt2-1.5b --num_workers=8
sweep() {  # NAME GPUS OVERRIDES
  cat > "$1.yaml" << END
sweep_name: $1
base: {preset: quickstart}
overrides: {data_path: data, num_layers: 2, num_samples: 0, cpus_per_worker: 1, $3}
space: {peak_lr: {grid: [2.0e-3, 4.0e-3, 8.0e-3, 1.6e-2]}}
objective: val/loss
budget_tokens: 40960
report_every_tokens: 20480
END
  row "$1" "$2" "at once|best|^error" "" -m raytrain_gpt.cli tune "$1.yaml"
  grep -ho $'CONTEXT\t.*' "calls/$1"/*.log 2> /dev/null | sort | uniq -c
}
sweep tune-4-gpus 4 "num_workers: 1"
sweep tune-half-gpus 2 "num_workers: 1, gpus_per_worker: 0.5"
sweep tune-2-workers 4 "num_workers: 2"
uuid() { printf '%s-%02x020304-0506-0708-090a-0b0c0d0e0f%02x' "$1" "$2" "$2"; }
visible() {  # NAME VALUE WORKERS: four GPUs, of which CUDA_VISIBLE_DEVICES names some
  export CUDA_VISIBLE_DEVICES=$2
  row "$1" 4 "$end" "" -m raytrain_gpt.cli train "${short[@]}" --run_name="$1" --num_workers="$3"
  unset CUDA_VISIBLE_DEVICES
  grep -ho $'CONTEXT\t.*' "calls/$1"/*.log 2> /dev/null | sort | uniq -c
}
visible visible-2-3 2,3 2
visible visible-3-2 3,2 2
visible visible-uuids "$(uuid GPU 1),$(uuid GPU 3)" 2
visible visible-none "" 2
visible visible-minus-1 -1 2
visible visible-0-1-9 0,1,9 auto
visible visible-mig "$(uuid MIG 1),$(uuid MIG 2)" auto
