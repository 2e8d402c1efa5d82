"""Like PyTorch's imagenet example under torchrun: argparse with a positional folder, `env://`, checkpoint and best."""

import argparse
import os
import shutil

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("data", nargs="?", default="imagenet")
parser.add_argument("-a", "--arch", default="resnet18", choices=["resnet18", "tiny"])
parser.add_argument("-b", "--batch-size", default=256, type=int)
parser.add_argument("--lr", "--learning-rate", default=0.1, type=float, dest="lr")
parser.add_argument("--dist-url", default="env://")
parser.add_argument("--resume", default="")
parser.add_argument("-e", "--evaluate", action="store_true")
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int)
args = parser.parse_args()

if args.dist_url == "env://" and args.rank == -1:
    args.rank = int(os.environ["RANK"])
    args.world_size = int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
args.batch_size = args.batch_size // args.world_size
torch.manual_seed(args.rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), args.lr)
for epoch in range(2):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(args.batch_size, 4)), torch.ones(args.batch_size).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = torch.tensor([loss.item()])
    dist.all_reduce(total)
    print(f"Epoch: [{epoch}]\tLoss {total.item() / args.world_size:.6f}")
    if args.rank % args.world_size == 0:
        torch.save({"epoch": epoch + 1, "state_dict": model.state_dict()}, f"{args.data}/checkpoint.pth.tar")
        shutil.copyfile(f"{args.data}/checkpoint.pth.tar", f"{args.data}/model_best.pth.tar")
