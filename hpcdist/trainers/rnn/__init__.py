"""Trainer `rnn`: a recurrent language model with its vocabulary on parameter servers."""

from __future__ import annotations

from hpcdist.config.schema import Trainer
from hpcdist.trainers.rnn.schema import RnnConfig

TRAINER = Trainer(
    section=RnnConfig,
    shared_sections=("optim", "schedule"),
    roles={"trainer": 1, "parameter_server": 1},
    instead_of_accumulation="rnn.batch_size",
    charts={"perplexity": ("eval/perplexity",)},
    fixed_keys=("rnn.embedding_size", "rnn.hidden_size", "rnn.num_layers", "rnn.tie_weights", "optim.name"),
)
