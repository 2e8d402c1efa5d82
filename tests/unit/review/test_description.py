"""The description of a run and of a sweep in MLflow."""

import math
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcdist.config.cluster_schema import ClusterConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import TrainerConfig
from hpcdist.config.written import StoredConfig
from hpcdist.errors import duration
from hpcdist.review.comparison import compare_settings
from hpcdist.review.description import attempt_rows, describe, setup_rows, wrapped
from hpcdist.review.explain import Finding
from hpcdist.review.facts import AttemptFacts, CheckpointFacts, LiveProgress, RunFacts
from hpcdist.review.ledger import Entry, Ledger
from hpcdist.review.markdown import Markdown, escaped, table, with_code
from hpcdist.review.sweep_facts import CellFacts, SweepFacts, describe_sweep
from hpcdist.run.config_origin import Override
from hpcdist.run.figures import Text
from hpcdist.run.folder import State
from hpcdist.run.training_record import DatasetRecord

GAP = "&nbsp;&nbsp;|"
FIRST = AttemptFacts(
    number=1, started=1000.0, ended=1600.0, status="failed", cause="rank 1 | was <b>killed</b>", nodes=("n1", "n2"),
    first_step=0, last_step=120, steps_lost=20,
)  # fmt: skip
SECOND = AttemptFacts(number=2, started=2000.0, ended=None, status="running", cause="", first_step=100, last_step=200)
BEST = CheckpointFacts(path=Path("/runs/c/step-00000100"), step=100, created=1500.0, metrics={"eval/loss": 0.25})
FACTS = RunFacts(
    name="first",
    experiment="exp",
    folder=Path("/runs/exp/first"),
    run_id="abc",
    experiment_id="1",
    state=State(status="running", attempt=2, world_size=4),
    launcher="slurm",
    cwd="/home/a b",
    git_commit="c0ffee",
    git_dirty=True,
    has_patch=True,
    trainer="ddp",
    stored=StoredConfig(
        config=Config(trainer=TrainerConfig(target="mine:train")), values={"container.runtime": "none"}
    ),
    config_name="mine.yaml",
    cluster_name="site",
    overrides={"optim.lr": Override(before=0.1, after=0.01), "params.text": Override(before=None, after="x $y")},
    command="hpcdist submit mine.yaml --cluster site optim.lr=0.01",
    num_parameters=12345,
    datasets=(DatasetRecord(name="digits", num_samples=1437, digest="ab12"),),
    monitor="eval/loss",
    monitor_mode="min",
    checkpoints=(BEST,),
    best=BEST,
    attempts=(FIRST, SECOND),
    progress=LiveProgress(step=200, total_steps=400, seen=2300.0, steps_per_s=0.5, time_limit=5900.0),
)


def plain(markdown: str) -> str:
    """Return Markdown without backslashes and spaces of tables."""
    return re.sub(r"\\(?=[^\n])", "", markdown).replace(GAP, " |")


def described(facts: RunFacts, ledger: Ledger | None = None, max_chars: int = 8000) -> str:
    text = describe(facts, ledger or Ledger(), max_chars=max_chars, now=2300.0)
    assert len(text) <= max(0, max_chars)
    return plain(text)


def test_memory_of_a_full_gpu_is_on_the_page() -> None:
    finding = Finding(cause="the GPU's memory is full", fix="reduce it", memory=("15.0 GiB allocated", "3.0 GiB: f"))
    failed = replace(FACTS, state=replace(FACTS.state, status="failed", reason="rank 0 failed"))
    assert "```text\n15.0 GiB allocated\n3.0 GiB: f\n```" in describe(failed, Ledger(), finding, max_chars=8000)


