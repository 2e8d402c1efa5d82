#!/usr/bin/env bash
# Install docker of Debian sid with buildx and compose in a folder: docker.sh [FOLDER]
# 15 s and 350 MB. It needs glibc 2.34 and the installed runc; apt's own lists and the installed packages do not change.
# tests/support/docker_box.py starts its daemon; the two plugins also work with an older daemon.
set -euo pipefail
# shellcheck source=scripts/runtimes/prefix.sh
. "$(dirname "$(readlink -f "$0")")/prefix.sh"
to=${1:-$runtimes/docker}
mirror=$(sed -n 's/^URIs: \(.*\/debian\)$/\1/p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -1)
[ -n "$mirror" ] || {
  echo "docker.sh: no Debian mirror in /etc/apt/sources.list.d/debian.sources" >&2
  exit 1
}

mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" >"$work/sources.list"
sid() {
  apt-get -q -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root \
    -o Acquire::Check-Valid-Until=false -o Acquire::Languages=none "$@"
}
retry sid update >/dev/null
cd "$work"
retry sid download docker.io/sid docker-cli/sid docker-buildx/sid docker-compose/sid containerd/sid tini-static/sid
mkdir "$work/to"
for package in "$work"/*.deb; do dpkg -x "$package" "$work/to"; done
cd /
"$work/to/usr/sbin/dockerd" --version
place "$work/to" "$to"
