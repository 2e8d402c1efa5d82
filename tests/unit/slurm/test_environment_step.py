"""The step that prepares the ranks' environment on the nodes of a job, with recorded answers."""

from __future__ import annotations

import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest

import hpcdist
from hpcdist.environments.node_copy import NodeRequest
from hpcdist.environments.rank_environment import RankEnvironment
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.host.files import read_json
from hpcdist.run.folder import RunDir
from hpcdist.slurm.job import launcher
from hpcdist.slurm.job.launcher import check_answers, prepare_nodes

FACTS = {"python": "3.12.3", "hpcdist": hpcdist.__version__, "torch": "2.15.0", "cuda": "13.2", "missing": []}
REQUEST = NodeRequest(python="/tmp/e/bin/python3", sources="/runs/hpcdist-1", folder="/tmp/e", key="venv-1")
ENVIRONMENT = RankEnvironment(
    python=REQUEST.python, env={}, import_path="/tmp/e", request=REQUEST, record={"kind": "venv", "key": "venv-1"}
)


def answer(**changes: Any) -> dict[str, Any]:
    return {"copied": True, "seconds": 2.5, "facts": FACTS | changes}


def test_nodes_are_prepared_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir.create(tmp_path / "exp" / "first")
    commands: list[list[str]] = []
    copied = {"n1": True, "n2": True}

    def fake_step(command: list[str], *_: object, **__: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        lines = [
            f"hpcdist-environment {json.dumps({'node': node, **answer(), 'copied': was})}\n"
            for node, was in copied.items()
        ]
        return subprocess.CompletedProcess(command, 0, "".join(lines), "")

    monkeypatch.setattr(launcher, "run_within", fake_step)
    with caplog.at_level(logging.INFO):
        prepare_nodes(ENVIRONMENT, run, [("n1", "n2")], {}, het=False)
        copied.update(n1=False, n2=False)
        prepare_nodes(ENVIRONMENT, run, [("n1", "n2")], {}, het=False)
    assert "--ntasks-per-node=1" in commands[0]
    assert commands[0][-3:] == ["-m", "hpcdist.environments.node_copy", REQUEST.text()]
    assert caplog.messages == [
        "environment: copied to 2 of 2 nodes in 2.5 s",
        "environment: venv-1 is on all 2 nodes",
    ]
    assert read_json(run.rank_environment) == {
        "kind": "venv",
        "key": "venv-1",
        "python": "3.12.3",
        "torch": "2.15.0",
        "cuda": "13.2",
    }
    del copied["n2"]
    with pytest.raises(HpcdistError, match="environment on n2: no answer"):
        prepare_nodes(ENVIRONMENT, run, [("n1", "n2")], {}, het=False)


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        ({"n1": answer()}, HpcdistError, "environment on n2: srun: error: x"),
        (
            {node: {"error": "zstd is not installed", "may_pass": False} for node in ("n1", "n2")},
            UserMistake,
            "environment on n1, n2: zstd is not installed",
        ),
        ({"n1": answer(), "n2": {"error": "stale", "may_pass": True}}, HpcdistError, "environment on n2: stale"),
        (
            {"n1": answer(), "n2": answer(python="3.9.2")},
            UserMistake,
            "environment on n2: /e/python3 is Python 3.9.2; hpcdist needs 3.11 or newer",
        ),
        (
            {"n1": answer(missing=["psutil", "torch"]), "n2": answer()},
            UserMistake,
            "environment on n1: /e/python3 has no psutil, torch: add the packages to the environment",
        ),
        (
            {"n1": answer(hpcdist="9.9"), "n2": answer()},
            UserMistake,
            f"environment on n1: /e/python3 imports hpcdist 9.9, this is {hpcdist.__version__}: unset PYTHONPATH",
        ),
        (
            {"n1": answer(driver="470.1"), "n2": answer()},
            UserMistake,
            "environment on n1: its torch needs driver 580.65 or newer for its CUDA 13.2, found 470.1",
        ),
    ],
)
def test_problems_of_nodes(answers: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as found:
        check_answers(["n1", "n2"], answers, "/e/python3", "srun: error: x")
    assert (type(found.value), str(found.value)) == (kind, message)


def test_fitting_answers_raise_nothing() -> None:
    check_answers(["n1"], {"n1": answer()}, "/e/python3", "")