def test_description_of_a_live_run() -> None:
    text = described(FACTS)
    assert text.startswith(
        "**eval/loss 0.25 at step 100 so far** · 1 interruption, 20 steps lost\n\n**running**\n\n"
        "Progress at 1970-01-01 00:38 UTC: step 200 of 400 (50 %); last heartbeat 0 s before;"
        " ends in about 6 min 40 s (1970-01-01 00:45 UTC);"
        " last save at step 100 (1970-01-01 00:25 UTC); time limit in 1 h (1970-01-01 01:38 UTC).\n"
    )
    for row in (
        "| **Overrides** | optim.lr = 0.01 (config: 0.1)<br>params.text = x &#36;y (config: null) |",
        "\n\n[uncommitted changes](#/experiments/1/runs/abc/artifacts/code.patch.txt?workflowType=machine_learning)",
        "- best checkpoint, with the lowest eval/loss: /runs/c/step-00000100\n"
        "- [checkpoints of all runs with their values](#/experiments/1/models?workflowType=machine_learning)\n",
        "The best checkpoint, step 100, from its folder:\n\n```python\n",
        "| 1 | 1970-01-01 00:16 | 10 min | n1, n2 | 1 to 120 | 20 | interrupted |"
        " rank 1 &#124; was &lt;b&gt;killed&lt;/b&gt; |"
        " [logs](#/experiments/1/runs/abc/artifacts/logs/attempt-001?workflowType=machine_learning) |",
        "| 2 | 1970-01-01 00:33 |  |  | 101 to 200 |  | running |  |"
        " [logs](#/experiments/1/runs/abc/artifacts/logs/attempt-002?workflowType=machine_learning) |",
        "import load_weights\n\nfolder = '/runs/c/step-00000100'\nstate_dict = load_weights(folder)\n```",
        "### Run it again\n\nWith its config and its code, and a comparison of the logged values, where its folder is:"
        "\n\n```bash\nhpcdist rerun /runs/exp/first\n```\n\nThe command that started it:\n\n```bash\n"
        "cd '/home/a b' && hpcdist submit mine.yaml --cluster site optim.lr=0.01\n",
    ):
        assert row in text
    failed = replace(FIRST, failure="error")
    with_bug = described(replace(FACTS, attempts=(failed, SECOND)))
    assert " · 1 failure, 20 steps lost\n" in with_bug, "a bug"
    assert " | 1 to 120 | 20 | failed |" in with_bug
    assert "### Cost" not in text, "the ledger is empty"
    best = replace(BEST, metrics={"eval/accuracy": 356 / 364})
    data = (DatasetRecord(name="digits", split="test", num_samples=364),)
    accurate = described(replace(FACTS, monitor="eval/accuracy", best=best, datasets=data))
    assert accurate.startswith("**eval/accuracy 0.978 ± 0.008 at step 100 so far** · 1 interruption")
    for devices, shown in (
        ("2 × NVIDIA A100, 2 × CPU", "4 on 2 × NVIDIA A100, 2 × CPU"),
        ("CPU", "4 on the CPU"),
        ("", "4"),
    ):
        assert f"| **Ranks** | {shown} (earlier attempts: n1, n2) |" in described(replace(FACTS, devices=devices))
    begun = described(replace(FACTS, progress=None))
    assert "\n\nState at 1970-01-01 00:38 UTC: no step is done yet in this attempt.\n" in begun
    queued = described(replace(FACTS, progress=None, state=State(status="queued", reason="preempted")))
    assert "\n\nState at 1970-01-01 00:38 UTC.\n\n### Setup" in queued
    job = replace(FACTS, launcher="slurm", tracking_uri="sqlite:////runs/mlflow.db")
    note = "\n\nThe job cannot write to this database: the page follows the run while `hpcdist ui` "
    assert note in described(job)
    assert note not in described(replace(job, tracking_uri="http://mlflow"))
    assert note not in described(replace(job, state=State(status="finished", reason="why", ended=1600.0)))
    ended = described(replace(FACTS, progress=None, state=State(status="failed", reason="why", ended=1600.0)))
    assert "\n\nState at 1970-01-01 00:26 UTC, when it ended.\n" in ended


