"""The code of the user that accompanies a model which `torch.export` cannot export."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hpcdist.checkpoint.export import export_model
from hpcdist.run.folder import RunDir


def test_package_of_a_pickled_model_has_its_modules_but_no_data_behind_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    package = run.code / "pickled_model"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "net.py").write_text("import torch\n\nclass Model(torch.nn.Identity): pass\n")
    (package / "same.py").symlink_to("net.py")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "large.bin").touch()
    (package / "data").symlink_to(tmp_path / "data")
    monkeypatch.syspath_prepend(str(run.code))
    saved: set[str] = set()

    def save_model(*_: Any, serialization_format: str, code_paths: tuple[str, ...] = (), **__: Any) -> None:
        if serialization_format == "pt2":
            raise RuntimeError("data-dependent")
        (folder,) = code_paths
        assert Path(folder).name == "pickled_model"
        saved.update(path.name for path in Path(folder).rglob("*"))

    mlflow, flavor, models = ModuleType("mlflow"), ModuleType("mlflow.pytorch"), ModuleType("mlflow.models")
    vars(mlflow)["pytorch"] = flavor
    vars(flavor)["save_model"] = save_model
    vars(models)["infer_signature"] = lambda *_: None
    for module in (mlflow, flavor, models):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    export_model(importlib.import_module("pickled_model.net").Model(), torch.ones(2, 1), run)
    assert saved - {"__pycache__"} - {name for name in saved if name.endswith(".pyc")} == {
        "__init__.py",
        "net.py",
        "same.py",
    }
