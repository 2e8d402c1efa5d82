#!/bin/sh
# Start a container in a Slurm task: add what depends on the node to the runtime's command line.
#
#   node_wrapper.sh apptainer exec FLAGS… IMAGE COMMAND…
#   node_wrapper.sh enroot start FLAGS… IMAGE COMMAND…
#   node_wrapper.sh in FOLDER COMMAND…                     in the container: enroot's command script
#   node_wrapper.sh remove JOB                             remove what pyxis has left of a job
#
# Containers get the variables of this process: those of the job, which outer_env of hpcdist.containers.runtimes has
# reduced, and those that Slurm has added on the node.
set -u
SYSTEM_PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

present() {
  command -v "$1" >/dev/null && return
  echo "hpcdist: $1 is not installed on ${SLURMD_NODENAME:-this machine}" >&2
  exit 127
}

# Print an option for each variable that the container gets, by name, so that no value is in a command line.
variables() {
  # One line for each variable, also if its value has several lines.
  for name in $(env -0 | tr '\n\0' ' \n' | sed -n 's/^\([A-Za-z_][A-Za-z0-9_]*\)=.*/\1/p'); do
    case $name in
    PATH | HOME | USER | LOGNAME | SHELL | TMPDIR | PWD | OLDPWD | SHLVL | _ | XDG_* | ENROOT_*) ;; # the host's own
    *) echo "--env=$name" ;;
    esac
  done
  # enroot's hook for InfiniBand fails the start on a node without such an adapter.
  [ ! -e /dev/infiniband ] || echo --env=MELLANOX_VISIBLE_DEVICES=all
}

case $1 in
apptainer)
  present apptainer
  # Slurm sends SIGUSR2 ahead of the time limit; a container that is being started must not die of it.
  trap '' USR2
  # Without squashfuse_ll apptainer unpacks the image, so a replacement must not pretend that there is one.
  if (PATH=$SYSTEM_PATH command -v squashfuse_ll >/dev/null); then
    PATH=${0%/*}/apptainer_mount:$PATH
  fi
  exec "$@"
  ;;
enroot)
  present enroot
  trap '' USR2
  shift 2
  # shellcheck disable=SC2046 # names contain no spaces
  set -- enroot start $(variables) "$@"
  for program in squashfuse fuse-overlayfs; do
    command -v "$program" >/dev/null || continue
    # enroot is a bash script, in which an exported function replaces a program. $$ becomes the rank.
    set -- "BASH_FUNC_$program%%=() { exec bash '${0%/*}/enroot_mount.sh' $$ $program \"\$@\"; }" "$@"
  done
  exec env "$@"
  ;;
in)
  cd "$2" || exit
  shift 2
  exec "$@"
  ;;
remove)
  # pyxis leaves the files of a container if a signal to the step ends its creation or its removal. The name is
  # pyxis_JOB.STEP, or pyxis_JOB_JOB.STEP with container_scope=job.
  for container in $(enroot list 2>/dev/null | grep -E "^pyxis_($2_)?$2\\."); do enroot remove --force "$container"; done
  ;;
esac
