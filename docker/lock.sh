#!/usr/bin/env bash
# Pin every package of the images, and of a checkout (scripts/install.sh), with hashes, for Python 3.11 and newer:
# docker/lock.sh [uv's options]
# With --upgrade the newest versions are used; without it, pins are kept unless pyproject.toml requires newer ones.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-uv}
lock() {
  UV_CUSTOM_COMPILE_COMMAND='make lock' "$uv" pip compile --no-config --quiet --universal --python-version 3.11 \
    --generate-hashes --no-annotate "${@:2}" --output-file "docker/$1"
}
lock requirements.txt pyproject.toml --extra train "$@"
lock requirements-dev.txt pyproject.toml --extra train --extra dev --extra docs "$@"
lock requirements-build.txt docker/requirements-build.in "$@"
lock requirements-mlflow.txt docker/requirements-mlflow.in "$@"
lock requirements-sbom.txt docker/requirements-sbom.in "$@"
lock requirements-slow.txt docker/requirements-slow.in --no-deps "$@"
