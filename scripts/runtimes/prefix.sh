# shellcheck shell=bash
# Sourced by the other scripts of this folder: where they install, and `retry`.
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# Resolved before a script changes the folder.
recipe=$(readlink -f "$0")
# shellcheck disable=SC2034 # used by the scripts that source this one
vendor=$here/../../tests/vendor
# shellcheck source=scripts/runtimes/installed.sh
. "$here/installed.sh"
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

# Put a finished folder or file in its place, so that an interrupted installation leaves nothing usable, and write the
# recipe's stamp, by which scripts/test_packages.sh recognises an older installation.
place() {
  rm -rf "$2.new"
  mkdir -p "$(dirname "$2")"
  cp -a "$1" "$2.new"
  rm -rf "$2"
  mv "$2.new" "$2"
  local name
  name=$(basename "$recipe" .sh)
  stamp "$name" >"$runtimes/$name.stamp"
}

# Define `sid`, which runs apt-get for Debian sid with lists of its own, beside those of this machine.
use_sid() {
  local mirror
  # shellcheck disable=SC2016 # apt replaces the words
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(LABEL)' 'Created-By: Packages' | sed -n 's/ Debian$//p' | head -1)
  [ -n "$mirror" ] || {
    echo "$(basename "$recipe"): apt has no Debian mirror in its sources" >&2
    exit 1
  }
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" >"$work/sources.list"
  # shellcheck disable=SC2329 # called by the scripts that source this one
  sid() {
    apt-get -q -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
      -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root \
      -o Acquire::Check-Valid-Until=false -o Acquire::Languages=none "$@"
  }
  retry sid update >/dev/null
}
