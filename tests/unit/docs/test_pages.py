"""The documentation names only paths, modules, config keys and commands that exist."""

from __future__ import annotations

import ast
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
_KEY = re.compile(r"`([a-z_]+)\.([a-z_]+(?:\.\w+)*)(?:=[^`]*)?`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
#: Not modules: MLflow tags, labels of containers, and names of packages and images.
_OTHER_NAMES = re.compile(
    r"hpcdist\.(image|state|reason|git|run|job|attempt|world|sbom|base|traceback|command|monitor|nodes|versions|lost"
    r"|rerun_of|best|cost|interruptions|slurm\.nodes|python|container$|rank_environment$)"
)


@pytest.mark.parametrize("page", PAGES)
def test_named_paths_exist(page: Path) -> None:
    assert [name for name in _PATH.findall(page.read_text()) if not _exists(name)] == []


def _exists(name: str) -> bool:
    path = ROOT / name
    # Files and folders that a command creates.
    return path.exists() or name.startswith("docker/secrets") or name.rstrip("/") in {"docker/.env", "docker/stop"}


@pytest.mark.parametrize("page", PAGES)
def test_named_modules_exist(page: Path) -> None:
    names = {name for name in _MODULE.findall(page.read_text()) if not _OTHER_NAMES.match(name)}
    assert [name for name in sorted(names) if not _is_defined(name)] == []


def _is_defined(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute that a module's source defines."""
    path = ROOT.joinpath(*name.split("."))
    sources = [path.parent.with_suffix(".py"), path.parent / "__init__.py"]
    return (
        path.is_dir()
        or path.with_suffix(".py").exists()
        or any(source.exists() and path.name in source.read_text() for source in sources)
    )


def test_files_that_comments_of_the_code_name_exist() -> None:
    """A comment names a file by its path in the repository or in the package, or by its name in its own package."""
    missing = [
        (str(path.relative_to(ROOT)), name)
        for path in sorted((ROOT / "hpcdist").rglob("*.py"))
        for name in re.findall(r"(?:`|\bsee )((?:\w+/)*\w+\.py)\b", path.read_text())
        if name != "train.py"  # a user's script
        and not any((folder / name).exists() for folder in (ROOT, ROOT / "hpcdist", path.parent))
    ]
    assert missing == []


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
    """A block marked `profile` is a site profile, that is the keys of the section `cluster`."""
    text = block.text
    if "profile" in block.words:
        given = yaml.safe_load(text)
        sections = {key: given.pop(key) for key in ("container",) if key in given}
        text = yaml.safe_dump({"trainer": "ddp", "cluster": given, **sections})
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert load_config(str(path)).trainer.target


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


@pytest.mark.parametrize("page", PAGES)
def test_named_config_keys_exist(page: Path) -> None:
    known = _known_keys()
    sections = {key.partition(".")[0] for key in known if "." in key}
    named = {
        f"{match[1]}.{match[2]}": match[1] for match in _KEY.finditer(page.read_text()) if match[2] not in ("pt", "py")
    }
    unknown = [
        name
        for name, section in named.items()
        if section in sections and not any(name.startswith(key) or key.startswith(name) for key in known - sections)
    ]
    assert unknown == []


def _known_keys() -> set[str]:
    from hpcdist.config.describe import describe

    keys = {row[0] for row in describe()}
    return keys | {key.partition(".")[0] for key in keys}


#: Mechanisms that a reader looks up in docs/concepts, and a part of the path of the module in charge.
LOOKUPS = [
    ("requeue decision", "slurm/job/batch_step"),
    ("signal forwarding", "containers/pid1"),
    ("lease", "run/lease"),
    ("nodelist parsing", "host/nodelist"),
    ("MLflow retry", "tracking/shipper"),
    ("checkpoint manifest", "checkpoint/folder"),
    ("stop agreement", "rank/stopping"),
    ("straggler rule", "supervisor/stragglers"),
    ("PPO update", "trainers/rl/train"),
    ("parameter-server exchange", "trainers/hybrid/exchange"),
]


READ_FIRST = ROOT / "docs" / "concepts" / "read-first.md"
OTHER_PAGES = ("index.md", "records.md", READ_FIRST.name)
CONCEPTS = [page for page in sorted(READ_FIRST.parent.glob("*.md")) if page.name not in OTHER_PAGES]


def modules_in_charge(page: Path) -> list[str]:
    """Return the rows of the section "In the code", with which each concept page ends."""
    _, _, section = page.read_text().partition("\n## In the code\n")
    return section.strip().splitlines()[2:]


@pytest.mark.parametrize("page", CONCEPTS, ids=[page.stem for page in CONCEPTS])
def test_concept_page_ends_with_modules_in_charge(page: Path) -> None:
    rows = modules_in_charge(page)
    assert rows
    assert [row for row in rows if not re.fullmatch(r"\| .+ \| `hpcdist/[^|]+` \|", row)] == []


@pytest.mark.parametrize(("mechanism", "module"), LOOKUPS, ids=[mechanism for mechanism, _ in LOOKUPS])
def test_concepts_lead_to_module_of_mechanism(mechanism: str, module: str) -> None:
    rows = [row for page in CONCEPTS for row in modules_in_charge(page)]
    assert [row for row in rows if mechanism.lower() in row.lower() and f"`hpcdist/{module}" in row] != []


def test_ways_through_the_code_are_short_and_name_what_is_there() -> None:
    ways = [
        re.findall(r"(?m)^\d+\. `(hpcdist/\S+)` \((.*?)\):", section)
        for section in READ_FIRST.read_text().split("\n## ")[1:]
    ]
    assert [len(way) <= limit for way, limit in zip(ways, (22, 9, 22), strict=True)] == [True] * 3
    missing = [
        (path, name)
        for way in ways
        for path, names in way
        for name in re.findall(r"`(\w+)`", names)
        if not re.search(rf"(?:def|class) {name}\b", (ROOT / path).read_text())
    ]
    assert missing == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_pictures_are_small() -> None:
    pictures = sorted((ROOT / "docs" / "images").iterdir())
    assert {picture.suffix for picture in pictures} <= {".svg", ".png"}
    assert [picture.name for picture in pictures if picture.stat().st_size > 200_000] == []


def test_no_command_installs_hpcdist_from_a_package_index() -> None:
    """The name is not registered there, so that such a command installs nothing, or the package of a stranger."""
    sources = [*(ROOT / "hpcdist").rglob("*.py"), *(ROOT / "hpcdist").rglob("*.html")]
    texts = {path: path.read_text() for path in [*pages(), *sources]}
    assert [path for path, text in texts.items() if re.search(r"pip install [^`#\n]*\bhpcdist\b(?!/)", text)] == []


def test_python_blocks_are_valid() -> None:
    texts = [block.text for page in pages() for block in blocks(page) if block.language == "python"]
    assert [type(ast.parse(text)) for text in texts] == [ast.Module] * len(texts)
    assert texts
