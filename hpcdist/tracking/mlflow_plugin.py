"""The entry points of MLflow's plugins: the tracking store and the artifact repository of the scheme `hpcdist`.

MLflow imports this module while MLflow itself is being imported. Therefore it imports neither MLflow nor anything that
does, except in its functions, which MLflow calls later.
"""

from typing import Any


def tracking_store(store_uri: str, artifact_uri: str | None = None) -> Any:
    """Return the store that MLflow uses for a tracking URI `hpcdist://…` (`RankStore`)."""
    from hpcdist.tracking.script_store import RankStore

    return RankStore(store_uri, artifact_uri)


def artifact_repository(artifact_uri: str, *arguments: Any, **options: Any) -> Any:
    """Return the repository that MLflow uses for an artifact URI `hpcdist://…` (`RankArtifacts`)."""
    from hpcdist.tracking.script_store import RankArtifacts

    return RankArtifacts(artifact_uri, *arguments, **options)
