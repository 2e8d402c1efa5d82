"""The last step of loading: absolute paths, and the checks that involve several sections."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcdist.config.document import unfit_values
from hpcdist.config.schema import Config, cross_check, to_tree
from hpcdist.config.schema.paths import map_paths
from hpcdist.errors import ConfigError, shown


def resolve(config: Config, source: str) -> Config:
    """Return the config with absolute paths. Raises ConfigError if its sections contradict each other."""
    problems: list[str] = []

    def absolute(key: str, text: str) -> str:
        try:
            return str(Path(text).expanduser().absolute())
        except RuntimeError:
            problems.append(f"{key}: the home folder of {shown(Path(text).parts[0])} is unknown: use an absolute path")
            return text

    config = map_paths(config, "", absolute)
    environment = map_paths(config.cluster.environment, "cluster.environment.", absolute)
    changes: dict[str, Any] = {
        "cluster": replace(config.cluster, environment=environment),
        "data": map_paths(config.data, "data.", absolute),
        "sections": {name: map_paths(section, f"{name}.", absolute) for name, section in config.sections.items()},
    }
    if path := config.trainer.script_file:
        # torchrun resolves the script in the current folder, which differs from that of ranks and of later resumes.
        script = [absolute("trainer.script", str(path)), *config.trainer.script[1:]]
        changes["trainer"] = replace(config.trainer, script=script)
    if (uri := config.tracking.uri).startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        file = absolute("tracking.uri", uri.removeprefix("sqlite:///"))
        changes["tracking"] = replace(config.tracking, uri=f"sqlite:///{file}")
    container, image = config.container, config.container.image
    is_path = container.runtime in ("apptainer", "charliecloud", "enroot") or image.endswith((".sqsh", ".sif"))
    # docker, podman and pyxis find other images by name in a registry or in their own storage.
    if image and is_path and "://" not in image:
        image = absolute("container.image", image)
    mounts = [absolute("container.mounts", mount) if mount.startswith("~") else mount for mount in container.mounts]
    changes["container"] = replace(container, image=image, mounts=mounts)
    config = replace(config, **changes)
    if not problems:
        problems = [*unfit_values(to_tree(config)), *cross_check(config)]
    if problems:
        raise ConfigError(problems, source)
    return config
