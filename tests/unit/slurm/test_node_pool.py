"""The choice of nodes for each attempt: losses, spare nodes, returns, and nodes that are not fit."""

from __future__ import annotations

from hpcdist.slurm.job.elastic import MAX_LOSSES, NodePool

FOUR = ("n1", "n2", "n3", "n4")


def test_lost_nodes_are_left_out_until_fewer_than_the_least_number_remain() -> None:
    pool = NodePool(FOUR, most=4, least=2)
    assert (pool.used, pool.idle, pool.missing) == (FOUR, (), ())
    assert pool.drop_silent(["n2", "n4"])
    assert (pool.used, pool.idle, pool.present, pool.missing) == (
        ("n1", "n3"),
        (),
        ("n1", "n3"),
        ("n2", "n4"),
    )
    assert not pool.can_lose(["n3"])
    assert not pool.drop_silent(["n3"])
    assert pool.used == ("n1", "n3"), "nothing has changed"


def test_nodes_that_return_are_used_again_unless_they_were_lost_too_often() -> None:
    pool = NodePool(FOUR, most=4, least=2)
    for _ in range(MAX_LOSSES):
        assert pool.drop_silent(["n3"])
        returning = pool.missing
        pool.restore(["n3"])
        assert pool.used == FOUR
    assert returning == (), "the node flaps"
    pool = NodePool(FOUR, most=4, least=2)
    assert pool.drop_silent(["n2", "n3"])
    pool.forget(["n2"])
    assert pool.missing == ("n3",), "Slurm has taken n2 out of the job"


def test_spare_node_replaces_a_lost_node_at_the_same_size() -> None:
    pool = NodePool(FOUR, most=3, least=3, spare=1)
    assert (pool.used, pool.idle) == (("n1", "n2", "n3"), ("n4",))
    assert pool.drop_silent(["n2"])
    assert (pool.used, pool.idle, pool.missing) == (("n1", "n3", "n4"), (), ())
    assert not pool.drop_silent(["n3"]), "no spare node is left"
    pool.restore(["n2"])
    assert (pool.used, pool.idle) == (("n1", "n3", "n4"), ("n2",)), "ranks stay on their nodes"
    assert pool.drop_silent(["n3"])
    assert pool.used == ("n1", "n2", "n4")


def test_spare_node_stays_idle_in_an_allocation_smaller_than_requested() -> None:
    pool = NodePool(FOUR, most=8, least=2, spare=1)
    assert (pool.used, pool.idle) == (("n1", "n2", "n3"), ("n4",))
    assert pool.drop_silent(["n4"])
    assert pool.used == ("n1", "n2", "n3")
    assert pool.missing == (), "the run has its size"
    assert pool.drop_silent(["n3"])
    assert pool.used == ("n1", "n2")
    assert pool.missing == ("n3", "n4")


def test_unfit_nodes_do_not_return() -> None:
    pool = NodePool(FOUR, most=4, least=3)
    assert pool.drop_unfit(["n1"])
    assert (pool.used, pool.present, pool.missing) == (("n2", "n3", "n4"), FOUR, ())
    assert not pool.drop_unfit(["n2"])
    pool.restore(["n1"])
    assert pool.used == ("n2", "n3", "n4")
