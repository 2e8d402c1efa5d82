"""The programs of examples/tutorials: their smallest sizes, metrics and weights."""

from __future__ import annotations

from dataclasses import dataclass

from doc_blocks import ROOT

FOLDER = ROOT / "examples" / "tutorials"


@dataclass(frozen=True)
class Tutorial:
    name: str
    num_ranks: int
    arguments: tuple[str, ...]  #: of a short run
    metric: str
    weights: str  #: file of the final weights
    output: str  #: a part of it

    @property
    def script(self) -> str:
        """The override of the shipped config for a short run."""
        return f"trainer.script=[{','.join([str(FOLDER / f'{self.name}.py'), *self.arguments])}]"


TUTORIALS = [
    Tutorial("ddp_mnist", 2, ("--epochs", "1"), "eval/accuracy", "mnist.pt", "epoch 1: accuracy 0."),
    Tutorial("collectives", 4, (), "train/loss", "linear.pt", "'SUM': 10.0, 'PRODUCT': 24.0, 'MAX': 4.0, 'MIN': 1.0"),
    Tutorial("rl_observers", 3, ("--rounds", "3"), "train/mean_return", "policy.pt", "round 3: mean return "),
    Tutorial("rnn_parameter_server", 2, ("--steps", "50"), "train/loss", "language_model.pt", "step 50: loss "),
    Tutorial(
        "pipeline_resnet50",
        3,
        ("--steps", "1", "--batch-size", "8", "--image-size", "32", "--splits", "1", "2"),
        "train/seconds_with_2_splits",
        "resnet50.pt",
        "2 splits: ",
    ),
    Tutorial("ddp_with_rpc", 4, ("--steps", "100"), "train/loss", "hybrid.pt", "step 100: loss "),
]
