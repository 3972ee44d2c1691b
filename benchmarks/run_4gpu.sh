#!/usr/bin/env bash
# `baechi compare` of the built-in models on four devices, unattended:
#
#     benchmarks/run_4gpu.sh [FOLDER]          four GPUs: streams, streams with CUDA graphs, and a process each over NCCL
#     DEVICES=split benchmarks/run_4gpu.sh     four parts of one GPU, without and with CUDA graphs
#     DEVICES=cpu benchmarks/run_4gpu.sh       four CPU workers, threads and processes: the rehearsal
#
# FOLDER (runs/4gpu_DEVICES) gets the measured links, a run folder of each comparison, and a log of it, which ends with the table. Runs that
# are done are not done again, so the command can be given again after a failure. One that fails or takes longer than LIMIT does not stop the
# others; the exit code is 1 then.
#
# MODELS and METHODS choose what is run, STEPS how often, SIZES other sizes (SIZES="--batch_size=2 --image_size=16"), PYTHON the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
devices=${DEVICES:-gpu}
folder=${1:-runs/4gpu_$devices}
python=${PYTHON:-.venv/bin/python}
models=${MODELS:-wide_towers inception_v3 gnmt_v2 nasnet transformer gpt2 resnet101 alexnet rnnlm}
methods=${METHODS:-contiguous,m_topo,m_etf,m_sct,auto}
steps=${STEPS:-30}
limit=${LIMIT:-3600}
declare -A size=([inception_v3]="--batch_size=8 --image_size=149" [nasnet]="--batch_size=8" [transformer]="--batch_size=4"
    [resnet101]="--batch_size=4 --image_size=128" [alexnet]="--batch_size=8"
    [gnmt_v2]="--batch_size=16 --vocab_size=2000 --max_seq_length=20 --rnn_units=256 --num_layers=4")

case $devices in
    gpu) kinds=("--num_gpus=4" "--num_gpus=4 --no_cuda_graphs" "--num_gpus=4 --workers=process") ;;
    split) kinds=("--split_gpu=4" "--split_gpu=4 --no_cuda_graphs") ;;
    cpu) kinds=("--num_devices=4" "--num_devices=4 --workers=process") ;;
    *) echo "error: DEVICES is $devices; give gpu, split or cpu" >&2; exit 2 ;;
esac
case $devices in cpu) most=0 ;; split) most=1 ;; *) most=4 ;; esac
found=$("$python" -c 'import torch; print(torch.cuda.device_count())') || { echo "error: $python has no torch; make .venv/installed" >&2; exit 1; }
[ "$found" -ge "$most" ] || { echo "error: DEVICES=$devices needs $most CUDA devices and this machine has $found; DEVICES=cpu rehearses" >&2; exit 1; }
mkdir -p "$folder"
command -v nvidia-smi >/dev/null && { nvidia-smi; nvidia-smi topo -m; } > "$folder/nvidia-smi.txt" 2>&1

. benchmarks/resumable.sh

set -f
for kind in "${kinds[@]}"; do
    name=$(echo "$kind" | tr -d '-' | tr ' =' '_' | tr -d '\n')
    links=${kind/ --no_cuda_graphs/}
    [ "$links" = "$kind" ] && run "links_$name" "$python" -m baechi_ext probe-links $kind --max_exponent="${EXPONENT:-26}" \
        --out="$folder/cluster_$name.json" --samples="$folder/links_$name.json"
    for model in $models; do
        run "compare_${model}_$name" "$python" -m baechi_ext compare --model_name="$model" $kind ${size[$model]:-} ${SIZES:-} \
            --batch_norm=per_part --placement_methods="$methods" --time_limit=60 --num_steps="$steps" --out="$folder/compare_${model}_$name"
    done
done
set +f
end
