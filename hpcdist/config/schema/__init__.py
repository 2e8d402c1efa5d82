"""All keys of a config with type, default and documentation, each defined in one place.

The sections are frozen dataclasses that need only the standard library; those of single trainers are in the packages
of the trainers. `config/loading.py` fills them from YAML and the command line. The string under a field is its
documentation (`hpcdist config --schema`).
"""

from hpcdist.config.schema.cluster import ClusterConfig, RoleRequest
from hpcdist.config.schema.container import ContainerConfig
from hpcdist.config.schema.conversion import as_written, convert, exact
from hpcdist.config.schema.declaration import Trainer, find_trainer, trainer_names, unused_sections
from hpcdist.config.schema.describe import all_keys, describe
from hpcdist.config.schema.elastic import ElasticConfig, division_problems
from hpcdist.config.schema.launching import CheckpointConfig, LaunchConfig, TrackingConfig
from hpcdist.config.schema.notification import NotifyConfig
from hpcdist.config.schema.preflight import PreflightConfig
from hpcdist.config.schema.run import (
    Config,
    SecretTexts,
    cross_check,
    largest_world_size,
    new_run_problems,
    role_device,
    to_tree,
)
from hpcdist.config.schema.training import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    ScheduleConfig,
    StopConfig,
    TrainerConfig,
    script_name,
)

__all__ = [
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ContainerConfig",
    "DataConfig",
    "ElasticConfig",
    "LaunchConfig",
    "ModelConfig",
    "NotifyConfig",
    "OptimConfig",
    "PrecisionConfig",
    "PreflightConfig",
    "RoleRequest",
    "ScheduleConfig",
    "SecretTexts",
    "StopConfig",
    "TrackingConfig",
    "Trainer",
    "TrainerConfig",
    "all_keys",
    "as_written",
    "convert",
    "cross_check",
    "describe",
    "division_problems",
    "exact",
    "find_trainer",
    "largest_world_size",
    "new_run_problems",
    "role_device",
    "script_name",
    "to_tree",
    "trainer_names",
    "unused_sections",
]
