"""Strings of the config in batch scripts: malicious ones are rejected or quoted."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
import yaml

from hpcdist.cli.submit import submission_flags
from hpcdist.config.loading import load_config
from hpcdist.errors import ConfigError, UserMistake
from hpcdist.run.folder import RunDir
from hpcdist.slurm.job import submit

PIECES = ("\n", "\r", "\x1b", "\u2028", "'", '"', "`touch x`", "$(touch x)", "; touch x;", "&& touch x", "|| touch x")
PIECES += (
    "#",
    "\\",
    "$HOME",
    "${IFS}",
    "größe",
    "-",
    " ",
    "*",
    "{a,b}",
    "!x",
    "\n#SBATCH --uid=0\n",
    "EOF\n",
    "%j",
)
TEXT_KEYS = (
    *(f"cluster.{name}" for name in ("partition", "account", "qos", "mem", "constraint", "exclude")),
    *("cluster.sbatch.comment", "cluster.srun.comment", "cluster.env.GREETING", "cluster.roles.trainer.constraint"),
    *("cluster.roles.trainer.sbatch.comment", "cluster.roles.trainer.partition", "cluster.roles.trainer.mem"),
    *("launch.env.GREETING", "container.image", "container.python", "experiment", "name", "runs_dir", "data.root"),
)
LIST_KEYS = ("container.mounts", "container.extra_args", "container.env")
NAME_KEYS = ("cluster.env", "launch.env", "cluster.sbatch", "cluster.srun", "roles", "cluster.roles.trainer.sbatch")


def hostile(seed: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 5)))


def tree_with(keys: list[str], value: object) -> dict[str, object]:
    *above, leaf = keys
    tree: dict[str, object] = {leaf: value}
    for key in reversed(above):
        tree = {key: tree}
    return tree


def rendered(path: Path, tree: dict[str, object]) -> tuple[str, dict[str, str]] | None:
    """Return the text of a dry run and the variables that its script sets; None if the config is rejected."""
    path.write_text(yaml.safe_dump(tree, allow_unicode=True))
    overrides = ["container.runtime=podman", *(["container.image=i"] if "container" not in tree else [])]
    try:
        config = load_config(path, overrides)
        script, step = submit.render(config, RunDir(Path(config.runs_dir) / config.experiment / (config.name or "r")))
    except UserMistake:
        return None
    return f"{script}\n# then:\n{submit.commented(step)}\n", dict(config.cluster.env)


@pytest.mark.processes
def test_hostile_text_is_rejected_or_quoted(tmp_path: Path) -> None:
    """Each script runs in a shell, in a folder that must stay empty."""
    folder = tmp_path / "empty"
    folder.mkdir()
    cases: list[tuple[str, dict[str, object]]] = []
    for seed in range(4):
        for key in TEXT_KEYS:
            cases.append((key, tree_with(key.split("."), hostile(seed))))
        for key in LIST_KEYS:
            cases.append((key, tree_with(key.split("."), [hostile(seed)])))
        for key in NAME_KEYS:
            cases.append((key, tree_with([*key.split("."), hostile(seed)], 1)))
    num_accepted = 0
    for number, (key, tree) in enumerate(cases):
        found = rendered(tmp_path / "run.yaml", tree)
        if found is None:
            continue
        num_accepted += 1
        text, variables = found
        # Only variables and comments: the supervisor must not start.
        head = text.partition("trap 'left=0' TERM")[0]
        tail = text.partition("# then:\n")[2]
        names = " ".join(f'"${name}"' for name in variables) or '""'
        script = f"{head}\n{tail}\nprintf '%s\\0' {names}\n"
        done = subprocess.run(
            ["bash", "--norc", "-c", script],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b""), (key, tree)
        if variables:
            assert done.stdout.decode().split("\0")[:-1] == list(variables.values()), (key, tree)
        if number % 10 == 0:
            whole = subprocess.run(["bash", "-n"], input=text.encode(), capture_output=True, check=False)
            assert whole.returncode == 0, (key, tree, whole.stderr)
    assert num_accepted > 15
    assert not [*folder.iterdir()]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("cluster.partition='a\nb'", "cluster.partition must be one line without control characters, got 'a\\nb'"),
        ("cluster.sbatch={comment: \"a\\nb\"}", "cluster.sbatch.comment must be one line without control characters"),
        ("cluster.env={'A B': c}", "cluster.env: 'A B' is not a valid variable name: use letters, digits and '_'"),
        ("launch.env={'A;touch x': c}", "launch.env: 'A;touch x' is not a valid variable name"),
        ("cluster.env={A: \"a\\0b\"}", "cluster.env.A must not contain a NUL character"),
        ("cluster.setup=[\"a\\0b\"]", "cluster.setup must not contain a NUL character"),
        ("cluster.sbatch={'x y': c}", "cluster.sbatch: 'x y' is not an option: use its long name, such as mail-type"),
        ("cluster.srun={'a=b': c}", "cluster.srun: 'a=b' is not an option"),
        ("cluster.roles={t: {partition: \"a\\nb\"}}", "cluster.roles.t.partition must be one line without control"),
        ("container.extra_args=[\"a\\nb\"]", "container.extra_args must be one line without control characters"),
        ("runs_dir=\"a\\nb\"", "runs_dir must be one line without control characters, got"),
    ],
)  # fmt: skip
def test_what_no_script_can_hold(override: str, problem: str) -> None:
    if "\n" in override:  # as a shell passes it
        override = override.replace("'a\nb'", '"a\\nb"')
    with pytest.raises(ConfigError) as caught:
        load_config("ddp_digits", [override])
    assert [line for line in caught.value.problems if line.startswith(problem)], caught.value.problems
    assert len(str(caught.value)) < 400


def test_flag_of_a_submission_must_be_one_line() -> None:
    with pytest.raises(
        UserMistake, match=r"^--begin must be one line without control characters, got 'now\\ntouch x'$"
    ):
        submission_flags(load_config("ddp_digits"), None, "now\ntouch x")


def test_every_line_of_a_comment_is_commented() -> None:
    assert submit.commented("srun 'a\nb'") == "# srun 'a\n# b'"
