"""Who plays which role."""

from __future__ import annotations

import re

import pytest

from hpcdist.errors import ConfigError
from hpcdist.rank.roles import Roles, rank_table, span

RL = {"agent": 1, "observer": 4}


def test_ranks_get_roles_in_the_order_written() -> None:
    roles = Roles.of({"master": 1, "trainer": 2, "parameter_server": 3}, 6)
    assert [roles.name_of(rank) for rank in range(6)] == [
        *("master:0", "trainer:0", "trainer:1"),
        *("parameter_server:0", "parameter_server:1", "parameter_server:2"),
    ]
    assert [roles.of_rank(rank) for rank in (0, 2, 5)] == [("master", 0), ("trainer", 1), ("parameter_server", 2)]
    assert roles.names == ("master", "trainer", "parameter_server")
    assert [list(roles.ranks_of(role)) for role in roles.names] == [[0], [1, 2], [3, 4, 5]]
    assert (roles.count("trainer"), roles.count("agent"), roles.world_size) == (2, 0, 6)
    assert [roles.rank_of(*roles.of_rank(rank)) for rank in range(6)] == list(range(6))
    assert roles.rank_of("trainer") == 1
    assert str(roles) == "master 1, trainer 2, parameter_server 3"


def test_without_roles_all_ranks_are_trainers() -> None:
    roles = Roles.of({}, 3)
    assert (roles.names, list(roles.ranks_of("trainer")), roles.name_of(2)) == (("trainer",), [0, 1, 2], "trainer:2")


def test_what_does_not_add_up_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        Roles.of(RL, 4)
    assert str(caught.value) == "roles add up to 5 ranks (agent 1, observer 4), but 4 were started"


def test_a_role_that_nobody_plays() -> None:
    roles = Roles.of(RL, 5)
    with pytest.raises(ConfigError, match=r"^no rank has the role 'server': the roles are agent 1, observer 4$"):
        roles.ranks_of("server")
    for index in (4, -1):
        with pytest.raises(ConfigError, match=rf"^no rank is observer:{index}: the roles are agent 1, observer 4$"):
            roles.rank_of("observer", index)
    for rank in (5, -1):
        with pytest.raises(IndexError, match=rf"^rank {rank} of 5$"):
            roles.of_rank(rank)


def test_a_trainer_says_which_roles_it_needs() -> None:
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


def test_the_table_has_a_line_for_each_stretch_of_one_role_in_one_place() -> None:
    roles = Roles.of({"master": 1, "trainer": 3, "parameter_server": 2}, 6)
    places = [(range(2), "n1"), (range(2, 4), "n2"), (range(4, 6), "n3")]
    assert rank_table(roles, places, {"master": "cpu", "trainer": "cuda", "parameter_server": "cpu"}) == [
        "rank  role                  device  place",
        "0     master:0              cpu     n1",
        "1     trainer:0             cuda    n1",
        "2-3   trainer:1-2           cuda    n2",
        "4-5   parameter_server:0-1  cpu     n3",
    ]


def test_a_large_world_takes_few_lines() -> None:
    roles = Roles.of({"parameter_server": 512, "trainer": 3584}, 4096)
    assert rank_table(roles, [(range(4096), "")], {}) == [
        "rank      role                    device",
        "0-511     parameter_server:0-511",
        "512-4095  trainer:0-3583",
    ]


def test_spans() -> None:
    assert [span(range(3, 4)), span(range(3, 5)), span(range(4096))] == ["3", "3-4", "0-4095"]
