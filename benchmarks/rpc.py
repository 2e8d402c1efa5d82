"""Round trips between two ranks on this machine by the RPC of the trainers, compared with torch.distributed.rpc.

    python benchmarks/rpc.py [--rounds 9] [--json]

One rank sends a tensor, the other one returns it, one call at a time and with eight calls in flight. Both are open in
the same two ranks of `hpcdist run` and alternate. Results are milliseconds per call, medians of the rounds; the ratios,
torch's time over hpcdist's, are computed within each round.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
from harness import HPCDIST, argument_parser, call, clean_env, median_ratio

from hpcdist import Config, Context
from hpcdist.rank.rpc import rpc_group

#: Bytes of the tensor, and the number of calls that are timed.
SIZES = {"4 B": (4, 200), "4 KiB": (2**12, 200), "256 KiB": (2**18, 100), "1 MiB": (2**20, 60), "8 MiB": (2**23, 16)}
IN_FLIGHT = (1, 8)
CONFIG = """\
experiment: rpc
trainer: rpc:train
roles: {caller: 1, answerer: 1}
launch: {device: cpu, num_threads: 1}
"""


def train(ctx: Context, cfg: Config) -> None:
    """Measure on rank 0, which writes a line of JSON per round; rank 1 answers."""
    out = Path(cfg.params["out"])
    # InfiniBand or TCP: the transport by shared memory polls without a pause in every rank.
    options = torch_rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=16, init_method=f"file://{out}.meet", _transports=["ibv", "uv"]
    )
    name, peer = ctx.roles.name_of(ctx.rank), ctx.roles.name_of(1)
    torch_rpc.init_rpc(name, rank=ctx.rank, world_size=ctx.world_size, rpc_backend_options=options)
    with rpc_group(ctx, {"echo": echo}) as group:
        if ctx.is_main:
            contenders: dict[str, Callable[[torch.Tensor], Any]] = {
                "hpcdist": lambda tensor: group.call(peer, "echo", tensor).result,
                "torch": lambda tensor: torch_rpc.rpc_async(peer, echo, (tensor,)).wait,
            }
            with out.open("w") as file:
                for number in range(int(cfg.params["rounds"]) + 1):  # the first one does not count
                    order = list(contenders)
                    if number % 2 == 0:
                        order.reverse()
                    times = {(*case, name): ms(contenders[name], *case) for case in cases() for name in order}
                    file.write(json.dumps([[*key, value] for key, value in times.items()]) + "\n")
        else:
            group.serve({})
    torch_rpc.shutdown()
    ctx.end_reason = "completed the measurement"


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def cases() -> Iterator[tuple[str, int]]:
    return ((size, num_calls) for size in SIZES for num_calls in IN_FLIGHT)


def ms(call_echo: Callable[[torch.Tensor], Callable[[], torch.Tensor]], size: str, in_flight: int) -> float:
    """Return the milliseconds per call. `call_echo` starts a call, and returns the function that awaits its result."""
    num_bytes, num_calls = SIZES[size]
    tensor = torch.ones(num_bytes // 4)
    waiting: deque[Callable[[], torch.Tensor]] = deque()
    began = time.perf_counter()
    for _ in range(num_calls):
        if len(waiting) == in_flight:
            waiting.popleft()()
        waiting.append(call_echo(tensor))
    while waiting:
        waiting.popleft()()
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
    print(f"{'tensor':10}{'in flight':>10}{'hpcdist':>9}{'torch':>9}  torch over hpcdist")
    ratios = {}
    for size, in_flight in cases():
        ours, baseline = ([each[size, in_flight, name] for each in rounds] for name in ("hpcdist", "torch"))
        ratios[f"{size}, {in_flight}"] = ratio = median_ratio(baseline, ours)
        print(f"{size:10}{in_flight:10}{statistics.median(ours):9.2f}{statistics.median(baseline):9.2f}  {ratio:.2f}")
    if arguments.json:
        print(json.dumps({"benchmark": "rpc", "rounds": arguments.rounds, "torch_over_hpcdist": ratios}))


if __name__ == "__main__":
    main()
