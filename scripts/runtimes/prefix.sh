# shellcheck shell=bash
# Sourced by the other scripts of this folder: where they install, and `retry`.
# The default is the folder in which the container tests keep their images; `make clean` removes it.
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# Resolved before a script changes the folder.
recipe=$(readlink -f "$0")
# shellcheck disable=SC2034 # used by the scripts that source this one
vendor=$here/../../tests/vendor
runtimes=${HPCDIST_TEST_RUNTIMES:-/var/tmp/hpcdist-tests/runtimes}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$runtimes"
chmod 755 "$runtimes" "$work"

# Run a command up to three times: downloads can fail temporarily.
retry() {
  for pause in 5 20 0; do
    "$@" && return
    [ "$pause" = 0 ] || sleep "$pause"
  done
  return 1
}

# Put a finished folder or file in its place, so that an interrupted installation leaves nothing usable, and keep a copy
# of the recipe, by which scripts/test_packages.sh recognises an older installation.
place() {
  rm -rf "$2.new"
  mkdir -p "$(dirname "$2")"
  cp -a "$1" "$2.new"
  rm -rf "$2"
  mv "$2.new" "$2"
  cp "$recipe" "$runtimes/$(basename "$recipe" .sh).recipe"
}