FINISHED = replace(
    FACTS, state=State(status="finished", reason="trained 400 steps", attempt=2), progress=None, has_model=True
)
LOADS_FINAL = (
    "The final model, after step 200, from MLflow, with `MLFLOW_TRACKING_URI` as the address of this store; it"
    " needs no hpcdist unless the code of the model does:\n\n```python\nimport mlflow\n\n"
    'model = mlflow.pytorch.load_model("runs:/abc/model")\n```\n\n'
    "The best checkpoint, step 100, from MLflow:\n\n```python\nimport mlflow\n"
    "from hpcdist.checkpoint.state import load_weights\n\n"
    'uri = "runs:/abc/checkpoints/best"\n'
    "state_dict = load_weights(mlflow.artifacts.download_artifacts(uri))\n```"
)


def test_description_of_a_finished_run() -> None:
    entries = (
        Entry(cause="compute", attempt=1, node="n1", seconds=5400.0),
        Entry(cause="down", attempt=0, node="n1", seconds=1800.0),
        Entry(cause="data", attempt=1, node="n1", seconds=0.5),
    )
    site = ClusterConfig(price_per_gpu_hour="$3")
    text = described(FINISHED, Ledger(unit="GPU", entries=entries, queue_s=90.0, site=site))
    first = "**eval/loss 0.25 at step 100** · 2 GPU-hours, &#36;6 · 1 interruption, 20 steps lost\n"
    assert text.startswith(f"{first}\n**finished**: trained 400 steps\n")
    assert "**2 GPU-hours** allocated, of which 75 % were useful compute (goodput); 1 min 30 s in the queue" in text
    assert "in the queue; price &#36;6\n" in text
    assert (
        "| data | &lt;0.001 | &lt;0.1 % |\n| compute | 1.5 | 75 % |\n| down | 0.5 | 25 % |\n| allocated | 2 | 100 % |\n"
    ) in text
    assert "[uploaded](#/experiments/1/runs/abc/artifacts/checkpoints/best?workflowType=machine_learning)" in text
    assert "Progress" not in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, LOADS_FINAL),
        ({"state": State(status="stopped"), "has_model": False}, "\n\n`hpcdist resume /runs/exp/first` continues it\n"),
        ({"state": State(status="stopped"), "has_model": False}, "folder = '/runs/c/step-00000100'\n"),
        ({"best": None, "has_model": False}, "The newest checkpoint, step 100, from its folder:"),
        ({"attempts": (replace(SECOND, last_step=100),)},
         "The final model, after step 100, the same as the best checkpoint, from MLflow, with"),
    ],
)  # fmt: skip
def test_models_that_a_finished_run_offers(changes: dict[str, Any], text: str) -> None:
    found = described(replace(FINISHED, **changes))
    assert text in found
    assert ("load_weights" in found) == ("attempts" not in changes)


ON_LOGIN = {"versions": {"torch": "2.15.0", "hpcdist": "1", "python": "3.11.7", "numpy": "2"}, "host": "login1"}
BUILT = {"image_build": "0123456789abcdef"}
CLEAN = {"git_dirty": False}


