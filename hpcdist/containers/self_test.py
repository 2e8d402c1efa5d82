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
    import hpcdist

    warnings.simplefilter("ignore")
    # The distributions that hpcdist declares for itself and for its extra `train`.
    lines = metadata.requires("hpcdist") or []
    required = [line for line in lines if "extra ==" not in line or re.search(r"extra == ['\"]train['\"]", line)]
    distributions = ["hpcdist", *(re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0] for line in required)]
    names = {_normal(name) for name in distributions}
    owners = metadata.packages_distributions()
    modules = sorted(name for name in owners if names & set(map(_normal, owners[name])) and name.isidentifier())
    own = [module.name for module in pkgutil.walk_packages(hpcdist.__path__, "hpcdist.")]
    modules += [name for name in own if not name.endswith(("__main__", ".self_test"))]
    failed: dict[str, str] = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:  # a broken package may raise anything when it is imported
            failed[module] = f"{type(error).__name__}: {error}".splitlines()[0]
    versions = {}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            failed[name] = "not installed"
    import torch

    from hpcdist.errors import ConfigError
    from hpcdist.host.machine import require_compiler

    no_compiler = ""
    try:
        require_compiler("cpu", os.environ)
    except ConfigError as error:
        no_compiler = str(error)
    libraries = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1")
    report = {
        "uid": os.getuid(),
        "versions": versions,
        "failed_imports": failed,
        "num_imports": len(modules),
        "cuda": str(torch.version.cuda or ""),
        "rdma": {**{name: _loads(name) for name in libraries}, "numactl": shutil.which("numactl") is not None},
        "compile": no_compiler,
    }
    print(json.dumps(report))


def _normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
