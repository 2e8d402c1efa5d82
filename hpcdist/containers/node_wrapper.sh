#!/bin/sh
# The node's side of a container: what only the node knows is added to the runtime's command line here.
#
#   node_wrapper.sh rank ATTEMPT NAMES podman|docker run FLAGS… IMAGE COMMAND…   a rank, from a Slurm task
#   node_wrapper.sh once NAMES RUNTIME run|start FLAGS… IMAGE COMMAND…           the same for what ends by itself
#   node_wrapper.sh plain RUNTIME FLAGS… IMAGE COMMAND…                          a runtime that takes all from its caller
#   node_wrapper.sh remove podman|docker LABEL                                   whatever was left behind
#   node_wrapper.sh in FOLDER COMMAND…                                           inside: enroot's command script
#
# NAMES are patterns, 'SLURM_*|NCCL_*': variables whose names match are passed, by name, so that no value ever
# stands in a command line.
#
# Containers of podman and docker are no children of the step: Slurm's signals do not reach them, and they live on when
# the step is killed. So this script holds one end of a named pipe, and hpcdist.containers.pid1 in the container the other:
# signals go through it as words, and when this process dies, of whatever, the pipe ends and the container with it.
set -u
mode=$1
shift

present() {
  command -v "$1" >/dev/null && return
  echo "hpcdist: $1 is not installed on ${SLURMD_NODENAME:-this machine}" >&2
  exit 127
}

# Put what only this node knows between the runtime's verb and its other flags; leaves the words in "$@" to `run`.
node_flags() {
  flags=
  set -f # patterns are matched against names, not against files
  # Names alone: a value of several lines may give a name that is none, which the runtimes pass over.
  for name in $(env | sed -n 's/^\([A-Za-z_][A-Za-z0-9_]*\)=.*/\1/p'); do
    case $name in HPCDIST_TRACKING_URI | SLURM_JWT) continue ;; esac
    before=$IFS IFS='|'
    for pattern in $names; do
      # shellcheck disable=SC2254 # a pattern it is
      case $name in $pattern) flags="$flags --env=$name" && break ;; esac
    done
    IFS=$before
  done
  set +f
  if [ "$1" = enroot ]; then
    # enroot's hook for InfiniBand fails the start on a node without such a card.
    [ ! -e /dev/infiniband ] || flags="$flags --env=MELLANOX_VISIBLE_DEVICES=all"
    return 0
  fi
  # Files are written as the one who submitted, whatever user the image has.
  flags="$flags --user=$(id -u):$(id -g)"
  if [ "$1" = podman ]; then
    [ "$(id -u)" = 0 ] || flags="$flags --userns=keep-id"
    # --ulimit=host takes what is allowed here; what RDMA registers must stay in memory.
    # shellcheck disable=SC3045 # every sh of a Linux has it
    ulimit -l unlimited 2>/dev/null || ulimit -l "$(ulimit -H -l)"
  else
    for group in $(id -G); do flags="$flags --group-add=$group"; done
  fi
  [ ! -e /dev/infiniband ] || flags="$flags --device=/dev/infiniband"
}

# Wait for the runtime's client, through the signals that interrupt the wait.
follow() {
  while :; do
    wait "$client"
    code=$?
    kill -0 "$client" 2>/dev/null || return 0
  done
}

# Whether the container still runs. Slurm may have killed the one who was asked: then it is asked again.
runs_on() {
  for _ in 1 2 3 4 5; do
    # Without --all these are the running ones. The two tools' words for a state differ.
    if running=$("$tool" ps --filter "name=^$box\$" --format '{{.Names}}' 2>/dev/null); then
      [ -n "$running" ]
      return
    fi
  done
  return 1
}

case $mode in
rank)
  base=$1/rank-$(printf %05d "$SLURM_PROCID") names=$2 tool=$3
  shift 4
  present "$tool"
  node_flags "$tool"
  box=hpcdist-$SLURM_JOB_ID-$HPCDIST_ATTEMPT-$SLURM_PROCID
  rm -f "$base.line" "$base.exit"
  mkfifo -m 600 "$base.line" || exit 125
  exec 3<>"$base.line"
  for signal in TERM INT HUP USR1 USR2; do
    # shellcheck disable=SC2064 # the name is meant to be put in now
    trap "echo $signal >&3" "$signal"
  done
  # shellcheck disable=SC2086 # words without spaces
  "$tool" run $flags --name="$box" --label="hpcdist.job=$SLURM_JOB_ID" --label="hpcdist.attempt=$HPCDIST_ATTEMPT" \
    "$@" </dev/null 3>&- &
  client=$!
  follow
  # A client that Slurm killed tells nothing of the container.
  while [ ! -e "$base.exit" ] && runs_on; do
    "$tool" attach --no-stdin --sig-proxy=false "$box" </dev/null 3>&- &
    client=$!
    follow
  done
  [ ! -e "$base.exit" ] || code=$(cat "$base.exit")
  "$tool" rm --force "$box" >/dev/null 2>&1 3>&-
  rm -f "$base.line" "$base.exit"
  exit "$code"
  ;;
once)
  names=$1 tool=$2 verb=$3
  shift 3
  present "$tool"
  node_flags "$tool"
  # shellcheck disable=SC2086
  exec "$tool" "$verb" $flags "$@"
  ;;
plain)
  present "$1"
  # Until a rank can hear SIGUSR2, which Slurm sends ahead of the time limit, nothing here must die of it.
  trap '' USR2
  exec "$@"
  ;;
remove)
  present "$1"
  left=$("$1" ps --all --quiet --filter "label=$2") || exit
  [ -n "$left" ] || exit 0
  # shellcheck disable=SC2086
  "$1" kill $left >/dev/null 2>&1
  # shellcheck disable=SC2086
  "$1" rm --force $left >/dev/null
  ;;
in)
  cd "$1" || exit
  shift
  exec "$@"
  ;;
esac
