#!/usr/bin/env bash
# Install apptainer of Debian sid in a folder, also on Debian 12, which has no package of it: apptainer.sh [FOLDER]
# 20 s and 70 MB. apt's own lists and the installed packages do not change.
#
# The programs need glibc 2.38 for __isoc23_strto* alone, which `older_glibc.py` renames to strto*.
# Required for images: squashfs-tools; as an ordinary user also squashfuse and a /dev/fuse of mode 0666.
# Root without CAP_SYS_RESOURCE has to export APPTAINER_DROP_CAPS=CAP_SYS_RESOURCE.
set -euo pipefail
# shellcheck source=scripts/runtimes/prefix.sh
. "$(dirname "$(readlink -f "$0")")/prefix.sh"
to=${1:-$runtimes/apptainer}
use_sid
cd "$work"
retry sid download apptainer/sid
dpkg -x apptainer_*.deb "$work/package"
cd /

mkdir -p "$work/to/var/lib/apptainer/mnt/session"
cp -a "$work/package/usr/." "$work/to"
cp -a "$work/package/etc" "$work/to/etc"
# apptainer finds its files beside itself; its starter, in lib/x86_64-linux-gnu, takes lib for the prefix.
ln -s ../var ../etc ../bin "$work/to/lib/"
ln -s . "$work/to/lib/lib"
python3 "$here/older_glibc.py" "$work/to/bin/apptainer" "$work"/to/lib/*-linux-gnu/apptainer/bin/starter
chmod 755 "$work/to"
"$work/to/bin/apptainer" --version
place "$work/to" "$to"
