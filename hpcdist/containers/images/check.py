"""Start an image and see whether it is what it should be."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpcdist
from hpcdist.containers.images.engine import Engine, last_line
from hpcdist.containers.images.labels import ENTRYPOINT, ImageFacts, inspect, read_sbom, require_fit
from hpcdist.errors import ImageError

#: Runs inside; prints one JSON object. What it imports is what hpcdist declares, and every module of hpcdist.
PROBE = Path(__file__).with_name("probe.py")
#: Two ranks on CPUs, so that the check means the same on a machine with any number of GPUs.
TRAINING = (
    "ddp_digits",
    "stop.max_steps=20",
    "launch.num_ranks=2",
    "launch.device=cpu",
    "runs_dir=/tmp/check",
    "name=check",
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    said: str
    good: bool


def check(engine: Engine, image: str) -> Iterator[Finding]:
    """Look at one thing after the other. Raises ImageError when the image cannot even be started."""
    facts = inspect(engine, image)
    require_fit(facts)
    yield Finding("digest", facts.digest, True)
    yield Finding("architecture", facts.architecture, True)
    yield Finding("base", facts.base or "its labels name none", True)
    yield _sbom(engine, facts)
    yield Finding("entrypoint", " ".join(facts.entrypoint), facts.entrypoint == ENTRYPOINT)
    yield from _inside(facts, _probe(engine, image))
    yield _training(engine, image)


def _sbom(engine: Engine, facts: ImageFacts) -> Finding:
    try:
        components = json.loads(read_sbom(engine, facts))["components"]
    except ImageError as error:
        return Finding("bill of materials", str(error), False)
    return Finding("bill of materials", f"{len(components)} components, `hpcdist image sbom` prints it", True)


def _probe(engine: Engine, image: str) -> dict[str, Any]:
    words = [engine.name, "run", "--rm", "--interactive", "--entrypoint", "python3", image, "-"]
    done = subprocess.run(words, input=PROBE.read_text(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImageError(f"image {image} cannot be started: {last_line(done.stderr)}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _inside(facts: ImageFacts, found: dict[str, Any]) -> Iterator[Finding]:
    yield Finding("user", f"uid {found['uid']}", found["uid"] != 0)
    versions = found["versions"]
    yield Finding("hpcdist", versions["hpcdist"], versions["hpcdist"] == hpcdist.__version__ == facts.version)
    failed = found["failed_imports"]
    said = "; ".join(f"{name}: {why}" for name, why in failed.items())
    yield Finding("imports", said or f"{found['num_imports']} modules", not failed)
    yield Finding("versions", ", ".join(f"{name} {version}" for name, version in sorted(versions.items())), True)
    yield Finding("CUDA", found["cuda"] or "torch is built without it", True)
    missing = [name for name, there in found["rdma"].items() if not there]
    yield Finding("RDMA", f"missing: {', '.join(missing)}" if missing else ", ".join(found["rdma"]), not missing)
    yield Finding("torch.compile", found["compile"] or "can be used", True)


def _training(engine: Engine, image: str) -> Finding:
    words = [engine.name, "run", "--rm", "--ipc=host", image, "run", *TRAINING]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    good = done.returncode == 0 and "finished" in last_line(done.stdout)
    return Finding("training on 2 ranks", last_line(done.stdout if good else done.stdout + done.stderr), good)
