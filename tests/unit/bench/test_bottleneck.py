"""Where the bottleneck is: told of nodes, directions and pairs that are slow, and of nothing where all is well."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import pytest
from sample_comm import Factor, row, sample, with_links

from hpcdist.bench.bottleneck import bottleneck
from hpcdist.bench.results import RankPlace, Results


def of(node: str, factor: float = 6.0) -> Factor:
    """Everything from or to a node."""
    return lambda source, target: factor if node in (source, target) and source != target else 1.0


def way(source: str, target: str, factor: float = 6.0) -> Factor:
    """What goes from one node to another; `*` is any."""
    return lambda here, there: factor if source in ("*", here) and target in ("*", there) and here != there else 1.0


def only(sentences: list[str]) -> str:
    (sentence,) = sentences
    return sentence


@pytest.mark.parametrize("num_nodes", [3, 4, 5, 16])
def test_a_node_that_is_slow_with_all_others(num_nodes: int) -> None:
    """Of three nodes' pairs most have to do with it; the median pair still is one that has not."""
    said = only(bottleneck(with_links(sample(num_nodes, noise=0.02), slower=of("n3"))))
    match = re.fullmatch(r"n3 is (\S+)× slower than the median pair in both directions \((\d+) MB/s, .*", said)
    assert match, said
    assert 5.5 < float(match[1]) < 6.5
    assert 180 < float(match[2]) < 220
    assert said.endswith("1.20 GB/s): check its link and network card") or "median 1." in said


def test_a_node_with_several_ranks_is_named_once() -> None:
    said = only(bottleneck(with_links(sample(3, 4), slower=of("n2"))))
    assert re.match(r"n2 is [56]\S*× slower than the median pair in both directions", said), said


def test_one_rank_of_a_node() -> None:
    """A card among four: the node's other ranks are at full speed."""
    found = sample(2, 4)
    pairs = [
        replace(pair, bandwidth=pair.bandwidth / 3) if 5 in (pair.source, pair.target) else pair for pair in found.pairs
    ]
    said = bottleneck(replace(found, pairs=pairs))
    assert [sentence.partition(" is ")[0] for sentence in said] == ["rank 5 (n2)", "rank 5 (n2)"]
    assert "× slower than the median pair within a node in both directions" in said[1]


@pytest.mark.parametrize(
    ("slower", "expected"),
    [
        (
            way("n3", "*"),
            r"n3 sends [56]\S*× slower than .*, and receives at full speed: check its card, cable and switch port",
        ),
        (way("*", "n3"), r"n3 receives [56]\S*× slower than .*, and sends at full speed: check its card, .*"),
        (
            way("n3", "n1"),
            r"n3 → n1 is [56]\S*× slower than the median pair \(\d+ MB/s, median .*\), but n1 → n3 is not: .*",
        ),
    ],
    ids=["sends", "receives", "one way of a pair"],
)
def test_one_direction(slower: Factor, expected: str) -> None:
    said = only(bottleneck(with_links(sample(), slower=slower)))
    assert re.fullmatch(expected, said), said


def test_both_directions_of_a_pair() -> None:
    def slower(source: str, target: str) -> float:
        return 6.0 if {source, target} == {"n1", "n3"} else 1.0

    said = only(bottleneck(with_links(sample(per_node=2), slower=slower)))
    assert re.match(r"n1 ↔ n3 is [5-7]\S*× slower than the median pair in both directions", said), said


def test_two_slow_nodes_of_four_the_worst_first() -> None:
    def slower(source: str, target: str) -> float:
        return max(of("n2", 4.5)(source, target), of("n4", 9.0)(source, target))

    said = bottleneck(with_links(sample(), slower=slower))
    assert [sentence.partition(" is ")[0] for sentence in said] == ["n4", "n2"]


def test_late_at_full_bandwidth() -> None:
    said = only(bottleneck(with_links(sample(), later=of("n3", 8.0))))
    assert re.match(r"n3 has [78]\S*× the latency of the median pair \(\d+ µs, median .* µs\) at full bandwidth", said)
    said = only(bottleneck(with_links(sample(), later=way("n1", "n2", 8.0))))
    assert re.match(r"n1 → n2 has [789]\S*× the latency of the median pair", said), said


def test_a_delay_of_microseconds_is_nobodys_loss() -> None:
    found = sample()
    quick = replace(found, pairs=[replace(pair, latency_s=2e-6) for pair in found.pairs])
    assert "have equal bandwidth" in only(bottleneck(with_links(quick, later=of("n3", 5.0))))


def test_all_alike() -> None:
    said = only(bottleneck(sample(noise=0.03)))
    assert re.fullmatch(r"all 12 pairs have equal bandwidth: 1\.\d\d GB/s, within \d%", said), said


def test_within_and_between_nodes_are_two_things() -> None:
    """What stays in a node is four times faster, and the rest is not slow for that."""
    said = bottleneck(sample(2, 4, noise=0.03))
    assert [re.sub(r"[\d.]+", "#", sentence) for sentence in said] == [
        "all # pairs have equal bandwidth: # GB/s, within #%",
        "within a node: all # pairs have equal bandwidth: # GB/s, within #%",
    ]


