"""Settings become a hierarchy; what a plug-in's constructor asks for is what it gets."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from undercroft.admission.write_budget import WriteBudget
from undercroft.clock import Clock, SystemClock
from undercroft.engines import assemble as assembling
from undercroft.engines.assemble import Geometry, assemble, check_plugins
from undercroft.errors import ConfigError
from undercroft.hierarchy.hierarchy import Hierarchy
from undercroft.keys import Namespace
from undercroft.settings import load
from undercroft.testing.mini_engine import MiniEngine, chunk_key
from undercroft.tiers.memory import MemoryTier

CHUNK_BYTES = 4096
GEOMETRY = Geometry([CHUNK_BYTES], [16], lambda _key: 0)


def assembled(*tiers: dict[str, Any], **more: Any) -> Hierarchy:
    return assemble(
        load({"host": "64KiB", "tiers": list(tiers), **more}),
        GEOMETRY,
        namespace=Namespace({"model": "m"}),
        buffer=memoryview(mmap.mmap(-1, 64 << 10)),
        clock=SystemClock(),
        num_replicas=2,
        with_events=False,
        take_failed_stores=frozenset,
    )


class Attic(MemoryTier):
    """A stranger's tier, with a need and an option of its own."""

    def __init__(
        self, capacity_bytes: int, *, name: str, clock: Clock, num_replicas: int, ladder: str
    ) -> None:
        super().__init__(capacity_bytes, name=name)
        self.given = (clock, num_replicas, ladder)


