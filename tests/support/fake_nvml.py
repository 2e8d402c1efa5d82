"""A replacement for the module pynvml with GPUs of a test's choice."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml
import pytest


@dataclass(frozen=True)
class FakeNvml:
    """NVML with one GPU for each mapping, which gives the results of queries by function name.

    A query without a result fails as on a GPU that does not support it. None is a lost GPU.
    """

    gpus: Sequence[Mapping[str, Any] | None] = ()
    driver: str = ""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDeviceGet"):
            return getattr(pynvml, name)

        def query(handle: Mapping[str, Any], *_: object) -> Any:
            if name not in handle:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return handle[name]

        return query

    def nvmlInit(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Mapping[str, Any]:
        for one in self.gpus:
            if one is not None and one.get("nvmlDeviceGetUUID") == uuid:
                return one
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Mapping[str, Any]:
        if (gpu := self.gpus[index]) is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpu


def install_fake_nvml(
    monkeypatch: pytest.MonkeyPatch, *gpus: Mapping[str, Any] | None, driver: str = "580.65"
) -> FakeNvml:
    fake = FakeNvml(gpus=gpus, driver=driver)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def gpu(name: str, **results: Any) -> dict[str, Any]:
    """Return the results of a GPU's queries; the keywords are function names without `nvmlDeviceGet`."""
    return {f"nvmlDeviceGet{query}": value for query, value in {"Name": name, **results}.items()}
