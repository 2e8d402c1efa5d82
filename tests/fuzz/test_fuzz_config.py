"""Any config file, override or sweep axis gives ConfigError, or a config that is equal after writing and loading."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_strategies import axes, files, overrides
from fuzzing import check_message, fuzz
from hypothesis import strategies as st

from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.written import secrets_of, to_yaml
from hpcdist.errors import ConfigError
from hpcdist.run.sweeps import make_sweep, parse_axes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@fuzz(share=4, data=files, words=st.lists(overrides, max_size=3))
def test_config_file_gives_a_config_or_an_error(folder: Path, data: bytes, words: list[str]) -> None:
    path = folder / "run.yaml"
    path.write_bytes(data)
    try:
        config = load_config(path, words)
    except ConfigError as error:
        check_message(error)
        return
    written = folder / "written.yaml"
    written.write_text(to_yaml(config))
    loaded = load_run_config(written, [], secrets_of(config))
    # Compared as text, since nan is not equal to itself.
    assert repr(loaded) == repr(config)


@pytest.mark.slow
@fuzz(share=4, words=st.lists(overrides, min_size=1, max_size=4))
def test_override_gives_a_config_or_an_error(words: list[str]) -> None:
    try:
        to_yaml(load_config("ddp_digits", words)).encode()
    except ConfigError as error:
        check_message(error)


@fuzz(words=st.lists(axes, min_size=1, max_size=2), more=st.lists(overrides, max_size=1))
def test_sweep_axis_gives_cells_or_an_error(words: list[str], more: list[str]) -> None:
    try:
        sweep = make_sweep(
            parse_axes(words, more), lambda own: load_config("ddp_digits", [*more, *own]), lambda _: "fuzz"
        )
    except ConfigError as error:
        check_message(error)
        return
    names = [cell.name for cell in sweep.cells]
    assert len(set(names)) == len(names)
    assert all(len(name.encode()) <= 255 and "/" not in name for name in names)
    repr([cell.label for cell in sweep.cells]).encode()
