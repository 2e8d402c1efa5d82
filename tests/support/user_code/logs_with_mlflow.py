"""A trainer that logs with MLflow, with `hpcdist.log` and with its context."""

from __future__ import annotations

import subprocess
import sys

import mlflow

import hpcdist
from hpcdist import Config, Context

CHILD = "import mlflow; mlflow.log_metric('of_child', 5.0, step=1)"


def train(ctx: Context, cfg: Config) -> None:
    mlflow.log_param("inner", "yes")
    for step in range(1, 4):
        mlflow.log_metric("by_mlflow", step, step=step)
        hpcdist.log({"by_log": step}, step)
        ctx.log({"by_context": step}, step)
        assert not hpcdist.should_stop(step)
    # A process of its own, which inherits the variables of the rank.
    subprocess.run([sys.executable, "-c", CHILD], check=True)
