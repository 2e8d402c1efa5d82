#!/usr/bin/env bash
# Install the packages of the browser, Slurm, container and storage tests: test_packages.sh [RUNTIME …]
# Without permission, these tests are skipped. RUNTIME names further recipes of scripts/runtimes.
set -euo pipefail
# Chromium for MLflow's pages; Slurm with accounting; iproute2 and nftables for virtual nodes and their ports; podman
# and debootstrap for images; PostgreSQL for the tracking server; compilers for the library that injects
# faults into file operations and for the simulated GPUs; docker; strace for a benchmark; and what apptainer,
# enroot and pyxis need, which scripts/runtimes installs.
packages=(git gcc g++ libc6-dev chromium slurmctld slurmd slurmdbd slurm-client munge mariadb-server iproute2 nftables
  podman runc debootstrap debian-archive-keyring postgresql docker.io make jq strace squashfs-tools squashfuse)

# Test sessions of several checkouts may begin at the same time.
if [ "$(id -u)" = 0 ]; then
  exec {lock}>/run/hpcdist-test-packages.lock
  flock "$lock"
fi

# Install the container runtimes that Debian 12 does not package, and those named, if they are missing or if their recipe or
# archive has changed.
install_runtimes() {
  local recipes name
  recipes=$(dirname "$(readlink -f "$0")")/runtimes
  [ "$(id -u)" = 0 ] || return 0
  # shellcheck source=scripts/runtimes/installed.sh
  . "$recipes/installed.sh"
  for name in apptainer enroot pyxis "$@"; do
    [ "$(stamp "$name")" = "$(cat "$runtimes/$name.stamp" 2>/dev/null)" ] && continue
    bash "$recipes/$name.sh" || echo "the tests of $name will be skipped: scripts/runtimes/$name.sh failed" >&2
  done
}

missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null)" = "ii " ] || missing+=("$package")
done
if [ ${#missing[@]} = 0 ]; then
  install_runtimes "$@"
  exit
fi

if [ "$(id -u)" = 0 ]; then sudo=(); else sudo=(sudo -n); fi
if ! command -v apt-get >/dev/null || ! "${sudo[@]}" true 2>/dev/null; then
  echo "some tests will be skipped; to enable them: sudo apt-get install ${missing[*]}" >&2
  exit 0
fi

echo "installing for the tests: ${missing[*]}" >&2
# Debian starts the services of new packages; the tests start their own services instead.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' | "${sudo[@]}" tee "$policy" >/dev/null
  "${sudo[@]}" chmod 755 "$policy"
  trap '"${sudo[@]}" rm -f "$policy"' EXIT
fi
for pause in 5 20 0; do # downloads can fail temporarily
  "${sudo[@]}" apt-get update -q &&
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}" && {
    install_runtimes "$@"
    exit 0
  }
  [ "$pause" = 0 ] || sleep "$pause"
done
exit 1
