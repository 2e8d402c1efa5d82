"""Like multigpu_torchrun.py of PyTorch's DDP series and minGPT-ddp: a DistributedSampler, and a snapshot to resume."""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path, killed_in):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.train_data, self.optimizer, self.save_every = train_data, optimizer, save_every
        self.snapshot_path, self.killed_in, self.epochs_run = snapshot_path, killed_in, 0
        if os.path.exists(snapshot_path):
            snapshot = torch.load(snapshot_path)
            model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
            print(f"Resuming training from snapshot at Epoch {self.epochs_run}")
        self.model = DDP(model)

    def run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self.model(source), targets)
            loss.backward()
            self.optimizer.step()
            # Not part of the pattern: the rank dies in its first life, when the other one has saved its snapshot.
            if (epoch, self.rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (self.killed_in, 1, "0"):
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"[rank {self.rank}] Epoch {epoch} | Steps: {len(self.train_data)} | loss {loss.item():.6f}")

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self.run_epoch(epoch)
            if self.rank == 0 and (epoch + 1) % self.save_every == 0:
                snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
                torch.save(snapshot, self.snapshot_path)


def main(save_every, total_epochs, batch_size, snapshot_path, killed_in):
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.rand(64, 20), torch.rand(64, 1))
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset))
    Trainer(model, loader, optimizer, save_every, snapshot_path, killed_in).train(total_epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--batch_size", default=32, type=int)
    parser.add_argument("--snapshot-path", default="snapshot.pt")
    parser.add_argument("--killed-in", type=int)
    args = parser.parse_args()
    main(args.save_every, args.total_epochs, args.batch_size, args.snapshot_path, args.killed_in)
