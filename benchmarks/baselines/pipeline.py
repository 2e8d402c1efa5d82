"""The RPC pipeline of `examples/tutorials/pipeline_resnet50.py` step by step: the baseline of `benchmarks/pipeline.py`.

For each number of splits on standard input it does one step of the program's pipeline and prints its seconds: in the
benchmark all contenders take turns. SGD, and MSE on one-hot labels, as in the program.

python benchmarks/baselines/pipeline.py RANK FOLDER BATCH_SIZE IMAGE_SIZE       # ranks 0 to 2, the master is rank 0
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "tutorials"))

from pipeline_resnet50 import NUM_CLASSES, STAGES, Pipeline


def master(batch_size: int, image_size: int) -> None:
    pipeline = Pipeline()
    optimizer = DistributedOptimizer(torch.optim.SGD, pipeline.parameter_references(), lr=0.05)
    loss_fn = nn.MSELoss()
    images = torch.randn(batch_size, 3, image_size, image_size)
    labels = nn.functional.one_hot(torch.arange(batch_size) % NUM_CLASSES, NUM_CLASSES).float()
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        with dist_autograd.context() as context_id:
            outputs = pipeline(images, int(line))
            dist_autograd.backward(context_id, [loss_fn(outputs, labels)])  # type: ignore[attr-defined]  # torch exports it at run time
            optimizer.step(context_id)
        print(time.perf_counter() - began, flush=True)


def main() -> None:
    rank, folder, batch_size, image_size = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=128, rpc_timeout=300, init_method=f"file://{folder}/meet"
    )
    rpc.init_rpc(["master", *STAGES][rank], rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        master(batch_size, image_size)
    rpc.shutdown()


if __name__ == "__main__":
    main()