@pytest.mark.parametrize(
    ("changes", "name", "lines"),
    [
        ({"stored": StoredConfig(problem="config.yaml has …")}, "Not read", ["config.yaml has …"]),
        ({}, "Config", ["mine.yaml, cluster profile site"]),
        ({"like": "exp/old", "like_run_id": "0a1b"}, "Config and code of", ["exp/old (MLflow run 0a1b)"]),
        ({"like": "exp/old"}, "Config and code of", ["exp/old"]),
        ({}, "Model", ["12,345 trainable parameters"]),
        ({}, "Data", ["digits (train), 1,437 samples, digest ab12"]),
        ({}, "Image", ["none, without a container"]),
        ({"image": "i", "image_digest": "ends-sha256:1a"}, "Image",
         ["i, digest ends-sha256:1a (of its size, first and last MiB)"]),
        (BUILT, "Image", ["name not recorded, build 0123456789ab"]),
        ({}, "Code", ["commit c0ffee with uncommitted changes"]),
        ({"changed_files": ("a.py", "b.py")}, "Code", ["commit c0ffee with uncommitted changes of a.py, b.py"]),
        (CLEAN | {"num_untracked": 2}, "Code", ["commit c0ffee; 2 files of the copy are not in git"]),
        (CLEAN | {"live_code": ("/me/lib",)}, "Code",
         ["commit c0ffee; imported without a copy, so later edits change the run: /me/lib"]),
        ({"git_commit": "", "code_copied": True}, "Code", ["no commit; the run folder has a copy in code/"]),
        ({"git_commit": "", "code_copied": True, "no_commit": "git is not installed"}, "Code",
         ["no commit, since git is not installed; the run folder has a copy in code/"]),
        ({"attempts": (FIRST, replace(SECOND, nodes=("n2", "n3"))), "job_id": "4"}, "Ranks",
         ["4 on n2, n3 (earlier attempts: n1), Slurm job 4"]),
        ({"cpu": "AMD EPYC 7B13, 8 logical CPUs"}, "CPU", ["AMD EPYC 7B13, 8 logical CPUs"]),
        (ON_LOGIN, "Versions", ["hpcdist 1, torch 2.15.0, Python 3.11.7"]),
        (ON_LOGIN | {"rank_python": "container", "rank_versions": {"torch": "2.14.0", "python": "3.12.2"}}, "Versions",
         ["torch 2.14.0, Python 3.12.2 in the container; hpcdist 1, torch 2.15.0, Python 3.11.7 on login1"]),
        (
            ON_LOGIN | {"rank_python": "environment"},
            "Versions",
            [
                "those in the environment of the ranks are recorded when the job starts;"
                " hpcdist 1, torch 2.15.0, Python 3.11.7 on login1"
            ],
        ),
    ],
)  # fmt: skip
def test_rows_of_the_setup(changes: dict[str, Any], name: str, lines: list[str] | None) -> None:
    assert dict(setup_rows(replace(FACTS, **changes))).get(name) == lines


def test_long_setup_leaves_space_for_the_result() -> None:
    secret = "http://ada:" + "s" * 200 + "@host"
    values = {f"params.p{number:02d}": Override(before="b" * 3000, after="a" * 3000) for number in range(9)}
    many = {f"z{number:02d}": Override(before=1, after=2) for number in range(40)}
    nodes = tuple(f"n{number}" for number in range(20))
    facts = replace(
        FACTS,
        overrides={"url": Override(before=1, after=secret), **values, **many},
        attempts=(replace(FIRST, nodes=nodes),),
    )
    text = described(facts, Ledger(entries=(Entry(cause="compute", attempt=1, node="n1", seconds=5400.0),)))
    assert f"params.p00 = {'a' * 99}… (config: {'b' * 99}…)" in text
    assert "z19 = 2 (config: 1)<br>20 more" in text
    assert "sss" not in text
    assert all(f"### {part}\n" in text for part in ("Result", "Attempts", "Cost"))
    assert "n7, 12 more" in text
    lines = dict(setup_rows(facts, in_full=True))["Overrides"]
    assert (len(lines), len(lines[1]) > 6000, lines[-1]) == (50, True, "z39 = 2 (config: 1)")
    assert attempt_rows(facts, in_full=True)[0][3] == ", ".join(nodes)


def test_median_speed_and_the_age_of_the_last_heartbeat() -> None:
    text = described(replace(FACTS, speeds={"train/samples_per_s": 1358.81}))
    assert "- median of train/samples_per_s over its logged values: 1,359\n" in text
    assert FACTS.progress is not None
    late = replace(FACTS, progress=replace(FACTS.progress, seen=2300.0 - 110))
    text = described(late)
    assert "(50 %); last heartbeat 1 min 50 s before; ends in about 4 min 50 s" in text
    assert "No heartbeat" not in text
    silent = described(replace(FACTS, progress=replace(FACTS.progress, seen=2300.0 - 125)))
    assert (
        "\n\n**No heartbeat for 2 min 5 s**: a long step, a hang, or a node that has failed.\n\n"
        "Progress at 1970-01-01 00:38 UTC: step 200 of 400 (50 %); last heartbeat 2 min 5 s before; last save"
    ) in silent
    assert "ends in about" not in silent


