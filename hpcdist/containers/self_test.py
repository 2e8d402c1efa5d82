"""Self-test of an image: `hpcdist image check` pipes this file to the image's Python and reads one line of JSON.

It imports nothing from hpcdist at the top, because that import is part of the test.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pkgutil
import re
import shutil
import warnings
from importlib import metadata


def main() -> None:
    """Import all modules of hpcdist and its requirements; exit with 1 and the errors if some cannot be imported."""
    warnings.simplefilter("ignore")
    distributions = ["hpcdist", *_requirements()]
    failed: dict[str, str] = {}
    modules = [*_modules_of(distributions[1:]), *_own_modules()]
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:  # a broken package may raise anything when it is imported
            failed[module] = f"{type(error).__name__}: {error}".splitlines()[0]
    report = {
        "uid": os.getuid(),
        "versions": {name: metadata.version(name) for name in distributions if _is_installed(name)},
        "failed_imports": failed | {name: "not installed" for name in distributions if not _is_installed(name)},
        "num_imports": len(modules),
        "cuda": _cuda(),
        "rdma": {name: _loads(name) for name in ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1")}
        | {"numactl": shutil.which("numactl") is not None},
        "compile": _compile(),
    }
    print(json.dumps(report))


def _requirements() -> list[str]:
    """Return the distributions that hpcdist declares for itself and for its extra `train`."""
    lines = metadata.requires("hpcdist") or []
    required = [line for line in lines if "extra ==" not in line or re.search(r"extra == ['\"]train['\"]", line)]
    return [re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0] for line in required]


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _modules_of(distributions: list[str]) -> list[str]:
    required = {name.lower().replace("_", "-") for name in distributions}
    return sorted(
        module
        for module, owners in metadata.packages_distributions().items()
        if required & {owner.lower().replace("_", "-") for owner in owners} and module.isidentifier()
    )


def _own_modules() -> list[str]:
    import hpcdist

    names = [module.name for module in pkgutil.walk_packages(hpcdist.__path__, "hpcdist.")]
    return [name for name in names if not name.endswith(("__main__", ".self_test"))]


def _cuda() -> str:
    import torch

    return str(torch.version.cuda or "")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _compile() -> str:
    from hpcdist.errors import ConfigError
    from hpcdist.host.machine import require_compiler

    try:
        require_compiler("cpu", os.environ)
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
