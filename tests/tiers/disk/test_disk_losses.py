"""Chunks that go with whole files are told of: once each, with the reason, and no others."""

import shutil
import time
from pathlib import Path

import pytest

from undercroft.errors import TierFull
from undercroft.keys import Namespace
from undercroft.tiers.disk import DiskTier

from .support import disk, files, key, put, right

OTHER = Namespace({"model": "another"})
NUMBERS = range(2000)


def fill(tier: DiskTier) -> set[int]:
    """Until it is full; what is in it."""
    for number in NUMBERS:
        try:
            put(tier, number)
        except TierFull:
            break
    return held(tier)


def held(tier: DiskTier) -> set[int]:
    return {number for number in NUMBERS if tier.has(key(number))}


def lost(tier: DiskTier) -> dict[int, str]:
    numbers = {key(number): number for number in NUMBERS}
    told: list[tuple[int, str]] = []
    while some := list(tier.take_lost()):
        told += [(numbers[one], why) for one, why in some]
    assert len(dict(told)) == len(told), "told twice"
    return dict(told)


def test_a_share_that_shrinks(tmp_path: Path) -> None:
    """Another namespace comes: what is given up is told, and what was deleted by us is not."""
    tier = disk(tmp_path)
    before = fill(tier)
    tier.delete(key(0))
    other = disk(tmp_path, namespace=OTHER)
    for _ in range(600):
        time.sleep(0.05)
        tier.refresh()
        if len(held(tier)) < len(before) - 1:
            break
    gone = before - held(tier) - {0}
    assert gone
    assert lost(tier) == dict.fromkeys(gone, "given_up")
    other.close()
    tier.close()


@pytest.mark.parametrize("is_all", [False, True])
def test_files_that_are_removed_under_a_running_tier(tmp_path: Path, is_all: bool) -> None:
    """What comes back when the rest is opened anew is not lost; the others vanished.

    Not if the epoch went with them: that is a reset, and is told as one.
    """
    tier = disk(tmp_path, flush_interval_s=0.0)
    before, epoch = fill(tier), tier.epoch()
    if is_all:
        shutil.rmtree(tmp_path / "undercroft-v1")
    else:
        max(files(tmp_path, ".slab"), key=lambda p: p.stat().st_size).unlink()
    tier.refresh()
    assert lost(tier) == {}, "not known yet: it may come back"
    time.sleep(0.11)  # "full, as it was a moment ago" is over
    put(tier, max(NUMBERS))
    gone = before - held(tier)
    assert gone
    assert is_all == (gone == before) == (tier.epoch() > epoch)
    assert lost(tier) == ({} if is_all else dict.fromkeys(gone, "vanished"))
    assert all(right(tier, number) for number in before - gone)
    tier.close()


def test_a_capacity_that_shrinks_between_runs(tmp_path: Path) -> None:
    """The next engine can say what its smaller capacity cost."""
    tier = disk(tmp_path)
    before = fill(tier)
    tier.close()
    tier = disk(tmp_path, capacity_bytes=500 << 10)
    gone = before - held(tier)
    assert gone
    assert lost(tier) == dict.fromkeys(gone, "given_up")
    tier.close()


@pytest.mark.parametrize("suffix", [".slab", ".index"])
def test_what_was_damaged_between_runs(tmp_path: Path, suffix: str) -> None:
    """A slab that was cut, an index whose header is not one: its entries still say what was."""
    tier = disk(tmp_path)
    before = fill(tier)
    tier.close()
    file = max(files(tmp_path, suffix), key=lambda p: p.stat().st_size)
    if suffix == ".slab":
        with file.open("r+b") as slab:
            slab.truncate(2 * 8192)
    else:
        with file.open("r+b") as index:
            index.write(b"z" * 100)
    tier = disk(tmp_path)
    gone = before - held(tier)
    assert gone
    assert lost(tier) == dict.fromkeys(gone, "vanished")
    tier.close()


def test_what_a_reset_made_void_is_not_lost(tmp_path: Path) -> None:
    """It is void, and the index says so: nobody is told that it vanished."""
    tier = disk(tmp_path)
    fill(tier)
    tier.raise_epoch()
    put(tier, 5)
    tier.close()
    tier = disk(tmp_path, capacity_bytes=100 << 10)
    assert set(lost(tier)) | held(tier) == {5}
    tier.close()
