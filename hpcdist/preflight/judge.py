"""What the answers of all nodes say, side by side. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcdist.preflight.check import Check
from hpcdist.preflight.probe import Request


def judge(request: Request, answers: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """All findings, the worst first and causes before what follows from them.

    A node without an answer is a failure. What several nodes have in common is said once, without a `node`; what is
    one node's own carries its name in `node`. Where nothing is wrong there is one check of level `ok`.
    """
    silent = [node for node in request.nodes if node not in answers]
    if silent:
        return [Check(name="answer", level="failure", text="did not answer", node=node) for node in silent]
    return [Check(name="preflight", level="ok", text=f"{len(request.nodes)} nodes are alike and reach each other")]
