"""Plug-ins are found by kind and name, ours and a stranger's alike."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

from undercroft import plugins
from undercroft.errors import ConfigError, UnknownPlugin

ROOT = Path(__file__).resolve().parents[1]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]

STRANGER = """\
[undercroft.tiers]
attic = stranger_attic:AtticTier

[undercroft.policies]
newest = stranger_attic:newest
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution of somebody else, with a tier and a policy."""
    record = tmp_path / "stranger_attic-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger-attic\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(STRANGER)
    (tmp_path / "stranger_attic.py").write_text("class AtticTier: ...\ndef newest(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "stranger_attic", raising=False)
    return tmp_path


@pytest.mark.usefixtures("stranger")
def test_a_strangers_plug_in_is_found() -> None:
    """A distribution with an entry point is all it takes; its module is loaded on demand."""
    assert "attic" in plugins.names("tiers")
    assert "stranger_attic" not in sys.modules
    tier = plugins.find("tiers", "attic")
    assert (tier.__name__, tier.__module__) == ("AtticTier", "stranger_attic")
    assert plugins.find("policies", "newest").__name__ == "newest"


@pytest.mark.usefixtures("stranger")
def test_a_misspelt_name_gets_the_nearest() -> None:
    """The error names what was asked, the nearest that exists, and all that are installed."""
    with pytest.raises(UnknownPlugin) as caught:
        plugins.find("tiers", "atic")
    message = str(caught.value)
    assert "'atic'" in message
    assert "did you mean 'attic'?" in message
    assert all(name in message for name in plugins.names("tiers"))
    assert isinstance(caught.value, ConfigError)


def test_a_kind_without_plug_ins_says_none() -> None:
    """Nothing installed for a kind is said, not left blank."""
    assert plugins.names("no-such-kind") == ()
    with pytest.raises(UnknownPlugin, match="installed are none"):
        plugins.find("no-such-kind", "x")


def test_names_are_sorted_and_unique(stranger: Path) -> None:
    """Two distributions that declare one name give it once, in order."""
    twin = stranger / "stranger_twin-1.0.dist-info"
    twin.mkdir()
    (twin / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger-twin\nVersion: 1.0\n")
    (twin / "entry_points.txt").write_text(STRANGER)
    found = plugins.names("tiers")
    assert list(found) == sorted(set(found))


@pytest.mark.parametrize(
    ("kind", "name", "target"),
    [
        (group.removeprefix("undercroft."), name, target)
        for group, points in DECLARED.items()
        for name, target in points.items()
    ],
)
def test_ours_are_registered_as_a_strangers_are(kind: str, name: str, target: str) -> None:
    """Each plug-in in pyproject.toml is installed, loads, and is the object it claims to be."""
    module, _, attribute = target.partition(":")
    assert plugins.find(kind, name) is getattr(importlib.import_module(module), attribute)
