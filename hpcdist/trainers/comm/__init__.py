"""Trainer `comm`: checks and measures the communication between ranks (`hpcdist bench comm`)."""

from __future__ import annotations

from hpcdist.bench import CommConfig
from hpcdist.config.schema import Trainer

TRAINER = Trainer(section=CommConfig, is_benchmark=True)
