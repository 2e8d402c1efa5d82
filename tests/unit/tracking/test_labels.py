"""What MLflow's tags say of a run."""

from __future__ import annotations

from pathlib import Path

from hpcdist.rundir import RunDir, write_json
from hpcdist.tracking.labels import fixed_tags


def test_a_run_in_containers_names_its_image_and_what_is_in_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert not [tag for tag in fixed_tags(run, {}) if "image" in tag or "container" in tag]
    facts = {"runtime": "podman", "image": "hpcdist:0.1.0", "image_digest": "sha256:ab", "torch": "2.15", "cuda": None}
    write_json(run.container, facts)
    found = {key: text for key, text in fixed_tags(run, {}).items() if "image" in key or "container" in key}
    assert found == {
        "hpcdist.image": "hpcdist:0.1.0",
        "hpcdist.image_digest": "sha256:ab",
        "hpcdist.container.runtime": "podman",
        "hpcdist.container.torch": "2.15",
    }
