"""Notifications of a Slurm job reach a real HTTP server once each, and nothing shows the address of the webhook."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from hpcdist_runs import HOLD_OVERRIDES, HOLD_STEP, wait_for
from slurm_cluster import WAIT_S, DevCluster
from slurm_runs import NUM_RANKS, ON_FOUR_RANKS, SlurmRuns
from webhook import SECRET, Webhook, listening_webhook

from hpcdist.devcluster.settings import HOST
from hpcdist.host.files import read_json

NAME = "notified"

pytestmark = pytest.mark.faults


@pytest.fixture
def webhook(devcluster: DevCluster) -> Iterator[Webhook]:
    """Listen on the address at which the nodes reach this machine."""
    with listening_webhook(devcluster.settings.addresses[HOST]) as server:
        yield server


def wait_step(runs: SlurmRuns, attempt: int, step: int) -> None:
    beat = runs.attempt(NAME, attempt).beat(0)
    wait_for(lambda: int((read_json(beat) or {}).get("step", 0)) >= step, f"step {step}", timeout_s=WAIT_S)


def test_starts_restart_requeue_and_end_of_a_job_are_reported_once(
    slurm_runs: SlurmRuns, devcluster: DevCluster, webhook: Webhook
) -> None:
    runs = slurm_runs
    arguments = [*ON_FOUR_RANKS, *HOLD_OVERRIDES, "stop.max_epochs=100000", "notify.webhook=${oc.env:MY_HOOK}"]
    shown = []
    for option in (["--dry-run"], []):
        submit = ["submit", *runs.config(NAME, *arguments), "--cluster", "devcluster", *option]
        code, output = runs.command(*submit, MY_HOOK=webhook.url)
        assert code == 0, output
        shown.append(output)
    job = runs.job_id(NAME)
    runs.wait_until_held(NAME, NUM_RANKS)
    shown += [devcluster.run("scontrol", "show", "job", "-dd", job), subprocess.check_output(["ps", "axww"], text=True)]
    shown.append(devcluster.run("scontrol", "write", "batch_script", job, "-"))
    assert runs.run_dir(NAME).secrets.stat().st_mode & 0o777 == 0o600
    os.kill(int((runs.attempt(NAME).path / "held-3").read_text()), signal.SIGKILL)
    runs.release(NAME)
    wait_step(runs, 2, HOLD_STEP + 10)
    devcluster.run("scontrol", "requeue", job)
    runs.wait_requeued(NAME)
    wait_for(lambda: len(webhook.bodies) >= 3, "the event of the requeue")
    runs.start_now(job)
    wait_for(lambda: runs.attempt(NAME, 3).path.exists(), "the third attempt", timeout_s=WAIT_S)
    wait_step(runs, 3, HOLD_STEP + 20)
    assert runs.command("stop", NAME)[0] == 0
    runs.wait_end(NAME, job)
    wait_for(lambda: len(webhook.bodies) >= 5, "the event of the end")

    assert [(body["event"], body["attempt"], body["status"]) for body in webhook.bodies] == [
        ("started", 1, "running"),
        ("restarted", 2, "running"),
        ("requeued", 2, "queued"),
        ("started", 3, "running"),
        ("ended", 3, "stopped"),
    ]
    assert {body["run"] for body in webhook.bodies} == {f"digits/{NAME}"}
    restart, requeue, end = (webhook.bodies[index]["reason"] for index in (1, 2, 4))
    assert restart.startswith("rank 3 on n2 was killed by SIGKILL")
    assert requeue.startswith("everything saved (Slurm ends")
    assert end.startswith("everything saved (`hpcdist stop` by ")
    assert webhook.bodies[-1]["mlflow_run_id"] == runs.mlflow_id(NAME)

    code, output = runs.command("sync", NAME)
    assert code == 0, output
    folder = runs.run_dir(NAME)
    paths = [path for path in folder.path.rglob("*") if path.is_file() and path != folder.secrets]
    shown += [output, runs.job_log(NAME), runs.param(NAME, "notify.webhook"), *runs.tags(NAME).values()]
    shown += [path.read_text(errors="replace") for path in paths]
    shown.append((devcluster.layout.logs / "slurmctld.log").read_text(errors="replace"))
    assert len(paths) > 20
    assert [text for text in shown if SECRET in text] == []
