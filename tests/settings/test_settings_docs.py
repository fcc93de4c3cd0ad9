"""The reference pages are complete, and their examples run."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from undercroft import config
from undercroft.admission.frequency import Frequency
from undercroft.admission.second_sight import SecondSight
from undercroft.admission.write_budget import WriteBudget
from undercroft.settings import load
from undercroft.settings.schema import ENGINE_KEYS, KEYS, TIER_KEYS, TIER_OPTIONS
from undercroft.settings.stock import FS_TYPES, STOCK_KEYS, STOCK_TIER_KEYS

PAGES = Path(__file__).parents[2] / "docs" / "reference"


def blocks(page: str, language: str) -> list[str]:
    text = (PAGES / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["settings.md", "configuration.md"])
def test_examples_run(page: str) -> None:
    """All Python blocks of a page, in order, as one reader would type them."""
    found = blocks(page, "python")
    assert len(found) >= 2
    scope: dict[str, Any] = {}
    for block in found:
        exec(compile(block, page, "exec"), scope)


def test_json_and_toml_examples_say_the_same() -> None:
    """Each is accepted; but for the engine's own keys they are equal."""
    as_json, *_ = blocks("settings.md", "json")
    (as_toml,) = blocks("settings.md", "toml")
    left, right = load(json.loads(as_json)), load(tomllib.loads(as_toml))
    assert dataclasses.replace(left, engine={}) == dataclasses.replace(right, engine={})
    assert set(left.engine) == {"spec_name", "spec_module_path"}


def test_every_setting_is_documented() -> None:
    """Each key of each table has its row or its mention, with its default."""
    text = (PAGES / "settings.md").read_text(encoding="utf-8")
    for table in (KEYS, TIER_KEYS, *TIER_OPTIONS.values()):
        for key in table.values():
            row = next(r for r in text.splitlines() if r.startswith(f"| `{key.name}` |"))
            assert key.default.replace("`", "") in row.replace("`", "")
    mentioned = {*ENGINE_KEYS, *STOCK_KEYS, *STOCK_TIER_KEYS, *FS_TYPES, *TIER_OPTIONS}
    assert {name for name in mentioned if f"`{name}`" not in text} == set()


def test_options_of_admission_are_documented() -> None:
    """Each with its default, as the class has it."""
    text = (PAGES / "settings.md").read_text(encoding="utf-8")
    for rule in (Frequency, SecondSight, WriteBudget):
        rows = [r for r in text.splitlines() if r.startswith(f"| `{rule.name}` | ")]
        (row,) = [r for r in rows if "max_tracked" in r]
        for name, option in signature(rule).parameters.items():
            if option.kind is not option.KEYWORD_ONLY:  # those are not the user's
                default = "" if option.default is None else f" (`{option.default}`)"
                assert f"`{name}`{default}" in row


def test_every_field_is_documented() -> None:
    """Each field of the five dataclasses is in the table of the boundary."""
    text = (PAGES / "configuration.md").read_text(encoding="utf-8")
    parts = {"groups", "model", "cache", "parallel"}
    for name in config.__all__:
        kind = getattr(config, name)
        if name.startswith("Offloading"):
            for f in dataclasses.fields(kind):
                assert f.name in parts or re.search(rf"^\|.*[`.]{f.name}`", text, re.MULTILINE)
