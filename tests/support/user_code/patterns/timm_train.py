"""Like timm's train.py: two parsers, with defaults from a YAML file, and args.yaml and summary.csv in a folder."""

import argparse
import csv
import logging
import os

import torch
import torch.distributed as dist
import yaml

_logger = logging.getLogger("train")
config_parser = argparse.ArgumentParser(add_help=False)
config_parser.add_argument("-c", "--config", default="")
parser = argparse.ArgumentParser()
parser.add_argument("--opt", default="sgd")
parser.add_argument("--lr", type=float, default=None)
parser.add_argument("--lr-base", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=300)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--output", default="")


def main():
    args_config, remaining = config_parser.parse_known_args()
    if args_config.config:
        with open(args_config.config) as file:
            parser.set_defaults(**yaml.safe_load(file))
    args = parser.parse_args(remaining)
    args_text = yaml.safe_dump(args.__dict__, default_flow_style=False)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    dist.init_process_group(backend="gloo", init_method="env://")
    _logger.info(f"Training in distributed mode. Process {rank}, total {world_size}.")
    args.lr = args.lr or args.lr_base * world_size
    torch.manual_seed(42 + rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    if rank == 0:
        with open(os.path.join(args.output, "args.yaml"), "w") as file:
            file.write(args_text)
    for epoch in range(args.epochs):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            _logger.info(f"Train: {epoch} Loss: {loss.item():.6f}")
            with open(os.path.join(args.output, "summary.csv"), "a") as file:
                row = csv.DictWriter(file, fieldnames=["epoch", "train_loss"])
                if epoch == 0:
                    row.writeheader()
                row.writerow({"epoch": epoch, "train_loss": loss.item()})


if __name__ == "__main__":
    main()
