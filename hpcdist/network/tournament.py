"""Rounds of transfers in which each node takes part in at most one transfer at a time."""

from __future__ import annotations


def tournament(num_players: int, num_rounds: int | None = None) -> list[list[int | None]]:
    """Return the rounds of a round-robin tournament, in which each player meets at most one other per round.

    The circle method: in round r of m, players i and r - i (modulo m) meet; the player that would meet itself meets
    the last one.

    Args:
        num_rounds: rounds to return, spread evenly over the tournament; None for all, in which each meets each once.

    Returns:
        For each round the partner of each player, None for a player without one.
    """
    circle = num_players if num_players % 2 else num_players - 1
    count = circle if num_rounds is None else min(num_rounds, circle)
    rounds = []
    for turn in (step * circle // count for step in range(count)):
        partners: list[int | None] = [(turn - player) % circle for player in range(circle)]
        alone = next(player for player in range(circle) if partners[player] == player)
        partners[alone] = None
        if circle < num_players:
            partners[alone] = circle
            partners.append(alone)
        rounds.append(partners)
    return rounds
