#!/usr/bin/env bash
# Build pyxis, Slurm's plugin for enroot, from tests/vendor for the installed Slurm: pyxis.sh [PLUGIN.so]   (3 s)
# The same source compiles against Slurm 22.05, 24.11 and 26.05, but a plugin fits one of them.
# slurmd reads `required PLUGIN.so` from plugstack.conf when it starts, and must have enroot on its PATH.
set -euo pipefail
# shellcheck source=scripts/runtimes/prefix.sh
. "$(dirname "$(readlink -f "$0")")/prefix.sh"
to=${1:-$runtimes/pyxis/spank_pyxis.so}
tar -xzf "$vendor"/pyxis-*.tar.gz --strip-components=1 -C "$work"
cd "$work"
if [ ! -e /usr/include/slurm/spank.h ]; then
  retry apt-get download -q libslurm-dev >/dev/null
  dpkg -x libslurm-dev_*.deb headers
fi
# In the environment: on make's command line it would replace pyxis's own -D_GNU_SOURCE.
CPPFLAGS="-I$work/headers/usr/include" make -s
chmod 644 spank_pyxis.so
cd /
place "$work/spank_pyxis.so" "$to"
echo "$to"
