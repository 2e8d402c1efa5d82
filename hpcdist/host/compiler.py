"""Requirements of torch.compile at run time: a compiler, headers, and a cache that no other user can write to."""

import logging
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.host.ownership import make_private

log = logging.getLogger(__name__)
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def require_compiler(device: str, env: Mapping[str, str]) -> None:
    """Raise ConfigError if torch.compile cannot work for a device of this machine, before the run starts.

    Triton builds a launcher for each GPU kernel with a C compiler, Inductor builds CPU kernels with a C++ compiler, and
    both need Python's headers.
    """
    compiler, variable, names = "a C compiler (gcc)", "CC", ["gcc", "clang", "cc"]
    if device == "cpu":
        compiler, variable, names = "a C++ compiler (g++)", "CXX", ["g++"]
    # The variable may also hold options: `gcc -m64`.
    configured = env.get(variable, "").split()
    if configured:
        names = configured[:1]
    search_path = env.get("PATH", os.defpath)
    missing = []
    if not any(shutil.which(name, path=search_path) for name in names):
        missing.append(compiler)
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append("Python's headers (Python.h)")
    if missing:
        raise ConfigError(
            f"model.compile=true needs {' and '.join(missing)}, not found here: install g++ and libpython3-dev,"
            " use an image of the target `default` instead of `slim`, or set model.compile=false"
        )


def cache_environment(env: Mapping[str, str], run: Path) -> dict[str, str]:
    """Return the variables with which torch.compile executes no code that another user has put into its cache.

    torch's default is a folder `torchinductor_USER` in /tmp, and any user can create it first. `env` may have that
    default as a value, since an import of torch sets it, perhaps under another TMPDIR: such a name is not used.

    Args:
        run: a run folder, in which the cache is if another user has taken the name that hpcdist uses.
    """
    prefix = "torchinductor_"
    if not Path(env.get(CACHE_VARIABLE, prefix)).name.startswith(prefix):
        return {}
    folder = Path(tempfile.gettempdir(), f"{prefix}{os.geteuid()}")
    try:
        make_private(folder)
    except RunFolderError as error:
        log.warning("the cache of torch.compile is in the run folder: %s", error)
        folder = run / "torchinductor"
    return {CACHE_VARIABLE: str(folder)}
