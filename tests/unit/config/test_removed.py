"""Keys of earlier versions are answered with what to use instead; run folders that have their defaults are read."""

from pathlib import Path

import pytest

from hpcdist.config import removed
from hpcdist.config.describe import describe
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.removed import REMOVED_KEYS, REMOVED_VALUES, Removed
from hpcdist.config.schema import Config
from hpcdist.config.written import read_stored, to_yaml
from hpcdist.errors import ConfigError

CHANGELOG = (Path(__file__).parents[3] / "CHANGELOG.md").read_text()


@pytest.fixture(autouse=True)
def _removed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED_KEYS, "optim.lookahead", Removed(instead="the optimizer does it", default=3))
    monkeypatch.setitem(REMOVED_KEYS, "cluster.roles.*.rack", Removed(instead="use cluster.constraint"))
    monkeypatch.setitem(REMOVED_VALUES, ("optim.name", "lion"), "use optim.name=adamw")


def test_removed_keys_and_values_are_answered(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("optim: {lookahead: 3, name: lion}\ncluster: {roles: {trainer: {rack: a}}}\nroles: {trainer: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert set(caught.value.problems) == {
        "optim.lookahead was removed: the optimizer does it",
        "optim.name=lion was removed: use optim.name=adamw",
        "cluster.roles.trainer.rack was removed: use cluster.constraint",
    }


def test_run_folder_with_former_default_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = to_yaml(Config())
    path.write_text(text.replace("optim:\n", "optim:\n  lookahead: 3\n"))
    assert load_run_config(path, (), {}).optim == Config().optim
    assert read_stored(path).problem == ""
    path.write_text(text.replace("optim:\n", "optim:\n  lookahead: 4\n"))
    with pytest.raises(ConfigError, match="lookahead was removed: the optimizer does it"):
        load_run_config(path, (), {})
    assert "optim.lookahead" in read_stored(path).problem


def test_changelog_names_removed_keys_with_their_sentences() -> None:
    mine = ("optim.lookahead", "cluster.roles.*.rack")
    rows = [f"| `{key.replace('*', 'ROLE')}` | {one.instead} |" for key, one in REMOVED_KEYS.items() if key not in mine]
    rows += [f"| `{key}={value}` | {text} |" for (key, value), text in REMOVED_VALUES.items() if value != "lion"]
    assert [row for row in rows if row not in CHANGELOG] == []


def test_removed_keys_are_no_keys() -> None:
    assert [key for key, *_ in describe() if removed.removal(key, None) is not None] == []
