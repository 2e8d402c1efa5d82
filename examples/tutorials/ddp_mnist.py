"""Distributed data parallelism: a convolutional network on handwritten digits, one process per device.

    python ddp_mnist.py                    # starts two processes itself
    torchrun --nproc-per-node 2 ddp_mnist.py
    hpcdist run tutorial_ddp_mnist         # or: hpcdist run ddp_mnist.py --epochs 5

Read it beside https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html. It trains on the digits that
scikit-learn contains, or with `--data FOLDER` on MNIST, which torchvision downloads to the folder if it is missing.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hpcdist

NUM_PROCESSES = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per process")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--data", help="folder of MNIST")
    parser.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    return parser.parse_args()


def load_digits(folder: str | None) -> tuple[Dataset, Dataset]:
    """Return training and test data: images [1, height, width] in [0, 1], and their classes."""
    if folder is not None:
        from torchvision import datasets, transforms

        to_tensor = transforms.ToTensor()
        # One process downloads; the others wait for it.
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            datasets.MNIST(folder, download=True)
        dist.barrier()
        return (datasets.MNIST(folder, transform=to_tensor), datasets.MNIST(folder, train=False, transform=to_tensor))
    from sklearn.datasets import load_digits as load

    digits = load()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(images, 28)  # as large as those of MNIST
    classes = torch.tensor(digits.target)
    num_training = 4 * len(classes) // 5
    training = TensorDataset(images[:num_training], classes[:num_training])
    return training, TensorDataset(images[num_training:], classes[num_training:])


class Network(nn.Module):
    """Has the names and sizes of the model `simple_cnn`, which can start from its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.conv2(hidden), 2))
        return self.fc2(F.relu(self.fc1(hidden.flatten(1))))


def accuracy(model: nn.Module, test: Dataset, device: torch.device) -> float:
    """Return the share of correct test samples; each process evaluates a part of them."""
    model.eval()
    counts = torch.zeros(2, device=device)
    sampler = DistributedSampler(test, shuffle=False)
    with torch.no_grad():
        for images, classes in DataLoader(test, batch_size=256, sampler=sampler):
            predicted = model(images.to(device)).argmax(1)
            counts += torch.tensor([(predicted == classes.to(device)).sum(), len(classes)], device=device)
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def train(arguments: argparse.Namespace) -> None:
    """Train in one of the processes. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment."""
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    is_main = dist.get_rank() == 0
    torch.manual_seed(0)
    training, test = load_digits(arguments.data)
    sampler = DistributedSampler(training)
    loader = DataLoader(training, arguments.batch_size, sampler=sampler, drop_last=True)

    network = Network().to(device)
    model = DistributedDataParallel(network, device_ids=[local_rank] if device.type == "cuda" else None)
    compiled = torch.compile(model) if arguments.compile else model
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)

    # A checkpoint of rank 0, which each process loads to its own device.
    checkpoint = hpcdist.checkpoint_dir() / "mnist.pt"
    epoch = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        epoch = saved["epoch"]
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if is_main:
            print(f"{checkpoint} has {epoch} epochs: continuing after them", flush=True)

    step = epoch * len(loader)
    while epoch < arguments.epochs:
        sampler.set_epoch(epoch)  # another order in each epoch
        for images, classes in loader:
            loss = F.cross_entropy(compiled(images.to(device)), classes.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            hpcdist.log({"train/loss": loss.item()}, step)
        epoch += 1
        metrics = {"eval/accuracy": accuracy(model, test, device)}
        hpcdist.log(metrics, step)
        if is_main:
            print(f"epoch {epoch}: accuracy {metrics['eval/accuracy']:.4f}", flush=True)
            parts = {"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(parts, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
        if hpcdist.should_stop(step, arguments.epochs * len(loader)):
            break
    dist.destroy_process_group()


def start(rank: int, arguments: argparse.Namespace) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    train(arguments)


if __name__ == "__main__":
    parsed = parse_arguments()
    if "RANK" in os.environ:  # started by torchrun or hpcdist
        train(parsed)
    else:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        os.environ["WORLD_SIZE"] = str(NUM_PROCESSES)
        torch.multiprocessing.spawn(start, (parsed,), nprocs=NUM_PROCESSES)
