#!/usr/bin/env bash
# What half an hour on a machine with one GPU should tell, unattended; no step takes longer than ten minutes:
#
#     benchmarks/gpu_half_hour.sh [FOLDER] [WHEELS]     make rehearse-gpu goes through it on pretended devices, with small models
#
# What memory goes to besides tensors; the tests that need a GPU; parity with and without TF32 and BatchNorm; compute-sanitizer, where it is;
# one device, op by op and as CUDA graphs, against eager and torch.compile; a memory limit just above what is planned; four parts of the GPU, predicted and measured.
#
# FOLDER (runs/gpu_half_hour) gets a log of every step, reports, and their table gpu.md; in split/ the comparisons. Steps that are done are not
# done again, so the command can be given again after a failure, or a day later. WHEELS is a folder of *.whl for a machine without network,
# where torch, numba and safetensors are: `pip download -d WHEELS pulp highspy networkx msgspec rich pytest hypothesis psutil nvidia-ml-py`.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:-runs/gpu_half_hour}
wheels=${2:-}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$folder"
if [ -n "$wheels" ] && [ ! -e "$folder/site/installed" ]; then
    "$python" -m pip install -q --no-index --no-deps --target "$folder/site" "$wheels"/*.whl && touch "$folder/site/installed" || exit 1
fi
export PYTHONPATH=$PWD:$PWD/runtime:$(cd "$folder" && pwd)/site${PYTHONPATH:+:$PYTHONPATH}
found=$("$python" -c 'import torch; print(torch.cuda.device_count())') || { echo "error: $python has no torch" >&2; exit 1; }
[ "$found" -ge 1 ] || { echo "error: there is no CUDA device here; make rehearse-gpu rehearses" >&2; exit 1; }
command -v nvidia-smi >/dev/null && nvidia-smi > "$folder/nvidia-smi.txt" 2>&1

steps=20 tests="tests/runtime tests/capture" memory=alexnet,gnmt_v2,inception_v3,gpt2 towers="wide_towers inception_v3" exponent=24 sizes=""
declare -A size
if [ -n "${REHEARSE:-}" ]; then
    steps=2 tests=tests/runtime/test_split_gpu.py::test_four_parts_compute_what_one_device_computes
    memory=rnnlm towers=wide_towers exponent=8 sizes="--batch_size=2 --image_size=16"
    words="--vocab_size=60 --max_seq_length=4 --rnn_units=64"
    size=([alexnet]="--batch_size=2 --image_size=63" [gnmt_v2]="--batch_size=4 $words" [rnnlm]="--batch_size=4 $words"
          [wide_towers]="--batch_size=2 --image_size=16")
fi
. benchmarks/resumable.sh

train() { # NAME MODEL FLAGS...: a report in NAME/
    local name=$1 model=$2
    shift 2
    # shellcheck disable=SC2086
    run "$name" "$python" -m baechi_ext train --model_name="$model" ${size[$model]:-} --placement_method=contiguous --num_steps="$steps" \
        --out="$folder/$name" "$@"
}

limit=300 run kernels "$python" -m baechi_ext.place.kernels &
limit=240 run memory "$python" -m benchmarks.gpu_memory --model_names="$memory" --out="$folder/memory" # nothing else is on the GPU yet
wait

# Nothing here is timed, so it runs together.
several=$("$python" -c 'import xdist' 2>/dev/null && echo "-n 4 -p no:benchmark") # pytest-benchmark warns of xdist
# shellcheck disable=SC2086
limit=300 run gpu_tests "$python" -m pytest -q -m gpu -p no:cacheprovider --durations=5 $several $tests &
for tf32 in 0 1; do
    for model in wide_towers rnnlm; do # with BatchNorm, and without
        limit=120 NVIDIA_TF32_OVERRIDE=$tf32 train "parity_${model}_tf32_$tf32" "$model" --split_gpu=2 &
    done
done
command -v compute-sanitizer >/dev/null && limit=150 run sanitizer compute-sanitizer --tool=memcheck --error-exitcode=9 \
    "$python" -m pytest -q -m gpu -p no:cacheprovider tests/runtime/test_cuda_graphs.py -k "branches and sgd" &
wait

for model in alexnet gnmt_v2 rnnlm; do
    limit=60 train "one_$model" "$model" --num_gpus=1 --no_cuda_graphs
    limit=60 train "one_${model}_graphs" "$model" --num_gpus=1
done
tight=$("$python" -m benchmarks.gpu_table --tight=1.1 "$folder/one_alexnet") && limit=60 train tight alexnet --num_gpus=1 --no_cuda_graphs --device_memory="$tight"
for model in gpt2 wide_towers; do # beside the unplaced step under torch.compile, which needs a real GPU
    [ -n "${REHEARSE:-}" ] || limit=150 train "compiled_$model" "$model" --num_gpus=1 --compile
done
[ -n "${REHEARSE:-}" ] || limit=400 run loop "$python" -m benchmarks.gpu_loop --out="$folder/loop" # a user's own, which compiles, too
limit=560 run split env DEVICES=split PYTHON="$python" MODELS="$towers" METHODS=contiguous,m_etf STEPS="$steps" \
    LIMIT=120 EXPONENT="$exponent" SIZES="$sizes" benchmarks/run_4gpu.sh "$folder/split"

"$python" -m benchmarks.gpu_table "$folder" > "$folder/gpu.md" && echo "the table: $folder/gpu.md"
end