@pytest.fixture
def attic(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attic` is an installed tier."""
    found = assembling.find
    monkeypatch.setattr(
        assembling, "find", lambda kind, name: Attic if name == "attic" else found(kind, name)
    )


def test_a_memory_tier_keeps_what_is_stored() -> None:
    """The simplest tier of the settings page works: chunks are copied down to it."""
    hierarchy = assembled({"type": "memory", "capacity": "1MiB", "name": "below"})
    try:
        hierarchy.pool.slots.set_ready_bytes(64 << 10)
        MiniEngine(hierarchy).run([chunk_key("a")])
        (level,) = hierarchy.levels
        assert level.name == "below"
        assert level.transfers.drain(SystemClock().now_s() + 10)
        hierarchy.poll()
        assert level.has(chunk_key("a"))
    finally:
        hierarchy.close()


@pytest.mark.usefixtures("attic")
def test_a_strangers_tier_gets_what_it_names() -> None:
    """The clock and the replicas because it asks, its option as the user wrote it."""
    hierarchy = assembled({"type": "attic", "capacity": "1MiB", "ladder": "long"})
    (level,) = hierarchy.levels
    assert isinstance(level.tier, Attic)
    assert level.tier.given[1:] == (2, "long")
    assert isinstance(level.tier.given[0], SystemClock)
    hierarchy.close()


@pytest.mark.usefixtures("attic")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"tier attic \(type attic\) has the options none: .*'ladder'.*it takes ladder"),
        ({"ladder": "x", "lader": "y"}, r"options 'ladder', 'lader': .*'lader'; it takes ladder"),
        ({"ladder": "x", "clock": "y"}, "'clock'"),
    ],
)
def test_options_that_a_tier_does_not_take_are_refused(
    options: dict[str, str], message: str
) -> None:
    """One line with what was written and what the tier takes, no traceback of its constructor."""
    with pytest.raises(ConfigError, match=message):
        assembled({"type": "attic", "capacity": "1MiB", **options})


@pytest.mark.parametrize(
    "refused",
    [
        {"type": "attic", "capacity": "1MiB", "lader": "y"},
        {"type": "memory", "capacity": "1MiB", "admission": {"type": "frequency", "sihgts": 2}},
    ],
)
def test_a_refused_tier_leaves_no_other_open(
    refused: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were opened before it are closed, and it too if only its level was refused."""
    made: list[Watched] = []

    class Watched(MemoryTier):
        def __init__(self, capacity_bytes: int, *, name: str) -> None:
            super().__init__(capacity_bytes, name=name)
            self.num_closed = 0
            made.append(self)

        def close(self) -> None:
            self.num_closed += 1
            super().close()

    found = assembling.find
    kinds = {"watched": Watched, "memory": Watched, "attic": Attic}

    def find(kind: str, name: str) -> Any:
        return kinds[name] if kind == "tiers" and name in kinds else found(kind, name)

    monkeypatch.setattr(assembling, "find", find)
    num_threads = threading.active_count()
    with pytest.raises(ConfigError):
        assembled({"type": "watched", "capacity": "1MiB", "name": "first"}, refused)
    assert made
    assert all(tier.num_closed for tier in made)
    assert threading.active_count() == num_threads


class Stuck(MemoryTier):
    """A stranger's tier that hangs or fails when it is opened."""

    gate = threading.Event()
    error: BaseException | None = None
    opened: ClassVar[list[MemoryTier]] = []

    def __init__(self, capacity_bytes: int, *, name: str) -> None:
        if self.error is not None:
            raise self.error
        self.gate.wait(60)
        super().__init__(capacity_bytes, name=name)
        self.opened.append(self)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Stuck]]:
    """`stuck` is an installed tier, which hangs until the gate opens."""
    found = assembling.find
    monkeypatch.setattr(Stuck, "gate", threading.Event())
    monkeypatch.setattr(Stuck, "opened", [])
    monkeypatch.setattr(
        assembling, "find", lambda kind, name: Stuck if name == "stuck" else found(kind, name)
    )
    yield Stuck
    Stuck.gate.set()


def works_with_the_other(hierarchy: Hierarchy) -> bool:
    """Whether the only level is `below`, and takes what is stored."""
    try:
        hierarchy.pool.slots.set_ready_bytes(64 << 10)
        MiniEngine(hierarchy).run([chunk_key("a"), chunk_key("b")])
        (level,) = hierarchy.levels
        assert level.transfers.drain(SystemClock().now_s() + 60)
        hierarchy.poll()
        return level.name == "below" and hierarchy.counters.cascaded_chunks["below"] == 2
    finally:
        hierarchy.close()


def test_a_tier_that_hangs_when_opened_is_left_out_and_closed_when_it_comes(
    stuck: type[Stuck], caplog: pytest.LogCaptureFixture
) -> None:
    """A file system that does not answer must not keep the engine from starting."""
    hierarchy = assembled(
        {"type": "stuck", "capacity": "1MiB", "name": "far"},
        {"type": "memory", "capacity": "1MiB", "name": "below"},
        open_deadline_s=0.2,
    )
    assert works_with_the_other(hierarchy)
    (line,) = caplog.messages
    assert line.startswith("tier far is left out: it did not open within 0.2 s")
    stuck.gate.set()
    (opener,) = (t for t in threading.enumerate() if t.name == "undercroft-far-open")
    opener.join(60)
    (late,) = stuck.opened
    assert late._closed


@pytest.mark.parametrize(
    "error", [OSError(5, "injected"), MemoryError("injected"), SystemExit("injected")]
)
def test_a_tier_that_fails_to_open_with_anything_is_left_out(
    stuck: type[Stuck], error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Not only with an error of ours; settings that can never work stay errors."""
    monkeypatch.setattr(stuck, "error", error)
    tiers = (
        {"type": "stuck", "capacity": "1MiB", "name": "far"},
        {"type": "memory", "capacity": "1MiB", "name": "below"},
    )
    assert works_with_the_other(assembled(*tiers))
    (line,) = caplog.messages
    assert line.startswith("tier far is left out: ")
    assert "injected" in line
    monkeypatch.setattr(stuck, "error", ConfigError("never works"))
    with pytest.raises(ConfigError, match="never works"):
        assembled(*tiers)


# --- admissions ---


def test_an_admission_gets_what_it_names(tmp_path: Path) -> None:
    """The tier's budget, the clock, and how many replicas share it; nobody shares host memory."""
    rule = {"type": "write_budget", "budget": "1GiB", "max_tracked": 64}
    hierarchy = assembled(
        {"type": "disk", "path": str(tmp_path), "capacity": "64MiB", "write_budget": "32MiB"}
        | {"admission": "write_budget"},
        {"type": "memory", "capacity": "1MiB", "admission": rule},
        admission=rule,
    )
    try:
        of_disk, of_memory = (level._admission for level in hierarchy.levels)
        of_host = hierarchy.pool._admission
        assert isinstance(of_disk, WriteBudget)
        assert isinstance(of_memory, WriteBudget)
        assert isinstance(of_host, WriteBudget)
        assert of_disk._day_bytes()[1] == 16 << 20, "half each for two replicas"
        assert of_memory._day_bytes() == of_host._day_bytes() == (1 << 30, 1 << 30)
    finally:
        hierarchy.close()


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"type": "memory", "admission": "write_budget"}, "nothing to spend"),
        ({"write_budget": "32MiB", "admission": {"budget": 1}}, "leave `budget` out"),
        ({"admission": {"budget": "32MiB"}}, "write it as the tier's write_budget"),
        ({"write_budget": "32MiB", "admission": {"bugdet": 1}}, "takes budget, max_tracked"),
        ({"admission": {"type": "second_sight", "sights": 2}}, "it takes max_tracked"),
    ],
)
def test_budgets_that_do_not_go_together_are_refused(
    tier: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """One line that says where the budget belongs."""
    if isinstance(tier["admission"], dict):
        tier = tier | {"admission": {"type": "write_budget"} | tier["admission"]}
    if tier.get("type") != "memory":
        tier = {"type": "disk", "path": str(tmp_path)} | tier
    with pytest.raises(ConfigError, match=message):
        assembled({"capacity": "64MiB"} | tier)


def test_a_missing_budget_is_found_before_anything_is_opened() -> None:
    """`check_plugins` says it, as it says that a plug-in is not installed."""
    settings = load({"host": "1GiB", "admission": "write_budget"})
    with pytest.raises(ConfigError, match="nothing to spend"):
        check_plugins(settings)
