"""Environment modules (Lmod or Tcl modules): the environment after `module load`."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from hpcdist.errors import UserMistake
from hpcdist.machine.timed_command import last_line, run_within

#: Loading modules from a slow file system may take a while.
LOAD_S = 120.0
_MARK = "hpcdist-modules"
#: Lmod breaks an error into lines, and ends it by an empty line.
_ERROR = re.compile(r"(?im)^.*\berror:.*(?:\n.*\S.*)*")
_MAX_REASON = 300
#: Version of Lmod ("Modules based on Lua: Version 8.6.19") or Environment Modules ("Modules Release 5.2.0").
_VERSION = re.compile(r"(Version|Release) +v?(\d[\w.]*)")
_NO_MODULES = 3
#: Batch scripts of a non-interactive shell may lack the function `module`; sites install its definition in one of
#: these places. `module load` of old versions returns 0 although it has failed, so the list of loaded modules counts.
_DEFINE = f"""
if ! type module >/dev/null 2>&1; then
  for file in "${{LMOD_PKG:-/nowhere}}/init/bash" "${{MODULESHOME:-/nowhere}}/init/bash" \\
      /etc/profile.d/lmod.sh /etc/profile.d/modules.sh /etc/profile.d/z00_lmod.sh \\
      /usr/share/lmod/lmod/init/bash /usr/share/modules/init/bash; do
    if [ -r "$file" ]; then . "$file"; break; fi
  done
fi
type module >/dev/null 2>&1 || exit {_NO_MODULES}
"""
_LOAD = f"""{_DEFINE}
for name in "$@"; do
  before=$LOADEDMODULES
  module load "$name" || exit 1
  case ":$LOADEDMODULES:" in
  *":$name:"* | *":$name/"*) ;;
  *) [ "$LOADEDMODULES" != "$before" ] || exit 1 ;;  # an alias, or gcc/13 for gcc/13.2
  esac
done
printf '\\n{_MARK}\\n'
exec env -0
"""


def has_modules(env: Mapping[str, str]) -> bool:
    """Return whether this machine has environment modules."""
    return _run([], env).returncode == 0


def modules_version(env: Mapping[str, str]) -> str | None:
    """Return the name and version of this machine's environment modules; None if it has none."""
    done = run_within(["bash", "-c", f"{_DEFINE}module --version 2>&1"], LOAD_S, env=env)
    if done.returncode == _NO_MODULES:
        return None
    found = _VERSION.search(done.stdout)
    if found is None:
        return "of unknown version"
    return f"{'Lmod' if found[1] == 'Version' else 'Environment Modules'} {found[2]}"


def load_modules(names: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment after loading modules in `env`.

    Raises:
        UserMistake: a module cannot be loaded, or this machine has no environment modules.
    """
    done = _run(names, env)
    output, mark, variables = done.stdout.partition(f"\n{_MARK}\n")
    if done.returncode == _NO_MODULES:
        raise UserMistake(
            "cluster.environment.modules: the command `module` is not available on this machine: load the modules by"
            " cluster.setup, or set MODULESHOME to the installation's folder in cluster.env"
        )
    if done.returncode != 0 or not mark:
        named = _ERROR.search(f"{done.stderr}\n{output}")  # Lmod prints advice after it
        printed = last_line(done.stderr) or last_line(output)
        reason = (
            " ".join(named[0].split())[:_MAX_REASON]
            if named
            else printed or "module load changed nothing in LOADEDMODULES"
        )
        raise UserMistake(f"cluster.environment.modules: {', '.join(names)} cannot be loaded: {reason}")
    pairs = (entry.partition("=") for entry in variables.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


def _run(names: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return run_within(["bash", "-c", _LOAD, "bash", *names], LOAD_S, env=env)


def program(name: str, env: Mapping[str, str]) -> str:
    """Return the path of a program in the environment of modules.

    Raises:
        UserMistake: it does not exist.
    """
    found = shutil.which(name, path=env.get("PATH", ""))
    if found is None:
        raise UserMistake(f"cluster.environment.python: no {name} on the PATH after loading the modules")
    return found
