#!/usr/bin/env bash
# All checks and benchmarks of a GPU machine with one command, in order of worth, in at most 30 minutes:
#
#   PYTHON=python3 bash benchmarks/gpu.sh                  results in gpu-results/, which an interruption keeps
#   bash benchmarks/gpu.sh --device cpu                    rehearsal without a GPU, in small sizes
#   bash benchmarks/gpu.sh --pack .wheels                  on a machine with a network: download what a bare one lacks
#   WHEELS=.wheels bash benchmarks/gpu.sh                  on the GPU machine: use these packages
#   bash benchmarks/gpu.sh --help                          further options; --list shows the stages
#
# Requires a checkout, and torch >= 2.10 with torchvision in $PYTHON. Nothing is installed in it or downloaded. Stages
# whose packages are missing are reported and left out; without mlflow all stages run, because they track nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
# Packages of hpcdist, the trainers and the tests that an image with PyTorch may lack; none of them requires torch.
packages=(omegaconf submitit gymnasium jinja2 rich typer psutil pyzmq nvidia-ml-py py-spy pytest pytest-timeout
  pytest-xdist matplotlib scikit-learn tokenizers)

if [ "${1:-}" = --pack ]; then
  folder=${2:?--pack needs the folder for the packages}
  "$python" -m pip download --quiet --dest "$folder" \
    --python-version "${PYTHON_VERSION:-3.12}" --implementation cp --only-binary=:all: \
    --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 "${packages[@]}"
  # Every image with torchvision has these.
  rm -f "$folder"/numpy-*.whl "$folder"/pillow-*.whl
  du -sh "$folder"
  exit
fi
if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  # Only packages that $python lacks: versions of the installed ones fit to its torch.
  mapfile -t lacking < <("$python" - "$WHEELS" <<'PYTHON'
import importlib.metadata, pathlib, re, sys

def normal(name):
    return re.sub("[-_.]+", "-", name).lower()

installed = {normal(one.metadata["Name"] or "") for one in importlib.metadata.distributions()}
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    if normal(wheel.name.partition("-")[0]) not in installed:
        print(wheel)
PYTHON
  )
  if [ ${#lacking[@]} -gt 0 ]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "${lacking[@]}"
  fi
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH
fi
"$python" benchmarks/gpu_session.py "$@"
