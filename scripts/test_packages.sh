#!/usr/bin/env bash
# Install what the browser, Slurm, container and storage tests need, where this user may; elsewhere they are skipped and say so.
set -euo pipefail
# Chromium looks at MLflow's pages; then a Slurm with accounting, and what makes virtual nodes and closes their ports;
# then what builds and runs images, a base for them included, and the database of the tracking server's; and a
# compiler for the library that injects faults into file operations.
packages=(git gcc libc6-dev chromium slurmctld slurmd slurmdbd slurm-client munge mariadb-server iproute2 nftables
  podman runc debootstrap debian-archive-keyring charliecloud postgresql)

missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null)" = "ii " ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" = 0 ]; then sudo=(); else sudo=(sudo -n); fi
if ! command -v apt-get >/dev/null || ! "${sudo[@]}" true 2>/dev/null; then
  echo "some tests will be skipped; to enable them: sudo apt-get install ${missing[*]}" >&2
  exit 0
fi

echo "installing for the tests: ${missing[*]}" >&2
# Debian starts a service when its package comes in; the tests bring up their own, and only while they run.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' | "${sudo[@]}" tee "$policy" >/dev/null
  "${sudo[@]}" chmod 755 "$policy"
  trap '"${sudo[@]}" rm -f "$policy"' EXIT
fi
for pause in 5 20 0; do # networks hiccup
  "${sudo[@]}" apt-get update -q &&
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}" && exit 0
  [ "$pause" = 0 ] || sleep "$pause"
done
exit 1
