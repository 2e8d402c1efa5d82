"""Damaged messages of clients that know the key: the store and RPC answer or drop them, and serve the next one."""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import zmq
from context_scene import SINGLE_RANK, new_run, open_context
from fuzzing import fuzz
from hypothesis import strategies as st

from hpcdist.config.schema import Config
from hpcdist.rank.frame_parts import PART_BYTES
from hpcdist.rank.rendezvous_store import Meeting, RendezvousStore
from hpcdist.rank.rpc import RpcGroup, rpc_group

OPERATIONS = (b"set", b"get", b"wait", b"add", b"append", b"check", b"compare_set", b"delete", b"count")
FRAMES = st.one_of(
    st.sampled_from([*OPERATIONS, b"", b"a", b"0", b"-1", b"1e9", b"nan", b"inf", b"-inf", b"9" * 5000, b"\xff"]),
    st.binary(max_size=8),
    st.sampled_from([bytes(PART_BYTES - 1), bytes(PART_BYTES), bytes(PART_BYTES + 1)]),
)
REQUESTS = st.lists(st.lists(FRAMES, min_size=1, max_size=5), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> RendezvousStore:
    meeting = Meeting(token="fuzz", folder=tmp_path_factory.mktemp("fuzz"))
    return RendezvousStore(meeting, timedelta(seconds=20), serve=True)


@pytest.fixture(scope="module")
def client(store: RendezvousStore) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.rcvtimeo = 20_000
        sock.connect(store._endpoint)
        yield sock


@fuzz(share=4, requests=REQUESTS, has_delimiter=st.sampled_from([True, True, True, False]))
def test_store_serves_after_damaged_requests(
    store: RendezvousStore, client: zmq.Socket[bytes], requests: list[list[bytes]], has_delimiter: bool
) -> None:
    for request in requests:
        client.send_multipart([b""] * has_delimiter + request)
    # Requests of one client are served in order, so this answer comes after theirs.
    client.send_multipart([b"", b"compare_set", b"fuzz", b"", b"served"])
    while client.recv_multipart() != [b"", b"ok", b"served"]:
        pass
    assert store.get("fuzz") == b"served"
    store.delete_key("fuzz")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RpcGroup]:
    run = new_run(tmp_path_factory.mktemp("fuzz"))
    functions = {"echo": lambda *values: values}
    with open_context(SINGLE_RANK, run, Config()) as ctx, rpc_group(ctx, functions, num_threads=2) as group:
        yield group


JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-2, 3), st.integers(), st.floats(), st.sampled_from(["echo", "float32"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["tensor", "tuple", "dict", "other"]), inner, max_size=2),
    ),
    max_leaves=8,
)
VALID: list[Any] = [0, 10**6, 0, "echo", {"tuple": [{"tensor": 0}]}, [["float32", [2], [0], False]]]
HEADERS = st.one_of(
    JSON,
    st.tuples(*[st.one_of(st.just(part), JSON) for part in VALID]),
    st.builds(
        lambda dtype, shape, order, on_gpu: [*VALID[:5], [[dtype, shape, order, on_gpu]]],
        st.sampled_from([name for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)]),
        st.lists(st.one_of(st.integers(-2, 3), st.integers(), st.floats()), max_size=3),
        st.one_of(st.permutations(range(3)), JSON),
        st.booleans(),
    ),
).map(lambda header: json.dumps(header).encode())
PARTS = st.lists(st.one_of(st.binary(max_size=8), st.just(bytes(8)), st.just(bytes(PART_BYTES))), max_size=3)


@fuzz(share=8, header=st.one_of(HEADERS, HEADERS, st.binary(max_size=20)), parts=PARTS)
def test_rpc_serves_after_damaged_messages(group: RpcGroup, header: bytes, parts: list[bytes]) -> None:
    transport = group.transport
    peer = transport._peers[0]
    with peer.lock:
        peer.sock.send_multipart([header, *parts])
    # As many calls as threads answer: with fewer threads one of them would wait for ever.
    for answer in [group.call(0, "echo", torch.ones(2), timeout_s=120) for _ in range(2)]:
        assert answer.result()[0].tolist() == [1.0, 1.0]
    assert all(thread.is_alive() for thread in transport._threads)
