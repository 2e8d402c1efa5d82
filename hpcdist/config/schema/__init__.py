"""Every key of a config: its type, its default and its meaning, each in exactly one place.

Plain frozen dataclasses (stdlib only), so that a rank needs nothing but this package to know what it was asked for.
`config/loading.py` fills them from YAML and the command line. The line under a field is its documentation
(`hpcdist config --schema`).
"""

from hpcdist.config.schema.cluster import ClusterConfig, RoleRequest
from hpcdist.config.schema.container import ContainerConfig
from hpcdist.config.schema.describe import describe
from hpcdist.config.schema.exact import exact
from hpcdist.config.schema.launching import CheckpointConfig, LaunchConfig, TrackingConfig
from hpcdist.config.schema.needs import TRAINER_SECTIONS
from hpcdist.config.schema.preflight import PreflightConfig
from hpcdist.config.schema.run import Config, cross_check, role_device
from hpcdist.config.schema.training import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    ScheduleConfig,
    StopConfig,
    TrainerConfig,
)
from hpcdist.trainers.comm.schema import CommConfig
from hpcdist.trainers.hybrid.schema import HybridConfig
from hpcdist.trainers.pipeline.schema import PipelineConfig
from hpcdist.trainers.rl.schema import RlConfig
from hpcdist.trainers.rnn.schema import RnnConfig

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
