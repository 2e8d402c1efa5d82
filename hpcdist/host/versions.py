"""Versions of this Python's packages and of the driver, and the digest of hpcdist's source.

`versions` and `source_digest` are also executed as source text by the Python of an image or of an environment, so they
contain their imports.
"""

import inspect

VERSIONS_MARK = "hpcdist-versions"


def source_digest(folder: str) -> str:
    """Return a 12-digit digest of a package's modules and scripts, because equal versions may have different code."""
    import hashlib
    import os

    digest = hashlib.sha256()
    for path, folders, names in os.walk(folder):
        if path == folder and "examples" in folders:
            folders.remove("examples")  # a wheel contains programs that are outside of the package in a checkout
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".sh")):
                with open(os.path.join(path, name), "rb") as file:
                    digest.update(os.path.relpath(file.name, folder).encode() + b"\0" + file.read())
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Return installed versions: `python`, `hpcdist` and its `source` digest, `torch`, `cuda`, `nccl`, `driver`."""
    import importlib.util
    import os
    import platform
    import re

    facts = {"python": platform.python_version()}
    try:
        import hpcdist

        facts["hpcdist"] = hpcdist.__version__
        facts["source"] = source_digest(os.path.dirname(hpcdist.__file__))
    except (ImportError, AttributeError):  # the second one if only a folder of this name is left
        pass
    torch = importlib.util.find_spec("torch")
    package = os.path.dirname(torch.origin) if torch and torch.origin else ""
    for key, path, pattern in (
        ("torch", os.path.join(package, "version.py"), r"__version__ = '(.+)'"),
        ("cuda", os.path.join(package, "version.py"), r"(?m)^cuda\b[^=\n]*= '(.+)'"),
        ("driver", "/proc/driver/nvidia/version", r"Kernel Module(?: for \S+)?\s+([0-9.]+)"),
    ):
        if (package or key == "driver") and os.path.exists(path):
            with open(path) as file:
                match = re.search(pattern, file.read())
            if match:
                facts[key] = match[1]
    site_packages = os.path.dirname(package)
    for name in sorted(os.listdir(site_packages)) if package else ():
        match = re.match(r"nvidia_nccl_cu\d+-([0-9.]+)\.dist-info", name)
        if match:
            facts["nccl"] = match[1]
    return facts


def versions_program() -> str:
    """Return a program that prints the `versions` of the Python that runs it, behind the word VERSIONS_MARK."""
    return f"""
from __future__ import annotations
{inspect.getsource(source_digest)}
{inspect.getsource(versions)}
import json
print({VERSIONS_MARK!r}, json.dumps(versions()), flush=True)
"""


def version_of(distribution: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    from importlib import metadata  # 20 ms, which only `hpcdist doctor` needs

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