def test_command_of_the_start_has_no_password() -> None:
    command = "hpcdist run mine.yaml params.uri=https://ada:secret-in-two-parts@host/x"
    assert "secret-in" not in described(replace(FACTS, command=command))
    assert "The command that started it" not in described(replace(FACTS, command=""))


@pytest.mark.processes  # a shell
def test_shell_reads_the_lines_of_a_long_command_as_one() -> None:
    short = "cd /home && hpcdist run ddp_digits"
    assert wrapped(short) == short
    words = ["echo", "run", 'params.text=it\'s a "quoted" text', f"path={'/x' * 60}", "--option", "/y" * 30]
    words += [f"params.key{number}=value" for number in range(9)]
    lines = wrapped(f"cd '/tmp' && {shlex.join(words)}").splitlines()
    assert lines[0] == "cd '/tmp' &&"
    assert [line for line in lines if len(line) > 80] == [f"    {words[3]} \\"], "a word is not divided"
    assert all(line.endswith("\\") for line in lines[1:-1])
    done = subprocess.run(["sh", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{' '.join(words[1:])}\n"


def test_long_description_omits_middle_attempts_first() -> None:
    attempts = tuple(replace(FIRST, number=number) for number in range(1, 301))
    for max_chars in (8000, 3500):
        text = described(replace(FACTS, attempts=attempts), max_chars=max_chars)
        assert "more attempts" in text
        assert "artifacts/logs/attempt-001?workflowType=machine_learning)" in text
        assert "artifacts/logs/attempt-300?workflowType=machine_learning)" in text
        assert text.endswith("```"), "the sections after the attempts are complete"
    text = described(FACTS, max_chars=400)
    assert 300 < len(text) <= 400
    assert text.endswith("\n…")
    assert described(FACTS, max_chars=-5) == ""


def test_command_in_a_cause_is_code_in_the_table_of_attempts() -> None:
    text = described(replace(FACTS, attempts=(replace(FIRST, cause="use `hpcdist resume first`"), SECOND)))
    assert "use `hpcdist resume first`" in text[text.index("### Attempts") :]


def test_text_of_users_has_no_meaning_in_markdown() -> None:
    assert escaped("a*b_c `d` [e](f) #g\n<img src=x> @h http://u:secret@host/") == (
        "a\\*b_c \\`d\\` \\[e\\]\\(f\\) \\#g &lt;img src\\=x&gt; &#64;h http://u:\\*\\*\\*&#64;host/"
    )
    assert escaped("eval_loss core-h _a_ b__c é_ü -- 1 - 2") == (
        "eval_loss core-h \\_a\\_ b\\_\\_c é\\_ü \\-\\- 1 \\- 2"
    )
    assert with_code("use `a_b` <x> `y", 100) == "use `a_b` &lt;x&gt; \\`y"
    assert with_code("see `hpcdist status first`, or", 12) == "see `hpcdis`…", "cut in the code"
    assert with_code("`a | b`", 100) == "\\`a &#124; b\\`", "a vertical bar in code would end a cell"
    assert escaped("x" * 400, 10) == "x" * 9 + "…"
    assert table(("a", "b"), [("*", Markdown("*"))]) == "| a&nbsp;&nbsp;| b |\n| --- | --- |\n| \\*&nbsp;&nbsp;| * |"
    assert [duration(seconds) for seconds in (0.001, 0.42, 59.6, 3600, 7260, 180_000)] == [
        "0 s", "0.42 s", "1 min", "1 h", "2 h 1 min", "2 d 2 h"
    ]  # fmt: skip


def test_newest_sample_of_a_trainer_is_a_block_of_code() -> None:
    text = "Once </code><b>\x00</b>\n```\n# top\n\tx\u202ey" + "\n" * 20 + "z"
    described_run = described(replace(FACTS, texts=(Text(title="a *text*", text=text, step=1200),)))
    section = described_run.partition("### Sample\n\n")[2].partition("\n\n### ")[0]
    begin = "a *text*, step 1,200:\n\n```text\nOnce </code><b>\ufffd</b>\n'''\n# top\n    x\ufffdy\n"
    assert section == begin + "\n" * 16 + "…\n```"

    long = Text(title="t", text="x" * 1000, step=1)
    lines = described(replace(FACTS, texts=(long,))).partition("```text\n")[2].partition("\n```")[0].splitlines()
    assert max(map(len, lines)) == 80
    assert "".join(lines) == "x" * 600 + "…"


def setting_rows(facts: SweepFacts) -> list[tuple[str, str, str, str]]:
    """Return name, value, verdict and number of cells of each setting."""
    return [(row.name, row.value_text, row.against_best, str(len(row.cells))) for row in facts.rows]


def test_a_sweep_over_seeds_has_a_best_setting_and_no_best_cell() -> None:
    cells = [
        CellFacts(
            values={"seed": seed, "optim.lr": lr},
            label=f"seed={seed} lr={lr}",
            status="failed" if value is None else "finished",
            value=value,
        )
        for lr, values in ((0.1, (0.99, 0.90, 0.93)), (0.2, (0.95, 0.96, 0.94)), (0.3, (0.5, None, None)))
        for seed, value in enumerate(values)
    ]
    state = State(status="finished", reason="9 cells", ended=1600.0)
    keys = ("seed", "optim.lr")
    facts = SweepFacts(state=state, keys=keys, monitor="eval/acc", monitor_mode="max", cells=tuple(cells))
    text = plain(describe_sweep(facts, max_chars=8000))
    assert text.startswith(
        "**finished**: 9 cells\n\nBest setting: lr=0.2 with **eval/acc = 0.950 ± 0.010 s.d. (n=3)** (highest is best), "
        "within noise of lr=0.1\n\nState at 1970-01-01 00:26 UTC, when it ended.\n\n"
        "| Setting | best eval/acc | Against the best | At step | State |\n| --- | --- | --- | --- | --- |\n"
        "| lr=0.2 | 0.950 ± 0.010 s.d. (n=3) | the best |  | 3 finished |\n"
        "| lr=0.1 | 0.94 ± 0.05 s.d. (n=3) | within noise (-0.01) |  | 3 finished |\n"
        "| lr=0.3 | 0.5 (n=1) | too few seeds (-0.45) |  | 2 failed, 1 finished |"
    )
    assert "Best cell" not in text
    assert [one.row[1:] for one in compare_settings(facts)] == [
        ("lr=0.2", "0.950 ± 0.010 s.d. (n=3)", "", "", ""),
        ("lr=0.1", "0.94 ± 0.05 s.d. (n=3)", "-0.01", "-0.12 to +0.10", "within noise"),
        ("lr=0.3", "0.5 (n=1)", "-0.45", "", "too few seeds"),
    ]
    unknown = compare_settings(replace(facts, monitor_mode=""))
    assert [(one.run, one.verdict) for one in unknown] == [("lr=0.2", ""), ("lr=0.1", ""), ("lr=0.3", "")]
    on_other_data = compare_settings(replace(facts, keys=("seed", "data.name")))
    assert [one.verdict for one in on_other_data] == ["", *2 * ["not comparable (other data)"]]
    diverged = replace(facts, cells=(*cells, *(replace(cells[0], value=one) for one in (math.nan, math.inf, 1e300))))
    assert setting_rows(diverged)[:2] == [
        ("lr=0.2", "0.950 ± 0.010 s.d. (n=3)", "the best", "3"),
        ("lr=0.1", "0.94 ± 0.05 s.d. (n=3)", "within noise (-0.01)", "6"),
    ]
    worst = setting_rows(replace(facts, monitor_mode="min"))
    assert [name for name, *_ in worst] == ["lr=0.3", "lr=0.1", "lr=0.2"]
    without = replace(
        facts, cells=tuple(replace(cell, value=None) if "lr=0.1" in cell.label else cell for cell in cells)
    )
    assert setting_rows(without)[2:] == [("lr=0.1", "", "", "3")], "a setting whose runs have failed is listed"
    alone = replace(facts, keys=("seed",), cells=tuple(replace(cell, values={"seed": 1}) for cell in cells[:3]))
    assert setting_rows(alone) == [("all seeds", "0.94 ± 0.05 s.d. (n=3)", "", "3")]
    assert compare_settings(replace(facts, keys=("optim.lr",))) == []


def test_cause_of_the_end_is_not_repeated_in_the_last_attempt() -> None:
    state = State(status="failed", reason=FIRST.cause, attempt=2)
    attempts = (FIRST, replace(FIRST, number=2))
    facts = replace(FACTS, state=state, attempts=attempts)
    assert [row[-1] for row in attempt_rows(facts)] == [FIRST.cause, ""]
    other = replace(facts, state=replace(state, reason="no node is left"))
    assert [row[-1] for row in attempt_rows(other)] == [FIRST.cause, FIRST.cause]


def test_description_of_a_sweep_begins_with_the_best_cell() -> None:
    cells = [
        CellFacts(name="a", values={"optim.lr": 0.1}, label="lr=0.1", status="failed"),
        CellFacts(
            name="b", values={"optim.lr": 0.2}, label="lr=0.2", status="finished", value=0.5, step=10, page="#/a"
        ),
        CellFacts(
            name="c", values={"optim.lr": 0.3}, label="lr=0.3", status="finished", value=0.75, step=20, page="#/b"
        ),
    ]
    state = State(status="running", reason="3 cells: 1 failed, 1 finished, 1 running")
    facts = SweepFacts(state=state, keys=("optim.lr",), monitor="eval/acc", monitor_mode="max", cells=tuple(cells))
    assert plain(describe_sweep(facts, max_chars=8000, now=2300.0)) == (
        "**running**: 3 cells: 1 failed, 1 finished, 1 running\n\n"
        "Best cell: [lr=0.3](#/b) with **eval/acc = 0.75** (highest is best), too few seeds to tell from lr=0.2\n\n"
        "State at 1970-01-01 00:38 UTC.\n\n"
        "| Run | best eval/acc | Against the best | At step | State |\n| --- | --- | --- | --- | --- |\n"
        "| [lr=0.3](#/b) | 0.75 | the best | 20 | finished |\n"
        "| [lr=0.2](#/a) | 0.5 | too few seeds (-0.25) | 10 | finished |\n"
        "| lr=0.1 |  |  |  | failed |"
    )
    lowest = describe_sweep(replace(facts, monitor_mode="min"), max_chars=8000)
    assert "Best cell: [lr\\=0\\.2](#/a)" in lowest
    stopped = replace(facts, state=State(status="stopped", reason="everything saved"))
    assert describe_sweep(stopped, max_chars=8000).startswith("**stopped**: everything saved\n")
    with_setup = plain(describe_sweep(facts, [("Data", ["digits (test)", "letters"])], max_chars=8000))
    assert "\n\n### Setup of lr=0.1\n\n" in with_setup
    assert with_setup.endswith("| **Data** | digits (test)<br>letters |")
    numbered = [
        replace(cells[1], name=f"c{number}", values={"optim.lr": number}, value=float(number)) for number in range(500)
    ]
    many = replace(facts, cells=tuple(numbered))
    text = describe_sweep(many, cost="2 core-hours; `hpcdist cost tune` lists it by run", max_chars=4000)
    assert "Cost: 2 core-hours; `hpcdist cost tune` lists" in text
    assert len(text) <= 4000
    assert "| lr\\=499&nbsp;&nbsp;| 499&nbsp;&nbsp;| the best&nbsp;&nbsp;| 10&nbsp;&nbsp;|" in text
    assert text.endswith(" more")
