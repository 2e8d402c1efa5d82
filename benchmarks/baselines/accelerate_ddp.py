"""The training step of `bare_ddp.py` with Hugging Face Accelerate, as in its documentation.

Source: https://huggingface.co/docs/accelerate/basic_tutorials/migration
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from setting import Clock, parse_arguments, training_tensors
from torch.utils.data import DataLoader, TensorDataset

from hpcdist.data.datasets import SimpleCNN


def main() -> None:
    arguments = parse_arguments()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    images, labels = training_tensors(arguments)
    loader = DataLoader(TensorDataset(images, labels), batch_size=arguments.batch_size, shuffle=True)
    model = SimpleCNN(num_classes=10, in_channels=images.shape[1], image_size=images.shape[2])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    clock = Clock(arguments, accelerator.process_index)
    accelerator.wait_for_everyone()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        if clock.tick():
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
