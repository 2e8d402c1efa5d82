#!/bin/sh
# Start a container on a node: add the options that depend on the node to the runtime's command line.
#
#   node_wrapper.sh rank ATTEMPT NAMES podman|docker run FLAGS… IMAGE COMMAND…   a rank, from a Slurm task
#   node_wrapper.sh once NAMES RUNTIME run|start FLAGS… IMAGE COMMAND…           the same for another command
#   node_wrapper.sh plain RUNTIME FLAGS… IMAGE COMMAND…                          a runtime that inherits the environment
#   node_wrapper.sh remove podman|docker LABEL                                   remove leftover containers
#   node_wrapper.sh remove pyxis JOB                                             the same
#   node_wrapper.sh in FOLDER COMMAND…                                           in the container: enroot's command script
#
# NAMES are patterns, 'SLURM_*|NCCL_*': matching variables are passed by name, so that no value is in a command line.
#
# Containers of podman and docker are no child processes of the step: Slurm's signals do not reach them, and they survive
# the step. This script holds one end of a named pipe, hpcdist.containers.pid1 in the container the other: signals go
# through it by name, and when this process ends, for whatever reason, the pipe closes and the container ends.
set -u
SYSTEM_PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mode=$1
shift

present() {
  command -v "$1" >/dev/null && return
  echo "hpcdist: $1 is not installed on ${SLURMD_NODENAME:-this machine}" >&2
  exit 127
}

# Set $flags to the options that depend on this node.
node_flags() {
  flags=
  set -f # patterns are matched against names, not against files
  # Names only: a value with several lines may look like another name, which the runtimes ignore.
  for name in $(env | sed -n 's/^\([A-Za-z_][A-Za-z0-9_]*\)=.*/\1/p'); do
    case $name in HPCDIST_TRACKING_URI | SLURM_JWT) continue ;; esac
    before=$IFS IFS='|'
    for pattern in $names; do
      # shellcheck disable=SC2254 # $pattern is a pattern
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
  # Files belong to the user who submitted, whatever user the image has.
  flags="$flags --user=$(id -u):$(id -g)"
  if [ "$1" = podman ]; then
    [ "$(id -u)" = 0 ] || flags="$flags --userns=keep-id"
    # --ulimit=host takes this process's limits; RDMA must lock its memory.
    # shellcheck disable=SC3045 # all Linux shells support it
    ulimit -l unlimited 2>/dev/null || ulimit -l "$(ulimit -H -l)"
  else
    for group in $(id -G); do flags="$flags --group-add=$group"; done
    # RDMA must lock its memory. A daemon without CAP_SYS_RESOURCE (rootless, in a container) cannot raise the limit, and
    # then starts no container at all: it is only asked to where it is needed.
    [ ! -e /dev/infiniband ] || flags="$flags --ulimit=memlock=-1"
  fi
  [ ! -e /dev/infiniband ] || flags="$flags --device=/dev/infiniband"
}

# Wait for the runtime's client; signals interrupt the wait.
follow() {
  while :; do
    wait "$client"
    code=$?
    kill -0 "$client" 2>/dev/null || return 0
  done
}

# Return whether the container runs. Slurm may kill the query itself, so it is repeated.
container_runs() {
  for _ in 1 2 3 4 5; do
    # Without --all, `ps` lists running containers; the names of states differ between podman and docker.
    if running=$("$tool" ps --filter "name=^$container\$" --format '{{.Names}}' 2>/dev/null); then
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
  container=hpcdist-$SLURM_JOB_ID-$HPCDIST_ATTEMPT-$SLURM_PROCID
  rm -f "$base.line" "$base.exit"
  mkfifo -m 600 "$base.line" || exit 125
  exec 3<>"$base.line"
  for signal in TERM INT HUP USR1 USR2; do
    # shellcheck disable=SC2064 # expand $signal now
    trap "echo $signal >&3" "$signal"
  done
  # shellcheck disable=SC2086 # flags contain no spaces
  "$tool" run $flags --name="$container" --label="hpcdist.job=$SLURM_JOB_ID" --label="hpcdist.attempt=$HPCDIST_ATTEMPT" \
    "$@" </dev/null 3>&- &
  client=$!
  follow
  # The container may still run if Slurm killed the client.
  while [ ! -e "$base.exit" ] && container_runs; do
    "$tool" attach --no-stdin --sig-proxy=false "$container" </dev/null 3>&- &
    client=$!
    follow
  done
  [ ! -e "$base.exit" ] || code=$(cat "$base.exit")
  "$tool" rm --force "$container" >/dev/null 2>&1 3>&-
  rm -f "$base.line" "$base.exit"
  exit "$code"
  ;;
once)
  names=$1 tool=$2 verb=$3
  shift 3
  present "$tool"
  node_flags "$tool"
  # Slurm sends SIGUSR2 ahead of the time limit; a container that is being started must not die of it.
  trap '' USR2
  if [ "$tool" = enroot ]; then
    # shellcheck disable=SC2086
    set -- enroot "$verb" $flags "$@"
    for program in squashfuse fuse-overlayfs; do
      command -v "$program" >/dev/null || continue
      # enroot is a bash script, in which an exported function replaces a program. $$ becomes the rank.
      set -- "BASH_FUNC_$program%%=() { exec bash '${0%/*}/enroot_mount.sh' $$ $program \"\$@\"; }" "$@"
    done
    exec env "$@"
  fi
  # shellcheck disable=SC2086
  exec "$tool" "$verb" $flags "$@"
  ;;
plain)
  present "$1"
  # Slurm sends SIGUSR2 ahead of the time limit; processes without a handler must not die of it.
  trap '' USR2
  # Without squashfuse_ll apptainer unpacks the image, so a replacement must not pretend that there is one.
  if [ "$1" = apptainer ] && (PATH=$SYSTEM_PATH command -v squashfuse_ll >/dev/null); then
    PATH=${0%/*}/apptainer_mount:$PATH
  fi
  exec "$@"
  ;;
remove)
  if [ "$1" = pyxis ]; then
    # pyxis leaves the files of a container if a signal to the step ends its creation or its removal. The name is
    # pyxis_JOB.STEP, or pyxis_JOB_JOB.STEP with container_scope=job.
    for container in $(enroot list 2>/dev/null | grep -E "^pyxis_($2_)?$2\\."); do enroot remove --force "$container"; done
    exit 0
  fi
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
