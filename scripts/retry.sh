#!/usr/bin/env bash
# Run a command up to three times, because downloads can fail temporarily: scripts/retry.sh COMMAND…
set -uo pipefail
for pause in 5 20 0; do
  "$@" && exit
  code=$?
  [ "$pause" = 0 ] || { echo "failed, again in $pause s: $*" >&2; sleep "$pause"; }
done
exit "$code"
