"""Expansion of Slurm's node lists and task counts, and errors of malformed ones."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from slurm_cluster import REQUIRE

from hpcdist.errors import TopologyError
from hpcdist.host.nodelist import MAX_HOSTS, expand, expand_tasks


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", "n1"),
        ("login-1.site.org", "login-1.site.org"),
        ("b,a,c", "b a c"),
        ("n[3,1-2],m7", "n3 n1 n2 m7"),
        ("n[008-011]", "n008 n009 n010 n011"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[98-101]", "n98 n99 n100 n101"),
        ("n[01,1]", "n01 n1"),
        ("n[1-3]-ib", "n1-ib n2-ib n3-ib"),
        ("rack[1-2]-node[3-4]", "rack1-node3 rack1-node4 rack2-node3 rack2-node4"),
        ("gpu[01]-[02-03]", "gpu01-02 gpu01-03"),
        ("x[1-2]y[1,3]z,w", "x1y1z x1y3z x2y1z x2y3z w"),
        ("[1-2]n", "1n 2n"),
        ("m[1-2]n[3-4]o[5-6]", "m1n3o5 m1n3o6 m2n3o5 m2n3o6 m1n4o5 m1n4o6 m2n4o5 m2n4o6"),
        ("m[1-2]n[3-4]o[5],p[1-2]", "m1n3o5 m2n3o5 m1n4o5 m2n4o5 p1 p2"),
        ("n[5-5]", "n5"),
        ("n2,n2", "n2 n2"),
    ],
)
def test_nodelist_is_expanded_in_order(nodelist: str, hosts: str) -> None:
    assert expand(nodelist) == hosts.split()


def random_nodelist(draw: random.Random) -> str:
    """Return a nodelist of one to three names with one to four groups each, which Slurm accepts."""

    def number() -> str:
        return f"{draw.randrange(12):0{draw.randint(1, 3)}d}"

    def choice() -> str:
        low = number()
        return draw.choice([low, f"{low}-{int(low) + draw.randrange(4)}"])

    def group() -> str:
        return (
            draw.choice(["n", "rack", "a-b", "x1y", ""]) + f"[{','.join(choice() for _ in range(draw.randint(1, 3)))}]"
        )

    def name() -> str:
        return "c" + "".join(group() for _ in range(draw.randint(1, 4)))

    return ",".join(draw.choice([name, name, name, lambda: f"login{number()}"])() for _ in range(draw.randint(1, 3)))


@pytest.mark.processes
def test_order_is_that_of_scontrol(tmp_path: Path) -> None:
    if shutil.which("scontrol") is None:
        reason = "scontrol not found: install Slurm's commands (scripts/test_packages.sh)"
        pytest.fail(f"{REQUIRE}=1, but {reason}") if os.environ.get(REQUIRE) == "1" else pytest.skip(reason)
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    draw = random.Random(1)
    nodelists = [random_nodelist(draw) for _ in range(2000)]
    for first in range(0, len(nodelists), 100):  # separated by a name that none of them contains
        some = nodelists[first : first + 100]
        command = ["scontrol", "show", "hostnames", ",end,".join(some)]
        done = subprocess.run(
            command, env={**os.environ, "SLURM_CONF": str(conf)}, capture_output=True, text=True, check=True
        )
        for nodelist, expected in zip(some, done.stdout.split("\nend\n"), strict=True):
            assert expand(nodelist) == expected.split(), nodelist


@pytest.mark.parametrize(
    ("nodelist", "problem"),
    [
        *(
            (text, f"{text!r} is not a node name")
            for text in ("", "n[1-", "n[1-2", "n[1]-[", "n]", "n[1]]", "n[1-2[3-4]]")
        ),
        *((text, f"{text!r} is not a node name") for text in ("(null)", "n1\n", "-oProxyCommand")),
        ("n[1-2,b[3]", "nodelist 'n[1-2,b[3]': 'n[1-2' is not a node name"),
        *((text, "'' is not a node name") for text in ("n1,,n2", "n1,")),
        ("n1, n[2,3]", "' n[2,3]' is not a node name"),
        ("ok,-oProxyCommand", "'-oProxyCommand' is not a node name"),
        *(
            (f"n[1,{choice}]", f"expected a number or a range like 1-3, got {choice!r}")
            for choice in ("3-1", "a-b", "", "-1", "1-2-3", "1:3", "²")
        ),
        ("n[" + "9" * 30 + "]", "expected a number or a range like 1-3, got '999"),
        *(
            (text, "more than 1,000,000 names")
            for text in ("n[1-99999999999]", "n[1-1000]-[1-1001]", "a[1-600000],b[1-600000]", "n[1-600000,7-600000]")
        ),
        ("x" * 250 + "[1000001-1000002]", "a node name of more than 255 characters"),
    ],
)
def test_malformed_nodelist_is_rejected(nodelist: str, problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(problem)):
        expand(nodelist)


def test_error_contains_an_example_and_is_short() -> None:
    with pytest.raises(TopologyError, match=r"; expected a form like n1,n\[2-4\]") as caught:
        expand("n" * 5000 + "[")
    assert len(str(caught.value)) < 400


def test_largest_nodelist_is_expanded() -> None:
    hosts = expand(f"n[1-{MAX_HOSTS}]")
    assert (len(hosts), hosts[-1]) == (MAX_HOSTS, f"n{MAX_HOSTS}")


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1(x2),16", [1, 1, 16]), ("3,1(x2)", [3, 1, 1])],
)
def test_tasks_per_node(text: str, tasks: list[int]) -> None:
    assert expand_tasks(text) == tasks


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "tasks per node '': '' is not a count like 2 or 2(x3)"),
        ("2(x3),", "tasks per node '2(x3),': '' is not a count"),
        ("2(x", "'2(x' is not a count like 2 or 2(x3); use the value that Slurm sets"),
        ("2(x0)", "'2(x0)' is not a count"),
        ("0", "'0' is not a count"),
        ("2,-1", "'-1' is not a count"),
        ("two", "'two' is not a count"),
        ("1(x600000),1(x600000)", "more than 1,000,000 nodes; check the value"),
    ],
)
def test_malformed_tasks_per_node_are_rejected(text: str, problem: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(problem)):
        expand_tasks(text)
