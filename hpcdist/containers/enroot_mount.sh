#!/bin/bash
# Run squashfuse or fuse-overlayfs for `enroot start IMAGE.sqsh` so that Slurm's signals do not end it before the rank.
#
#   enroot_mount.sh PID COMMAND…        PID: the first process of the container
#
# Slurm signals every process of a step if the cluster has proctrack/linuxproc or proctrack/pgid. SIGTERM ends squashfuse,
# and SIGCONT, which Slurm sends before SIGTERM, wakes a shell of enroot that kills the process group of squashfuse. Ranks
# that are saving would die by SIGBUS. This script ignores the signals, leaves the process group, and ends squashfuse when
# the container has ended. With proctrack/cgroup Slurm signals the rank alone.
set -u
if [ "$1" != --detached ]; then
  # Ignored signals stay ignored in the processes below: libfuse installs no handlers for them.
  trap '' HUP INT QUIT TERM USR1 USR2
  # enroot's shell waits for the mount and for this process.
  setsid bash "$0" --detached "$@" &
  wait $!
  exit
fi
container=$2
shift 2
command "$@" & # the name without `command` is the exported function that calls this script
mount=$!
# enroot changes the root of all its processes, so no program can be started from here on: read is a sleep.
exec 9<> <(:)
while kill -0 "$container" 2>/dev/null; do read -r -t 1 -u 9; done
kill -KILL "$mount"
wait "$mount" 2>/dev/null
