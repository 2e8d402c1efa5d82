#!/usr/bin/env bash
# All GPU benchmarks with one command:    bash benchmarks/gpu.sh [SMOKE OPTIONS]
#
#   PYTHON=python3 bash benchmarks/gpu.sh                                  one rank per GPU
#   bash benchmarks/gpu.sh --device cpu --image-size 64 --steps 6          smoke test without a GPU
#
# Requires torch >= 2.10 and torchvision in $PYTHON and a checkout; nothing is installed or downloaded. Without psutil
# there are no system metrics, without mlflow no exported model; the benchmarks report this, and the results stay valid.
# The last lines compare the results with their targets. The exit status is 0 if all benchmarks ran.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

device=cuda
stall=()
step=("$@")
for ((i = 1; i <= $#; i++)); do
    if [ "${!i}" = --device ]; then
        j=$((i + 1))
        device=${!j}
    fi
done
if [ "$device" = cpu ]; then
    step=(--model resnet18 --batch-size 4 --rounds 1 --no-compile "$@")
    stall=(--megabytes 20 --rounds 2)
fi

echo "== images per second over a bare loop"
"$python" benchmarks/gpu_step.py "${step[@]}" --json | tee "$out/step"
echo
echo "== waits for the device"
"$python" benchmarks/gpu_step.py "${step[@]}" --check-sync --json | tee "$out/sync"
echo
echo "== checkpoint stall, pinned buffers"
"$python" benchmarks/checkpoint_stall.py --device "$device" "${stall[@]}" --json | tee "$out/stall"
echo
"$python" - "$out" <<'PYTHON'
import json, pathlib, sys

step, sync, stall = (
    json.loads(pathlib.Path(sys.argv[1], name).read_text().splitlines()[-1]) for name in ("step", "sync", "stall")
)
print("| figure | measured | target |")
print("|---|---|---|")
print(f"| images/s, hpcdist over bare loop | {step['over_bare']:.3f} | >= 0.99 |")
print(f"| checkpoint stall over torch.save | {stall['over_torch_save']['ours']:.3f} | <= 0.25 |")
print(f"| waits for the device in steps, without logging and checkpoints | {sync['syncs_in_steps']} | 0 |")
PYTHON
