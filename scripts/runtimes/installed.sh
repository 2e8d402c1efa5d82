# shellcheck shell=bash
# Sourced by the recipes of this folder and by scripts/test_packages.sh: where runtimes are installed, and from what.
# The default is the folder in which the container tests keep their images; `make clean` removes it.
# shellcheck disable=SC2034 # used by the scripts that source this one
runtimes=${HPCDIST_TEST_RUNTIMES:-/var/tmp/hpcdist-tests/runtimes}

# Print a hash of everything that a recipe installs from, apart from packages: stamp NAME
# pyxis is built for one version of Slurm.
stamp() (
  cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" || return
  shopt -s nullglob
  {
    sha256sum "$1.sh" prefix.sh older_glibc.py ../../tests/vendor/"$1"-*.tar.gz
    [ "$1" != pyxis ] || slurmctld -V || true
  } | sha256sum | cut -d' ' -f1
)
