"""Roles of ranks and the table of ranks."""

from __future__ import annotations

import re

import pytest

from hpcdist.config.topology import Roles, rank_table, span
from hpcdist.errors import ConfigError

RL = {"agent": 1, "observer": 4}


def test_ranks_are_assigned_in_the_order_of_the_roles() -> None:
    roles = Roles.of({"master": 1, "trainer": 2, "parameter_server": 3}, 6)
    assert [roles.name_of(rank) for rank in range(6)] == [
        *("master:0", "trainer:0", "trainer:1"),
        *("parameter_server:0", "parameter_server:1", "parameter_server:2"),
    ]
    assert [roles.of_rank(rank) for rank in (0, 2, 5)] == [("master", 0), ("trainer", 1), ("parameter_server", 2)]
    assert roles.names == ("master", "trainer", "parameter_server")
    assert [list(roles.ranks_of(role)) for role in roles.names] == [[0], [1, 2], [3, 4, 5]]
    assert (roles.count("trainer"), roles.count("agent"), roles.world_size) == (2, 0, 6)
    assert str(roles) == "master 1, trainer 2, parameter_server 3"


def test_without_roles_all_ranks_are_trainers() -> None:
    roles = Roles.of({}, 3)
    assert (roles.names, list(roles.ranks_of("trainer")), roles.name_of(2)) == (("trainer",), [0, 1, 2], "trainer:2")


def test_counts_that_do_not_add_up_to_the_world_size_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Roles.of(RL, 4)
    assert str(caught.value) == "roles add up to 5 ranks (agent 1, observer 4), but 4 were started"


def test_unknown_role_and_unknown_rank_are_refused() -> None:
    roles = Roles.of(RL, 5)
    with pytest.raises(ConfigError, match=r"^no rank has the role 'server': the roles are agent 1, observer 4$"):
        roles.ranks_of("server")
    for rank in (5, -1):
        with pytest.raises(IndexError, match=rf"^rank {rank} of 5$"):
            roles.of_rank(rank)


def test_require_refuses_other_roles_and_counts() -> None:
    Roles.of(RL, 5).require(agent=1, observer=None)
    Roles.of(RL, 5).require(observer=4, agent=1)
    message = (
        "this trainer needs the roles agent 1, observer 1 or more, got trainer 5: set roles='{agent: 1, observer: 1}'"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Roles.of({}, 5).require(agent=1, observer=None)
    for wrong in ({"agent": 2, "observer": 3}, {"agent": 1}, {"agent": 1, "observer": 3, "judge": 1}):
        with pytest.raises(ConfigError, match=r"^this trainer needs the roles agent 1, observer 1 or more, got "):
            Roles.of(wrong, sum(wrong.values())).require(agent=1, observer=None)


def test_rank_table_has_one_line_for_each_role_on_each_node() -> None:
    roles = Roles.of({"master": 1, "trainer": 3, "parameter_server": 2}, 6)
    places = [(range(2), "n1"), (range(2, 4), "n2"), (range(4, 6), "n3")]
    assert rank_table(roles, places, {"master": "cpu", "trainer": "cuda", "parameter_server": "cpu"}) == [
        "rank  role                  device  place",
        "0     master:0              cpu     n1",
        "1     trainer:0             cuda    n1",
        "2-3   trainer:1-2           cuda    n2",
        "4-5   parameter_server:0-1  cpu     n3",
    ]


def test_rank_table_of_4096_ranks_has_one_line_for_each_role() -> None:
    roles = Roles.of({"parameter_server": 512, "trainer": 3584}, 4096)
    assert rank_table(roles, [(range(4096), "")], {}) == [
        "rank      role                    device",
        "0-511     parameter_server:0-511",
        "512-4095  trainer:0-3583",
    ]


def test_span_formats_single_numbers_and_ranges() -> None:
    assert [span(range(3, 4)), span(range(3, 5)), span(range(4096))] == ["3", "3-4", "0-4095"]
