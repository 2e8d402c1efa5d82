"""`hpcdist image check`: start an image and verify its contents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hpcdist
from hpcdist.containers.images.engine import Engine, error_line
from hpcdist.containers.images.labels import ENTRYPOINT, ImageFacts, inspect, read_sbom, require_fit
from hpcdist.errors import ImageError
from hpcdist.files.bounded_json import parse_object
from hpcdist.machine.check import Check
from hpcdist.machine.timed_command import last_line

#: Runs inside the image and prints one JSON object. It imports hpcdist's modules and its declared dependencies.
SELF_TEST = Path(__file__).with_name("self_test.py")
_KEYS = ("uid", "versions", "num_imports", "failed_imports", "cuda", "rdma", "compile")
#: Two ranks on CPUs, so that the check means the same on a machine with any number of GPUs.
TRAINING = (
    "ddp_digits",
    "stop.max_steps=20",
    "launch.num_ranks=2",
    "launch.device=cpu",
    "runs_dir=/tmp/check",
    "name=check",
)


def check_image(engine: Engine, image: str) -> Iterator[Check]:
    """Yield the result of each check as soon as it is known.

    Raises:
        ImageError: the image cannot be started.
    """
    facts = inspect(engine, image)
    require_fit(facts)
    yield _result("digest", facts.digest)
    yield _result("architecture", facts.architecture)
    yield _result("base", facts.base or "its labels name none")
    yield _sbom(engine, facts)
    yield _result("entrypoint", " ".join(facts.entrypoint), facts.entrypoint == ENTRYPOINT)
    yield from _inside(facts, _self_test(engine, image))
    yield _training(engine, image)


def _result(name: str, text: str, good: bool = True) -> Check:
    return Check(name=name, level="ok" if good else "failure", text=text)


def _sbom(engine: Engine, facts: ImageFacts) -> Check:
    try:
        components = parse_object(read_sbom(engine, facts), "components")["components"]
    except (ImageError, ValueError) as error:
        return _result("bill of materials", str(error), False)
    return _result("bill of materials", f"{len(components)} components, `hpcdist image sbom` prints it")


def _self_test(engine: Engine, image: str) -> dict[str, Any]:
    command = ("run", "--rm", "--interactive", "--entrypoint", "python3", image, "-")
    done = engine.run(*command, stdin=SELF_TEST.read_text())
    if done.returncode:
        raise ImageError(f"image {image} cannot be started: {error_line(done.stderr)}")
    try:
        return parse_object(done.stdout.strip().rpartition("\n")[2], *_KEYS)
    except ValueError as error:
        raise ImageError(f"the self-test of image {image} gives no valid answer: {error}") from error


def _inside(facts: ImageFacts, found: dict[str, Any]) -> Iterator[Check]:
    yield _result("user", f"uid {found['uid']}", found["uid"] != 0)
    versions = found["versions"]
    yield _result("hpcdist", versions["hpcdist"], versions["hpcdist"] == hpcdist.__version__ == facts.version)
    failed = found["failed_imports"]
    errors = "; ".join(f"{name}: {error}" for name, error in failed.items())
    yield _result("imports", errors or f"{found['num_imports']} modules", not failed)
    yield _result("versions", ", ".join(f"{name} {version}" for name, version in sorted(versions.items())))
    yield _result("CUDA", found["cuda"] or "torch is built without it")
    missing = [name for name, loads in found["rdma"].items() if not loads]
    yield _result("RDMA", f"missing: {', '.join(missing)}" if missing else ", ".join(found["rdma"]), not missing)
    yield _result("torch.compile", found["compile"] or "can be used")


def _training(engine: Engine, image: str) -> Check:
    done = engine.run("run", "--rm", "--ipc=host", image, "run", *TRAINING)
    good = done.returncode == 0 and "finished" in last_line(done.stdout)
    return _result("training on 2 ranks", last_line(done.stdout if good else done.stdout + done.stderr), good)