def test_racks_are_no_fault() -> None:
    """Half as fast between two halves of the cluster: most pairs, so that is what the network is like."""

    def slower(source: str, target: str) -> float:
        return 2.0 if (int(source[1:]) <= 4) != (int(target[1:]) <= 4) else 1.0

    assert "no pair is an outlier" in only(bottleneck(with_links(sample(8, noise=0.03), slower=slower)))


def test_two_ranks() -> None:
    assert re.fullmatch(r"both pairs have equal bandwidth: .*, within \d+%", only(bottleneck(sample(2))))
    said = only(bottleneck(with_links(sample(2), slower=way("n1", "n2"))))
    assert re.match(r"n1 → n2 is [56]\S*× slower than the median pair", said), said
    slightly = only(bottleneck(with_links(sample(2, noise=0.0), slower=way("n1", "n2", 1.8))))
    assert slightly.startswith("no pair is an outlier: "), "two numbers say little"


def test_one_rank_has_no_pairs() -> None:
    assert bottleneck(sample(1)) == ["no pairs were measured"]


def test_one_machine_has_ranks_not_nodes() -> None:
    found = sample(1, 4, noise=0.02)
    pairs = [replace(pair, bandwidth=pair.bandwidth / 5) if pair.target == 2 else pair for pair in found.pairs]
    assert only(bottleneck(replace(found, pairs=pairs))).startswith("rank 2 receives 4.9× slower")


def test_many_slow_pairs_in_one_sentence() -> None:
    slow = {frozenset(pair) for pair in (("n1", "n2"), ("n3", "n4"), ("n5", "n6"), ("n7", "n8"), ("n1", "n8"))}
    said = only(
        bottleneck(with_links(sample(8), slower=lambda here, there: 6.0 if frozenset((here, there)) in slow else 1.0))
    )
    assert said.startswith("10 of 56 pairs are slow. The slowest: ")


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 8])
@pytest.mark.parametrize("noise", [0.05, 0.15, 0.25])
def test_noise_is_no_finding(num_nodes: int, noise: float) -> None:
    """A busy machine: how often a healthy one is called slow, by chance, in 100 benchmarks."""
    alarms = [
        said
        for seed in range(100)
        for said in bottleneck(sample(num_nodes, noise=noise, seed=seed))
        if "er than" in said
    ]
    assert len(alarms) <= (1 if noise < 0.2 else 5), alarms


@pytest.mark.parametrize("noise", [0.05, 0.15, 0.25])
def test_what_is_really_slow_is_found_in_noise(noise: float) -> None:
    found = [bottleneck(with_links(sample(seed=seed, noise=noise), slower=of("n3"))) for seed in range(50)]
    missed = [said for said in found if not said[0].startswith("n3 is ")]
    assert len(missed) <= (0 if noise < 0.2 else 2), missed


def with_sends(results: Results, *, tail: float = 1.2, hiccup: float = 1.0) -> Results:
    """With transfers of all sizes: how much longer the late ones take, and how much longer 64 B took than 128 B."""
    sends = [row("send_recv", "", "blocking", 50e-6 + size / 1e9, size) for size in (2**power for power in range(20))]
    sends = [
        replace(one, p99_s=tail * one.median_s, median_s=one.median_s * (hiccup if one.size == 64 else 1.0))
        for one in sends
    ]
    return replace(results, rows=sends)


@pytest.mark.parametrize("busy", [{"tail": 12.0}, {"hiccup": 12.0}])
def test_on_a_busy_machine_pairs_differ_as_transfers_do(busy: dict[str, float]) -> None:
    """Nothing is known of a pair that another moment would not have changed by as much."""
    slow = with_links(sample(), slower=of("n3"))
    assert bottleneck(with_sends(slow))[0].startswith("n3 is ")
    said = bottleneck(with_sends(slow, **busy))
    assert said[0].startswith("no pair is an outlier: ")
    assert said[1:] == ["the measurements are noisy: transfers differ by up to 12×, which hides smaller faults"]
    much = with_links(sample(), slower=of("n3", 50.0))
    assert bottleneck(with_sends(much, **busy))[0].startswith("n3 is ")


def test_whatever_goes_on_a_dead_link_is_told() -> None:
    dead = with_sends(with_links(sample(), slower=of("n3", 50.0)), tail=1000.0)
    assert bottleneck(dead)[0].startswith("n3 is ")


def test_ranks_that_were_measured_in_part() -> None:
    """Pairs that are missing, or measured nothing, are left out."""
    found = with_links(sample(6, noise=0.02), slower=of("n5"))
    chance = random.Random(1)
    pairs = [replace(pair, bandwidth=0.0) if chance.random() < 0.2 else pair for pair in found.pairs]
    said = only(bottleneck(replace(found, pairs=pairs)))
    assert said.startswith("n5 is ")
    assert math.isfinite(float(said.split()[2].rstrip("×")))


def test_names_of_places() -> None:
    found = sample(2)
    same = [RankPlace(rank=0, node="n1", device="cpu"), RankPlace(rank=1, node="n1", device="cpu")]
    slow = with_links(replace(found), slower=way("n1", "n2", 9.0))
    assert bottleneck(slow)[0].startswith("n1 → n2")
    assert bottleneck(replace(slow, ranks=same))[0].startswith("rank 0 → rank 1")
