#!/usr/bin/env bash
# Install hpcdist and what its tests and documentation need into a virtual environment: scripts/install.sh VENV
# Every package is pinned with its hash (`make lock`).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
python=${PYTHON:-python3}

retry() { bash scripts/retry.sh "$@"; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "hpcdist needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Try: make PYTHON=python3.12 …" >&2
  exit 2
}
# On Debian and Ubuntu, the venv module is in a separate package.
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  package=$("$python" -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv")')
  if [ "$(id -u)" = 0 ]; then sudo=(); else sudo=(sudo -n); fi
  "${sudo[@]}" true 2>/dev/null || { echo "python's venv module is missing: sudo apt-get install $package" >&2; exit 2; }
  retry "${sudo[@]}" apt-get update -q
  retry "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$package"
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "installing hpcdist into $venv; torch alone takes 5 GB, so this takes minutes" >&2
# uv takes a sixth of pip's processor time here, and tries downloads again itself. It does not read pip's configuration; where it fails nevertheless, pip installs.
pip() { retry "$venv/bin/python" -m pip install --quiet --require-hashes "$@"; }
pip_option() {
  "$venv/bin/python" -m pip config list 2>/dev/null | sed -n "s/^\(:env:\|install\|global\)\.$1='\(.*\)'\$/\2/p" | head -1
}
export_option() { # VARIABLE OPTION: unless the variable is set
  local value
  value=$(pip_option "$2")
  if [ -z "${!1-}" ] && [ -n "$value" ]; then export "$1=$value"; fi
}
uv() {
  export_option UV_DEFAULT_INDEX index-url
  export_option UV_EXTRA_INDEX_URL extra-index-url
  export_option UV_FIND_LINKS find-links
  export_option SSL_CERT_FILE cert
  # The file with the pinned hash may be in any index.
  UV_INDEX_STRATEGY=unsafe-best-match UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} "$venv/bin/uv" pip install --quiet --no-config \
    --python "$venv/bin/python" --require-hashes "$@"
}
pip --requirement docker/requirements-build.txt # uv and the build system
uv --requirement docker/requirements-dev.txt || pip --requirement docker/requirements-dev.txt
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
# hydra-core, one of the packages of the tests, keeps omegaconf at 2.3. The tests of configs use that of the images.
sed -n '/^omegaconf==/,/[^\\]$/p' docker/requirements.txt >"$venv/omegaconf.txt"
rm -rf "$venv/omegaconf"
pip --no-deps --target "$venv/omegaconf" --requirement "$venv/omegaconf.txt"
