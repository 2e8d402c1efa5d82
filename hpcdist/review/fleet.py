"""A page on all runs of the last weeks: who used how many hours, for what causes, and which nodes failed."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from hpcdist.review import charts
from hpcdist.review.facts import AttemptFacts, read_facts, readable
from hpcdist.review.ledger import Ledger, cost_of, hours_text, percent, read_ledger, together
from hpcdist.review.markdown import clock
from hpcdist.review.report import environment
from hpcdist.run.folder import ENDED, RunDir

WEEKS = 4
_WEEK_S = 7 * 24 * 3600.0
#: A job may hold its nodes so long after its run has ended. The ledgers of older runs are not read.
_LONGEST_UPLOAD_S = _WEEK_S
#: Users with the most time that have a bar, and nodes that are listed.
_MAX_BARS = 20
_MAX_NODES = 50


@dataclass(frozen=True, kw_only=True)
class UsedBy:
    """The time of a user's runs."""

    user: str
    num_runs: int
    ledger: Ledger  #: of all runs together
    cost: str  #: hours and price


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The time of all runs on GPUs, or of those on cores."""

    users: tuple[UsedBy, ...]  #: the one with the most time first
    whole: Ledger

    def row(self, used: UsedBy) -> tuple[str, ...]:
        """Return the cells of a user: name, number of runs, cost, share of the time, goodput."""
        share = percent(used.ledger.allocated_s / self.whole.allocated_s)
        return used.user, f"{used.num_runs:,}", used.cost, share, used.ledger.goodput_text

    @property
    def bars(self) -> str:
        """The chart of the users with the most time."""
        return charts.usage_bars({used.user: used.ledger for used in self.users[:_MAX_BARS]})


@dataclass(frozen=True, kw_only=True)
class FailedNode:
    """A node on which attempts have ended, see `AttemptFacts.failed_nodes`."""

    node: str
    num_attempts: int
    newest: float  #: begin of the newest of these attempts, in seconds since the epoch
    cause: str  #: its end


def render_fleet(runs: Iterable[RunDir], now: float, note: str = "") -> str:
    """Return the page as HTML. A run counts as a whole if it had resources in the last WEEKS weeks.

    Runs with unreadable files are left out; the page has their number.

    Args:
        now: seconds since the epoch.
        note: a sentence about further runs.
    """
    begin = now - WEEKS * _WEEK_S
    ledgers: dict[str, dict[str, list[Ledger]]] = defaultdict(lambda: defaultdict(list))
    failures: dict[str, list[AttemptFacts]] = defaultdict(list)
    num_runs = 0
    num_unreadable = 0
    for run in runs:
        state = readable(run.read_state)
        if state is not None and state.status in ENDED and (state.ended or begin) + _LONGEST_UPLOAD_S < begin:
            continue
        ledger = readable(partial(read_ledger, run))
        if ledger is not None and (not ledger.allocated_s or ledger.ended < begin):
            continue
        facts = readable(partial(read_facts, run))
        if ledger is None or facts is None:
            num_unreadable += 1
            continue
        num_runs += 1
        ledgers[ledger.unit][facts.user or "unknown"].append(ledger)
        for attempt in facts.attempts:
            if attempt.started >= begin:
                for node in attempt.failed_nodes:
                    failures[node].append(attempt)
    usages = [_usage(by_user) for _, by_user in sorted(ledgers.items())]
    nodes = sorted(map(_failed_node, failures.items()), key=lambda failed: (-failed.num_attempts, failed.node))
    content = {
        "num_runs": num_runs,
        "num_unreadable": num_unreadable,
        "note": note,
        "weeks": WEEKS,
        "as_of": clock(now),
        "usages": usages,
        "nodes": nodes[:_MAX_NODES],
        "clock": clock,
        "hours_text": hours_text,
    }
    return environment().get_template("fleet.html").render(content)


def _usage(by_user: dict[str, list[Ledger]]) -> Usage:
    users = []
    for user, ledgers in by_user.items():
        users.append(UsedBy(user=user, num_runs=len(ledgers), ledger=together(ledgers), cost=cost_of(ledgers)))
    users.sort(key=lambda used: (-used.ledger.allocated_s, used.user))
    return Usage(users=tuple(users), whole=together([used.ledger for used in users]))


def _failed_node(item: tuple[str, list[AttemptFacts]]) -> FailedNode:
    node, attempts = item
    newest = max(attempts, key=lambda attempt: attempt.started)
    return FailedNode(node=node, num_attempts=len(attempts), newest=newest.started, cause=newest.cause)
