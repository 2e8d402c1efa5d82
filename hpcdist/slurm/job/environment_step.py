"""The step that copies the ranks' environment to each node of a job and checks it there."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import hpcdist
from hpcdist.environments.node_copy import parse_answers
from hpcdist.environments.rank_environment import RankEnvironment
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.files.atomic import write_json
from hpcdist.machine.cuda_drivers import driver_problem
from hpcdist.machine.timed_command import last_line, run_within
from hpcdist.run.folder import RunDir
from hpcdist.slurm.job.srun import nodes_command

log = logging.getLogger(__name__)
#: Time limit for reading some gigabytes from a busy file system and writing tens of thousands of files.
COPY_S = 1800.0


def prepare_nodes(
    environment: RankEnvironment,
    run: RunDir,
    nodes: Sequence[Sequence[str]],
    env: Mapping[str, str],
    *,
    het: bool,
    chosen: bool = False,
) -> None:
    """Prepare the environment on all nodes of a job, and record it with its versions in the run folder.

    Args:
        nodes: names of the nodes, by component.
        env: environment of the step.
        het: whether the job is heterogeneous.
        chosen: whether the allocation may have more nodes.

    Raises:
        UserMistake: a retry cannot help: a node lacks a program or space, or the environment does not fit.
        HpcdistError: a node does not answer, or cannot read the archive.
    """
    words = [sys.executable, "-P", "-m", "hpcdist.environments.node_copy", environment.request.text()]
    done = run_within(nodes_command(nodes, words, het=het, chosen=chosen), COPY_S, env=env)
    answers = parse_answers(done.stdout)
    check_answers([node for own in nodes for node in own], answers, environment.python, last_line(done.stderr))
    copied = [answer for answer in answers.values() if answer["copied"]]
    if copied:
        slowest = max(answer["seconds"] for answer in copied)
        log.info("environment: copied to %d of %d nodes in %.1f s", len(copied), len(answers), slowest)
    elif environment.request.folder:
        log.info("environment: %s is on all %d nodes", environment.request.key, len(answers))
    facts = next(iter(answers.values()))["facts"]
    versions = {name: facts[name] for name in ("python", "torch", "cuda") if name in facts}
    write_json(run.rank_environment, {**environment.record, **versions})


def check_answers(nodes: Sequence[str], answers: Mapping[str, Mapping[str, Any]], python: str, message: str) -> None:
    """Raise an error if a node has not prepared the environment, or if it does not fit this hpcdist.

    Args:
        message: the last line of srun's error output.
    """
    problems: dict[str, list[str]] = {}
    may_pass = True
    for node in nodes:
        answer = answers.get(node)
        if answer is None:
            problem, passing = message or "no answer", True
        elif "error" in answer:
            problem, passing = str(answer["error"]), bool(answer["may_pass"])
        else:
            problem, passing = _unfit(answer["facts"], python), False
        if problem:
            problems.setdefault(problem, []).append(node)
            may_pass = may_pass and passing
    if problems:
        lines = [f"environment on {', '.join(where)}: {problem}" for problem, where in problems.items()]
        raise HpcdistError("; ".join(lines)) if may_pass else UserMistake("; ".join(lines))


def _unfit(facts: Mapping[str, Any], python: str) -> str:
    if tuple(map(int, facts["python"].split(".")[:2])) < (3, 11):
        return f"{python} is Python {facts['python']}; hpcdist needs 3.11 or newer"
    if facts["missing"]:
        return f"{python} has no {', '.join(facts['missing'])}: add the packages to the environment"
    if facts.get("hpcdist") != hpcdist.__version__:
        return f"{python} imports hpcdist {facts.get('hpcdist')}, this is {hpcdist.__version__}: unset PYTHONPATH"
    if old := driver_problem(str(facts.get("cuda") or ""), str(facts.get("driver") or "")):
        return f"its torch needs {old}"
    return ""
