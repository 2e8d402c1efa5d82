"""Environment modules (Lmod or Tcl modules): the environment after `module load`."""

import re
from collections.abc import Mapping, Sequence

from hpcdist.config.schema import Config
from hpcdist.errors import UserMistake
from hpcdist.host.time_limits import last_line, run_within

#: Loading modules from a slow file system may take a while.
LOAD_S = 120.0
#: Line between the messages of `module load` and the variables.
_MARK = "hpcdist-modules"
#: Exit code of the script if there is no command `module`.
_NO_MODULES = 3
#: Limit of an error of Lmod in a message: it may quote a long list of modules.
_MAX_ERROR = 300
#: Batch scripts of a non-interactive shell may lack the function `module`; sites install its definition in one of
#: these places. `module load` of old versions returns 0 although it has failed, so the list of loaded modules counts.
_LOAD = f"""
if ! type module >/dev/null 2>&1; then
  for file in "${{LMOD_PKG:-/nowhere}}/init/bash" "${{MODULESHOME:-/nowhere}}/init/bash" \\
      /etc/profile.d/lmod.sh /etc/profile.d/modules.sh /etc/profile.d/z00_lmod.sh \\
      /usr/share/lmod/lmod/init/bash /usr/share/modules/init/bash; do
    if [ -r "$file" ]; then . "$file"; break; fi
  done
fi
type module >/dev/null 2>&1 || exit {_NO_MODULES}
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
    return run_within(["bash", "-c", _LOAD], LOAD_S, env=env).returncode == 0


def load_modules(names: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment after loading modules in `env`. Raises UserMistake if one cannot be loaded."""
    done = run_within(["bash", "-c", _LOAD, "bash", *names], LOAD_S, env=env)
    output, mark, variables = done.stdout.partition(f"\n{_MARK}\n")
    if done.returncode == _NO_MODULES:
        raise UserMistake(
            "cluster.environment.modules: the command `module` is not available on this machine: load the modules by"
            " cluster.setup, or set MODULESHOME to the installation's folder in cluster.env"
        )
    if done.returncode != 0 or not mark:
        reason = _load_error(done.stderr, output) or "module load changed nothing in LOADEDMODULES"
        raise UserMistake(f"cluster.environment.modules: {', '.join(names)} cannot be loaded: {reason}")
    loaded: dict[str, str] = {}
    for entry in variables.split("\0"):
        name, separator, value = entry.partition("=")
        if separator:
            loaded[name] = value
    return loaded


def _load_error(stderr: str, output: str) -> str:
    """Return the error that `module load` has printed, in one line; empty if it has printed nothing."""
    # Lmod breaks an error into lines, ends it by an empty line, and prints advice after it.
    error = re.search(r"(?im)^.*\berror:.*(?:\n.*\S.*)*", f"{stderr}\n{output}")
    if error is not None:
        return " ".join(error[0].split())[:_MAX_ERROR]
    return last_line(stderr) or last_line(output)


def module_problems(config: Config, env: Mapping[str, str]) -> list[str]:
    """Return why the modules cannot be loaded on this machine; no problem if it has no environment modules."""
    names = config.cluster.environment.modules
    env = {**env, **config.cluster.env}
    # Commands of the job, such as `module use`, may change which modules exist.
    if not names or config.cluster.setup or not has_modules(env):
        return []
    try:
        load_modules(names, env)
    except UserMistake as error:
        return [str(error)]
    return []
