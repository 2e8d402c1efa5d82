"""The Trainer of Transformers with `report_to="mlflow"`, on a tiny model with random weights, as for torchrun.

hpcdist run scripts.yaml "trainer.script=[transformers_trainer.py]"
"""

from __future__ import annotations

import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Counting(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=8,
        logging_steps=2,
        save_strategy="no",
        use_cpu=True,
        report_to="mlflow",
        run_name="counting",
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=Counting()).train()
    print(f"rank {os.environ['RANK']} has trained", flush=True)


if __name__ == "__main__":
    main()
