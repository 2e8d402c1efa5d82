"""The documentation names only paths, modules, config keys and commands that exist."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from doc_blocks import ROOT, Block, blocks, pages

from hpcdist.config.loading import load_config

PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages()]
_PATH = re.compile(
    r"(?<![\w./-])((?:hpcdist|tests|benchmarks|scripts|docker|slurm|examples|configs|docs)/[\w./-]*[\w/])(?![\w*])"
)
_MODULE = re.compile(r"(?<![\w./-])hpcdist(?:\.[a-z_]\w*)+(?!\w*[(/])")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
#: Not modules: MLflow tags, labels of containers, and names of packages and images.
_OTHER_NAMES = re.compile(r"hpcdist\.(image|state|reason|git|run|job|attempt|world|sbom|base|traceback|command)")


@pytest.mark.parametrize("page", PAGES)
def test_named_paths_exist(page: Path) -> None:
    missing = [name for name in _PATH.findall(page.read_text()) if not _exists(name)]
    assert missing == []


def _exists(name: str) -> bool:
    path = ROOT / name
    # Folders that a command makes.
    return path.exists() or name.startswith("docker/secrets") or name.rstrip("/") in {"docker/.env", "docker/stop"}


@pytest.mark.parametrize("page", PAGES)
def test_named_modules_exist(page: Path) -> None:
    names = {name for name in _MODULE.findall(page.read_text()) if not _OTHER_NAMES.match(name)}
    assert [name for name in sorted(names) if not _is_importable(name)] == []


def _is_importable(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute that a module's source defines."""
    module, _, attribute = name.rpartition(".")
    try:
        if importlib.util.find_spec(name) is not None:
            return True
    except ModuleNotFoundError:
        pass
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    return spec is not None and bool(spec.origin) and attribute in Path(str(spec.origin)).read_text()


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_files(page: Path) -> None:
    targets = [link.partition("#")[0] for link in _LINK.findall(page.read_text()) if "://" not in link]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


def yaml_blocks() -> Iterator[object]:
    for page in pages():
        for number, block in enumerate(blocks(page)):
            if block.language == "yaml":
                yield pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")


@pytest.mark.parametrize("block", [*yaml_blocks()])
def test_yaml_blocks_load_as_configs(block: Block, tmp_path: Path) -> None:
    """A block marked `profile` is a site profile: the keys of the section `cluster`."""
    text = block.text
    if "profile" in block.words:
        given = yaml.safe_load(text)
        sections = {key: given.pop(key) for key in ("container",) if key in given}
        text = yaml.safe_dump({"trainer": "ddp", "cluster": given, **sections})
    path = tmp_path / "config.yaml"
    path.write_text(text)
    load_config(str(path))


@pytest.mark.parametrize("page", PAGES)
def test_overrides_in_commands_are_config_keys(page: Path) -> None:
    known = _known_keys()
    unknown = [
        word
        for block in blocks(page)
        if block.language == "console"
        for command in block.commands
        if re.match(r"(sbatch slurm/run.sbatch|hpcdist (run|submit|resume|config|bench)) ", command)
        for word in re.findall(r"(?:^|[\s'])([a-z_]+(?:\.[\w]+)*)=", command)
        if not any(word == key or word.startswith(f"{key}.") for key in known)
    ]
    assert unknown == []


def _known_keys() -> set[str]:
    from hpcdist.config.schema.describe import describe

    keys = {row[0] for row in describe()}
    return keys | {key.partition(".")[0] for key in keys}


#: Questions that a reader of docs/concepts answers with a file: a phrase of the page, and a word of the file's path.
LOOKUPS = [
    ("requeue decision", "batch_step"),
    ("signal forwarding", "pid1"),
    ("lease", "run/lease"),
    ("nodelist parsing", "slurm/nodelist"),
    ("MLflow retry", "tracking/shipper"),
    ("checkpoint manifest", "checkpoint/"),
    ("stop agreement", "stop_agreement"),
    ("straggler rule", "supervisor/stragglers"),
    ("PPO update", "rl/ppo"),
    ("parameter-server exchange", "hybrid/table_server"),
]


@pytest.mark.parametrize(("phrase", "file"), LOOKUPS, ids=[phrase for phrase, _ in LOOKUPS])
def test_concepts_lead_to_the_file(phrase: str, file: str) -> None:
    text = "\n\n".join(page.read_text() for page in sorted((ROOT / "docs" / "concepts").glob("*.md")))
    places = [match.start() for match in re.finditer(re.escape(phrase), text, re.IGNORECASE)]
    assert any(file in text[max(0, place - 600) : place + 1200] for place in places)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_pictures_are_small() -> None:
    pictures = sorted((ROOT / "docs" / "images").iterdir())
    assert {picture.suffix for picture in pictures} <= {".svg", ".png"}
    assert [picture.name for picture in pictures if picture.stat().st_size > 200_000] == []


def test_python_blocks_are_valid() -> None:
    for page in pages():
        for block in blocks(page):
            if block.language == "python":
                compile(block.text, str(page.relative_to(ROOT)), "exec")
