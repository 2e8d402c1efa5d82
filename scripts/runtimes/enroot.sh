#!/usr/bin/env bash
# Build enroot from tests/vendor with the system's compiler and install it in a folder: enroot.sh [FOLDER]
# 5 s and 1 MB. Required at run time: squashfs-tools, squashfuse, jq; as an ordinary user a /dev/fuse of mode 0666.
set -euo pipefail
# shellcheck source=scripts/runtimes/prefix.sh
. "$(dirname "$(readlink -f "$0")")/prefix.sh"
to=${1:-$runtimes/enroot}
tar -xzf "$vendor"/enroot-*.tar.gz --strip-components=1 -C "$work"
cd "$work"
cat >strl.h <<'C'
/* glibc before 2.38 has no strlcpy and strlcat, and enroot's copy of libbsd leaves them to musl. */
#include <string.h>
#if !__GLIBC_PREREQ(2, 38)
static inline __attribute__((unused)) size_t strlcpy(char *d, const char *s, size_t n)
{ size_t l = strlen(s); if (n) { size_t c = l < n - 1 ? l : n - 1; memcpy(d, s, c); d[c] = 0; } return l; }
static inline __attribute__((unused)) size_t strlcat(char *d, const char *s, size_t n)
{ size_t l = strnlen(d, n); return l + (l < n ? strlcpy(d + l, s, n - l) : strlen(s)); }
#endif
C
# With FORCE_GLIBC the submodules (musl, kernel headers, makeself) are not needed.
make -s -C deps FORCE_GLIBC=1 CC=gcc CFLAGS="-O2 -fdata-sections -ffunction-sections -fstack-protector -fPIE" libbsd
CPPFLAGS="-D_GNU_SOURCE -include $work/strl.h" \
  make -s FORCE_GLIBC=1 CC=gcc DEPS= prefix="$to" DESTDIR="$work/root" -o deps install 2>"$work/log" || {
  tail -5 "$work/log" >&2
  exit 1
}
# The installed files name the folder that they were installed to.
grep -rlF "$work/root" "$work/root$to" | xargs -r sed -i "s;$work/root;;g"
# The nodes of a dev cluster share this machine's files. A network namespace is that of one node of one cluster.
cat >>"$work/root$to/etc/enroot/enroot.conf" <<'C'
ENROOT_DATA_PATH    /tmp/enroot-state/$(stat -Lc %i /proc/self/ns/net)-$(id -u)/data
ENROOT_RUNTIME_PATH /tmp/enroot-state/$(stat -Lc %i /proc/self/ns/net)-$(id -u)/run
ENROOT_CACHE_PATH   /tmp/enroot-state/$(stat -Lc %i /proc/self/ns/net)-$(id -u)/cache
C
cd /
place "$work/root$to" "$to"
"$to/bin/enroot" version
