"""`ctx.roles`: the roles of a run, the role of this rank, and the agreement between ranks with different roles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcdist.config.roles import Roles
from hpcdist.rank.process_group import Groups
from hpcdist.rank.processes import StopFlag


@dataclass(frozen=True)
class RankRoles(Roles):
    """The roles of a run in rank order, and the role of this rank. `Context` creates it.

    `ctx.roles.ranks_of("observer")` returns the ranks of a role, by their index.
    """

    rank: int
    _flag: StopFlag
    _agree: Callable[[Sequence[int]], Groups]

    @property
    def own(self) -> str:
        """Role of this rank: a key of the config's `roles`, or `trainer` in a run without roles."""
        return self.of_rank(self.rank)[0]

    @property
    def own_index(self) -> int:
        """Index of this rank within its role, 0 to the number of ranks in the role - 1."""
        return self.of_rank(self.rank)[1]

    def agree_among(self, ranks: Sequence[int]) -> Groups:
        """Let only `ranks` take part in the agreement on a stop, because the others do not count steps.

        Call it on every rank, before the first step. The other ranks must call neither `Context.steps` nor
        `Context.should_stop` afterwards. Returns the group of `ranks`, for small values that they exchange.
        """
        return self._agree(ranks)

    @property
    def is_stop_signalled(self) -> bool:
        """Whether this rank alone has received a stop signal. `Context.should_stop` has the decision of all ranks."""
        return self._flag.is_raised

    def request_stop(self) -> None:
        """Request a stop of all ranks, as a stop signal to this rank does; `Context.should_stop` then returns True."""
        self._flag.is_raised = True
