"""A script of Hydra, whose omegaconf is another one than that of hpcdist alone, as the cells of a sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hpcdist_runs import Runs

TRAIN = """\
import json, os, sys
from dataclasses import dataclass
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

@hydra.main(version_base=None, config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    found = {**OmegaConf.to_container(cfg, resolve=True), "argv": sys.argv[1:], "file": __file__}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def project(tmp_path: Path, empty_database: Path) -> Runs:
    runs = Runs(tmp_path, empty_database, experiment="app.train")
    package = runs.project / "app"
    (package / "conf").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "train.py").write_text(TRAIN)
    (package / "conf/train.yaml").write_text("lr: 0.5\ntwice: ${lr}${lr}\nname: none\n")
    return runs


def test_script_of_hydra_runs_unchanged_in_a_sweep(project: Runs, tmp_path: Path) -> None:
    hydra = [f"hydra.run.dir={tmp_path}/out/" + "${params.lr}", "lr=${params.lr}", "name='010'"]
    config = ["launch.num_ranks=1", "tracking.system_interval_s=0", f"tracking.uri=sqlite:///{project.database}"]
    axes = ["--sweep", "params.lr=0.1,0.2"]
    code, output = project.command("run", *axes, *config, "name=tune", "-m", "app.train", *hydra)
    assert code == 0, output
    assert "sweep tune: 2 finished\n" in output
    for lr in (0.1, 0.2):
        found = json.loads((tmp_path / f"out/{lr}/rank0.json").read_text())
        assert found["argv"] == [f"hydra.run.dir={tmp_path}/out/{lr}", f"lr={lr}", "name='010'"]
        assert (found["lr"], found["twice"], found["name"]) == (lr, f"{lr}{lr}", "010")
        assert found["file"].startswith(str(project.run_dir(f"tune-lr_{lr}").code)), "of the copy"
