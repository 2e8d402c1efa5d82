"""Every key of a config: its type, its default and its meaning, each in exactly one place.

Plain frozen dataclasses (stdlib only), so that a rank needs nothing but this package to know what it was asked for.
`config.py` fills them from YAML and the command line. The line under a field is its documentation
(`hpcdist config --schema`).
"""

from hpcdist.schema.cluster import ClusterConfig, RoleRequest
from hpcdist.schema.comm import CommConfig
from hpcdist.schema.container import ContainerConfig
from hpcdist.schema.describe import describe
from hpcdist.schema.exact import exact
from hpcdist.schema.hybrid import HybridConfig
from hpcdist.schema.needs import TRAINER_SECTIONS
from hpcdist.schema.pipeline import PipelineConfig
from hpcdist.schema.preflight import PreflightConfig
from hpcdist.schema.rl import RlConfig
from hpcdist.schema.rnn import RnnConfig
from hpcdist.schema.run import Config, cross_check, role_device
from hpcdist.schema.running import CheckpointConfig, LaunchConfig, TrackingConfig
from hpcdist.schema.training import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    ScheduleConfig,
    StopConfig,
    TrainerConfig,
)

__all__ = [
    "TRAINER_SECTIONS",
    "CheckpointConfig",
    "ClusterConfig",
    "CommConfig",
    "Config",
    "ContainerConfig",
    "DataConfig",
    "HybridConfig",
    "LaunchConfig",
    "ModelConfig",
    "OptimConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "PreflightConfig",
    "RlConfig",
    "RnnConfig",
    "RoleRequest",
    "ScheduleConfig",
    "StopConfig",
    "TrackingConfig",
    "TrainerConfig",
    "cross_check",
    "describe",
    "exact",
    "role_device",
]
