#!/usr/bin/env bash
# Run the Slurm tests with the Slurm of another release of Debian, and the Python of this checkout's .venv:
#
#   slurm_suite.sh SUITE [COMMAND…]    SUITE is trixie or sid; the command is `pytest tests/slurm -m 'not faults'` by default
#
# The packages of the release are in a folder of their own (1 GB, removed by `make clean`). The command runs in that
# folder with its own mounts, network, processes and host name, so that nothing of this machine changes.
set -euo pipefail
suite=${1:?usage: slurm_suite.sh trixie|sid [COMMAND…]}
shift
case $suite in trixie | sid) ;; *) echo "slurm_suite.sh: the suite is trixie or sid, got $suite" >&2 && exit 2 ;; esac
cd "$(dirname "$0")/.."
checkout=$PWD
python=$checkout/.venv/bin/python
root=/var/tmp/hpcdist-tests/slurm-$suite

fail() {
  echo "slurm_suite.sh: $*" >&2
  exit 2
}
[ "$(id -u)" = 0 ] || fail "needs root, to create namespaces and to install packages in $root"
command -v debootstrap >/dev/null || fail "debootstrap not found: apt-get install debootstrap"
[ -x "$python" ] || fail "$python not found: make install"
prefix=$("$python" -c 'import sys; print(sys.base_prefix)')
[ "$prefix" != /usr ] || fail "$python belongs to this machine's /usr, which the release replaces: make .venv with" \
  "another Python, for example: make clean install PYTHON=\$(uv python find 3.11)"

keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e $keyring ] || fail "$keyring not found: apt-get install debian-archive-keyring"
# The mirror of this machine; without one, the default of debootstrap.
# shellcheck disable=SC2016 # apt replaces the words
mirror=$(apt-get indextargets --format '$(REPO_URI) $(LABEL)' 'Created-By: Packages' | sed -n 's/ Debian$//p' | head -1)

make_root() {
  local new=$root.new packages
  packages=$("$python" -c 'from hpcdist.devcluster.settings import PACKAGES; print(*PACKAGES)')
  mkdir -p "${root%/*}"
  rm -rf --one-file-system "$new"
  unshare --mount debootstrap --variant=minbase --keyring=$keyring --include=ca-certificates "$suite" "$new" "$mirror"
  printf '#!/bin/sh\nexit 101\n' >"$new/usr/sbin/policy-rc.d"
  chmod 755 "$new/usr/sbin/policy-rc.d"
  # A mirror may keep an older state of sid.
  echo 'Acquire::Check-Valid-Until "false";' >"$new/etc/apt/apt.conf.d/99-older-mirror"
  # shellcheck disable=SC2016,SC2086 # the inner shell replaces the words; the packages are separate words
  unshare --mount sh -c 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"' "$new" \
    env DEBIAN_FRONTEND=noninteractive sh -c '
      apt-get -q update && apt-get -q install -y --no-install-recommends "$@" && apt-get clean' sh \
    $packages python3-venv procps util-linux hostname git nftables
  mv "$new" "$root"
}
[ -e "$root" ] || make_root

[ $# -gt 0 ] || set -- "$python" -m pytest tests/slurm -m "not faults"
export root checkout prefix data=${HPCDIST_DATA_DIR:-}
# shellcheck disable=SC2016 # the inner shell replaces the words
exec unshare --net --pid --ipc --uts --mount --propagation=private --fork --kill-child bash -c '
  set -eu
  ip link set lo up
  mount --bind "$root" "$root" # as its own mount, so that its propagation can change
  bind() { mkdir -p "$root$1" && mount --rbind "$1" "$root$1"; }
  mount -t proc proc "$root/proc"
  # A sysfs shows the network of the process that mounted it. The mounts of cgroups below it stay.
  mount -t sysfs sysfs "$root/sys"
  for folder in /sys/fs/cgroup /dev /tmp "$prefix" "$checkout" ${data:+"$data"}; do bind "$folder"; done
  printf "127.0.0.1 localhost\n127.0.1.1 %s\n" "$(hostname)" >"$root/etc/hosts"
  cd "$root"
  pivot_root . . # chroot would not suffice: programs in it can see the mounts of this machine
  umount -l .
  cd "$checkout"
  . /etc/os-release
  echo "$PRETTY_NAME, $(slurmctld -V)"
  # Not exec: this shell is process 1 and collects orphans.
  "$@"
  code=$?
  exit $code' slurm_suite "$@"
