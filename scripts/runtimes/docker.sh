#!/usr/bin/env bash
# Install docker of Debian sid with buildx and compose in a folder: docker.sh [FOLDER]
# 15 s and 350 MB. It needs glibc 2.34 and the installed runc; apt's own lists and the installed packages do not change.
# tests/container/test_docker.py starts its daemon; the two plugins also work with an older daemon.
set -euo pipefail
# shellcheck source=scripts/runtimes/prefix.sh
. "$(dirname "$(readlink -f "$0")")/prefix.sh"
to=${1:-$runtimes/docker}
use_sid
cd "$work"
retry sid download docker.io/sid docker-cli/sid docker-buildx/sid docker-compose/sid containerd/sid tini-static/sid
mkdir "$work/to"
for package in "$work"/*.deb; do dpkg -x "$package" "$work/to"; done
cd /
"$work/to/usr/sbin/dockerd" --version
place "$work/to" "$to"
