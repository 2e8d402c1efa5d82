"""Round trips between two ranks on this machine by RPC: `launch.rpc` zmq compared with torch.distributed.rpc.

    python benchmarks/rpc.py [--rounds 9] [--json]

One rank sends a tensor, the other one returns it, one call at a time and with eight calls in flight. Both transports
are open in the same two ranks of `hpcdist run` and alternate. Results are milliseconds per call, medians of the rounds;
the ratios, torch's time over zmq's, are computed within each round.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import torch
from harness import HPCDIST, argument_parser, call, clean_env, median_ratio

from hpcdist import Config, Context
from hpcdist.rank.rpc import rpc_group
from hpcdist.rank.rpc_torch import TorchTransport
from hpcdist.rank.rpc_zmq import ZmqTransport

#: Bytes of the tensor, and the number of calls that are timed.
SIZES = {"4 B": (4, 200), "4 KiB": (2**12, 200), "256 KiB": (2**18, 100), "1 MiB": (2**20, 60), "8 MiB": (2**23, 16)}
IN_FLIGHT = (1, 8)
CONFIG = """\
experiment: rpc
trainer: rpc:train
roles: {caller: 1, answerer: 1}
launch: {device: cpu, num_threads: 1, rpc_trusted_nodes: true}
"""


def train(ctx: Context, cfg: Config) -> None:
    """Measure on rank 0, which writes a line of JSON per round; rank 1 answers."""
    with rpc_group(ctx, {"echo": lambda tensor: tensor}) as group:
        baseline = TorchTransport(group.endpoint, 16)
        ctx.barrier()
        if ctx.is_main:
            transports = {"zmq": group.transport, "torch": baseline}
            with Path(cfg.params["out"]).open("w") as out:
                for number in range(int(cfg.params["rounds"]) + 1):  # the first one does not count
                    order = list(transports)[:: 1 if number % 2 else -1]
                    times = {(*case, name): ms(transports[name], *case) for case in cases() for name in order}
                    out.write(json.dumps([[*key, value] for key, value in times.items()]) + "\n")
        else:
            group.serve({})
    baseline.close()
    ctx.end_reason = "completed the measurement"


def cases() -> Iterator[tuple[str, int]]:
    return ((size, num_calls) for size in SIZES for num_calls in IN_FLIGHT)


def ms(transport: TorchTransport | ZmqTransport, size: str, in_flight: int) -> float:
    """Return the milliseconds per call to rank 1."""
    num_bytes, num_calls = SIZES[size]
    tensor = torch.ones(num_bytes // 4)
    waiting: deque[Future[torch.Tensor]] = deque()
    began = time.perf_counter()
    for _ in range(num_calls):
        if len(waiting) == in_flight:
            waiting.popleft().result()
        waiting.append(transport.call(1, "echo", (tensor,), 60.0))
    while waiting:
        waiting.popleft().result()
    return 1000 * (time.perf_counter() - began) / num_calls


def main() -> None:
    arguments = argument_parser(__doc__, rounds=9).parse_args()
    with tempfile.TemporaryDirectory(prefix="rpc_") as name:
        folder, out = Path(name), Path(name) / "out.jsonl"
        (folder / "rpc.yaml").write_text(CONFIG)
        command = [
            *HPCDIST,
            "run",
            "rpc.yaml",
            f"runs_dir={folder}",
            f"params={{out: {out}, rounds: {arguments.rounds}}}",
        ]
        call(command, folder, {**clean_env(), "PYTHONPATH": str(Path(__file__).parent)})
        rounds = [{tuple(key): ms for *key, ms in json.loads(line)} for line in out.read_text().splitlines()[1:]]
    print(f"milliseconds per round trip, medians of {len(rounds)} rounds\n")
    print(f"{'tensor':10}{'in flight':>10}{'zmq':>9}{'torch':>9}  torch over zmq")
    ratios = {}
    for size, in_flight in cases():
        zmq, baseline = ([each[size, in_flight, name] for each in rounds] for name in ("zmq", "torch"))
        ratios[f"{size}, {in_flight}"] = ratio = median_ratio(baseline, zmq)
        print(f"{size:10}{in_flight:10}{statistics.median(zmq):9.2f}{statistics.median(baseline):9.2f}  {ratio:.2f}")
    if arguments.json:
        print(json.dumps({"benchmark": "rpc", "rounds": arguments.rounds, "torch_over_zmq": ratios}))


if __name__ == "__main__":
    main()
