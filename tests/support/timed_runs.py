"""Run folders with the files from which the ledger of a run is computed, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist.host.files import write_json
from hpcdist.run.folder import RunDir
from hpcdist.run.records import AttemptTimes, NodeShare, Resources, begin

BEGAN = 1_795_000_000.0
TWO_NODES = Resources(
    nodes={"n1": NodeShare(allocated=3, share=1, ranks=[0, 1]), "n2": NodeShare(allocated=2, share=1, ranks=[2, 3])}
)


def add_attempt(
    run: RunDir,
    began: float,
    ended: float | None,
    accounts: Sequence[dict[str, Any] | None],
    resources: Resources = TWO_NODES,
    *,
    supervised: float | None = None,
    **changes: Any,
) -> None:
    """Add an attempt; times are relative to BEGAN."""
    attempt = run.new_attempt()
    times = AttemptTimes(
        supervised=BEGAN + (began - 1 if supervised is None else supervised),
        began=BEGAN + began,
        ended=None if ended is None else BEGAN + ended,
        **changes,
    )
    begin(attempt, resources, times)
    for rank, account in enumerate(accounts):
        beat = {"time": BEGAN + (account["until"] if account else began), "step": 7, "total_steps": 9, "metrics": {}}
        if account is not None:
            moved = {key: BEGAN + account[key] for key in ("began", "until")}
            beat["account"] = {"cause": "compute", "closed": True, **account, **moved}
        write_json(attempt.beat(rank), beat)


def account(began: float, until: float, **changes: Any) -> dict[str, Any]:
    """Return an account: one second of data, the rest compute."""
    return {"began": began, "until": until, "seconds": {"data": 1.0, "compute": until - began - 1.0}, **changes}
