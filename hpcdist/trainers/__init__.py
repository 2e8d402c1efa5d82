"""The shipped trainers: one package each, which no other trainer imports.

A package declares its trainer, without torch, as `TRAINER` in its `__init__.py`: a `Trainer` of
`config/trainer_declaration.py`. Its `train.py` holds the training loop, `train(ctx, cfg)`. To add a trainer, add its
package, its config in `configs/`, its page of the documentation, and its name here.
"""

#: The names of the shipped trainers, which are those of their packages. The first one is the default.
NAMES = ("ddp", "lm", "rl", "rnn", "pipeline", "hybrid", "comm")
