"""Reservations of nodes: which one begins before a job could end, and so keeps the job in the queue. Pure functions."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hpcdist.config.slurm_notation import expand
from hpcdist.errors import local_time
from hpcdist.slurm.output import parse_records, parse_text, parse_time

#: Time between the end of a job and a reservation: Slurm starts a job some time after the question.
MARGIN_MIN = 5


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A reservation of whole nodes. Times are seconds since the epoch."""

    name: str
    begin: float
    end: float
    nodes: frozenset[str]
    is_maintenance: bool

    def minutes_before(self, now: float) -> int:
        """Return the time limit of a job that starts now and ends before it; negative without time for one."""
        return round((self.begin - now) / 60) - MARGIN_MIN

    def sentence(self, nodes: Collection[str], now: float) -> str:
        """Return when it begins, and on which of `nodes`, such as `maintenance maint begins in 30 min on all nodes`."""
        kind = "maintenance" if self.is_maintenance else "reservation"
        when = f"lasts until {local_time(self.end)}"
        if self.begin > now:
            when = f"begins in {(self.begin - now) / 60:.0f} min"
        if self.nodes.issuperset(nodes):
            return f"{kind} {self.name} {when} on all nodes"
        taken = len(self.nodes.intersection(nodes))
        return f"{kind} {self.name} {when} on {taken} of {len(nodes)} nodes"


def parse_reservations(text: str) -> list[Reservation]:
    """Return the reservations of nodes from `scontrol --oneliner show reservation`, without those of licenses only."""
    reservations = []
    for record in parse_records(text):
        begin = parse_time(record.get("StartTime"))
        end = parse_time(record.get("EndTime"))
        nodes = parse_text(record.get("Nodes"))
        if "ReservationName" not in record or begin is None or end is None or not nodes:
            continue
        reservations.append(
            Reservation(
                name=record["ReservationName"],
                begin=begin,
                end=end,
                nodes=frozenset(expand(nodes)),
                is_maintenance="MAINT" in record.get("Flags", "").split(","),
            )
        )
    return reservations


def first_in_the_way(
    reservations: Iterable[Reservation], nodes: Collection[str], num_nodes: int, limit_s: float, now: float
) -> Reservation | None:
    """Return the first reservation that leaves too few of `nodes` for a job that starts now; None without one.

    Args:
        num_nodes: the least number of nodes that the job needs.
        limit_s: its time limit.
    """
    left = set(nodes)
    for reservation in sorted(reservations, key=lambda one: one.begin):
        overlaps = reservation.begin < now + limit_s and reservation.end > now
        if not overlaps or left.isdisjoint(reservation.nodes):
            continue
        left -= reservation.nodes
        if len(left) < num_nodes:
            return reservation
    return None
