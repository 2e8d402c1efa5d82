"""The documentation names only paths, modules, config keys and commands that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import hooks
import pytest
import yaml
from doc_blocks import ROOT, Block, blocks, pages
from generators import config, findings, messages
from typer.testing import CliRunner

from hpcdist.cli.app import make_app
from hpcdist.config.describe import describe
from hpcdist.config.loading import load_config

PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages()]
KEYS = {row[0] for row in describe()}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
_PATH = re.compile(
    r"(?<![\w./-])((?:hpcdist|tests|benchmarks|scripts|docker|slurm|examples|configs|docs)/[\w./-]*[\w/])(?![\w*])"
)
_MODULE = re.compile(r"(?<![\w./-])hpcdist(?:\.[a-z_]\w*)+(?!\w*[(/])")
_KEY = re.compile(r"`([a-z_]+)\.([a-z_]+(?:\.\w+)*)(?:=[^`]*)?`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
#: Not modules: MLflow tags, labels of containers, and names of packages and images.
_OTHER_NAMES = re.compile(
    r"hpcdist\.(image|state|reason|git|run|job|attempt|world|sbom|base|traceback|command|monitor|nodes|devices|cpu|versions"
    r"|lost|like\.run|like\.run_id|best|cost|setting|interruptions|slurm\.nodes|python|container$|rank_environment$|init_from\.)"
)


#: Files and folders that a command creates.
_CREATED = ("docker/secrets", "docker/.env", "docker/stop")


@pytest.mark.parametrize("page", PAGES)
def test_named_paths_modules_and_links_exist(page: Path) -> None:
    text = page.read_text()
    paths = [name for name in _PATH.findall(text) if not name.startswith(_CREATED)]
    assert [name for name in paths if not (ROOT / name).exists()] == []
    modules = {name for name in _MODULE.findall(text) if not _OTHER_NAMES.match(name)}
    assert [name for name in sorted(modules) if not _is_defined(name)] == []
    targets = [link.partition("#")[0] for link in _LINK.findall(text) if "://" not in link]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


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
def test_named_config_keys_exist(page: Path) -> None:
    """Those of overrides in commands, and those in the text."""
    unknown = [
        word
        for block in blocks(page)
        if block.language == "console"
        for command in block.commands
        if re.match(r"(sbatch slurm/run.sbatch|hpcdist (run|submit|resume|config|bench)) ", command)
        for word in re.findall(r"(?:^|[\s'])([a-z_]+(?:\.[\w]+)*)=", command)
        if not any(word == key or word.startswith(f"{key}.") for key in KEYS | SECTIONS)
    ]
    named = [match for match in _KEY.finditer(page.read_text()) if match[2] not in ("pt", "py")]
    unknown += [
        name
        for section, name in ((match[1], f"{match[1]}.{match[2]}") for match in named)
        if section in SECTIONS and not any(name.startswith(key) or key.startswith(name) for key in KEYS)
    ]
    assert unknown == []


READ_FIRST = ROOT / "docs" / "internals" / "read-first.md"


#: Pages that may name files of the repository and dates.
_FOR_DEVELOPERS = ("internals/read-first.md", "internals/test-suites.md", "reference/tested-versions.md")


def test_pages_for_users_name_no_modules_and_no_dates() -> None:
    users = [page for page in sorted((ROOT / "docs").rglob("*.md")) if not str(page).endswith(_FOR_DEVELOPERS)]
    found = {
        page.name: re.findall(
            r"`hpcdist/|`tests/|\b20\d\d-\d\d-\d\d\b(?! \d\d:)", hooks.MARKER.sub("", page.read_text())
        )
        for page in users
    }
    assert {name: words for name, words in found.items() if words} == {}


#: Words of a page that a reader takes in at one sitting, about seven minutes.
_MAX_WORDS = 1_500


def test_pages_for_users_are_short_enough_for_one_sitting() -> None:
    """Generated parts are not counted."""
    users = [page for page in (ROOT / "docs").rglob("*.md") if not str(page).endswith(_FOR_DEVELOPERS)]
    words = {page: len(hooks.MARKER.sub("", page.read_text()).split()) for page in users}
    assert {page: number for page, number in words.items() if number > _MAX_WORDS} == {}


def test_ways_through_the_code_are_short_and_name_what_is_there() -> None:
    ways = [
        re.findall(r"(?m)^\d+\. `(hpcdist/\S+)` \((.*?)\):", section)
        for section in READ_FIRST.read_text().split("\n## ")[1:4]
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


# --- The workflow of GitHub Actions is valid and runs targets of the Makefile.


WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def test_jobs_run_make_targets_that_exist_and_have_timeouts() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    called = {match for step in steps for match in re.findall(r"^make (\w+)", step.get("run", ""))}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"test", "slow"} <= called <= targets
    assert {name for job in jobs.values() for name in job.get("needs", [])} <= set(jobs)
    assert [name for name, job in jobs.items() if "timeout-minutes" not in job] == []


def test_actions_are_pinned_to_commits_and_images_to_digests() -> None:
    text = WORKFLOW.read_text()
    uses = re.findall(r"uses: (.+)", text)
    assert uses
    assert [one for one in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []
    compose, mlflow = ((ROOT / "docker" / name).read_text() for name in ("compose.yaml", "mlflow.Dockerfile"))
    for found in (text, compose, mlflow):
        assert len(re.findall(r"(?:image: |BASE_IMAGE=).*@sha256:[0-9a-f]{64}}?$", found, re.MULTILINE)) == 1


# --- generated parts of the reference pages


@pytest.mark.parametrize("name", hooks.GENERATORS)
def test_generator_writes_a_part_that_a_page_shows(name: str) -> None:
    assert hooks.GENERATORS[name]().count("\n") > 5
    assert [page for page in pages() if f"<!-- generated: {name} -->\n" in page.read_text()]


def test_output_of_a_generator_replaces_its_marker() -> None:
    for marker in ("<!-- generated: configs -->", "<!-- generated: configs -->\n\nold\n\n<!-- end -->"):
        page = hooks.on_page_markdown(f"# Config\n\n{marker}\n")
        assert page.startswith("# Config\n\n| config | content |\n")
        assert "<!--" not in page
    with pytest.raises(KeyError, match="unknown"):
        hooks.on_page_markdown("<!-- generated: unknown -->")


@pytest.mark.parametrize("page", PAGES)
def test_kept_output_of_generators_is_current(page: Path) -> None:
    """If this test fails, run: python docs/hooks.py"""
    assert page.read_text() == hooks.with_kept(page.read_text())


def test_every_config_key_is_documented() -> None:
    assert [key for key, _, _, documentation in describe() if not documentation] == []


def test_json_schema_of_the_config_is_current() -> None:
    """If this test fails, run: hpcdist config --json-schema > docs/config.schema.json"""
    printed = CliRunner().invoke(make_app(), ["config", "--json-schema"]).stdout
    assert config.SCHEMA.read_text() == printed


def test_messages_come_from_raise_statements_and_validation() -> None:
    tree = ast.parse(
        "def f(value):\n    raise DataError(f'{value.path} cannot be read: fetch it again')\n"
        "def g(config):\n    problems = []\n    problems.append(f'optim.lr must be > 0, got {config.lr}')\n"
        "    raise ValueError('is not a message to users')\n"
        "def h():\n    raise ExportError(f'safetensors is not installed: {install_command(\"export\")}')\n"
    )
    assert set(messages.raised_messages(tree)) == {
        ("{path} cannot be read: fetch it again", "DataError"),
        ("optim.lr must be > 0, got {lr}", "ConfigError"),
        ("safetensors is not installed: `pip install '.[export]'` in a checkout of hpcdist", "ExportError"),
    }


def test_rendered_code_blocks_have_no_words_for_tests() -> None:
    """The renderer takes a block with further words for text: all headings up to the next block are lost."""
    pages = (ROOT / "docs").rglob("*.md")
    rendered = {page: hooks.WORDS_FOR_TESTS.sub(r"\1", page.read_text()) for page in pages}
    left = [page for page, text in rendered.items() if re.search(r"^ *```[a-z]+ ", text, re.MULTILINE)]
    assert left == []
    assert hooks.on_page_markdown("```console test slurm\n$ hpcdist run\n```\n") == "```console\n$ hpcdist run\n```\n"


CHECKS = """\
def check(value):
    about = "size"
    if value < 1:
        fix = f"raise {value}; {ADVICE}"
        return failure(about, "it is too small", fix)
    elif value > 9:
        return failure(about, "it is too large", "reduce it")
    text, fix = problem_of(value)
    yield warning(about, text, fix)
    fix = read_fix()
    yield note(value.name, f"it is {text}, not a round number", fix)
"""
AMBIGUOUS = """\
def check(value):
    fix = ""
    if value < 1:
        fix = "raise it"
    return warning("size", "it is too small", fix)
"""


def test_findings_have_the_fix_of_their_own_branch() -> None:
    found = list(findings.findings_in(ast.parse(CHECKS), {"ADVICE": "see the manual"}))
    assert found == [
        ("size", "`it is too small`", "raise {value}; see the manual"),
        ("size", "`it is too large`", "reduce it"),
        ("{name}", "`it is {text}, not a round number`", "{fix}"),
    ]


def test_a_finding_with_one_of_several_fixes_is_refused() -> None:
    with pytest.raises(ValueError, match="line 5: fix may have several texts"):
        list(findings.findings_in(ast.parse(AMBIGUOUS), {}))
