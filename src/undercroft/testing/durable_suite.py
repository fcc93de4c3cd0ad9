"""What every tier must do whose chunks outlive the process; see `undercroft.testing.tier_suite`."""

from __future__ import annotations

from pathlib import Path

from undercroft.testing.tier_suite import TierSuite, key_of
from undercroft.tiers.base import Bounded, Epochal, Indexed, Owing

__all__ = ["DurableSuite"]


class DurableSuite(TierSuite):
    """For tiers whose chunks are still there after `close` and `make` with the same path."""

    def test_chunks_outlive_the_tier(self, tmp_path: Path) -> None:
        """What was written reads back after a restart; what was deleted does not."""
        keys = [key_of(i) for i in range(6)]
        tier = self.make(tmp_path, self.capacity_bytes)
        for key in keys:
            tier.write_from(key, self.chunk(key))
        tier.delete(keys[3])
        used_bytes = tier.used_bytes() if isinstance(tier, Bounded) else 0
        tier.close()
        again = self.make(tmp_path, self.capacity_bytes)
        for key in keys:
            there = key != keys[3]
            assert again.contains(key) == there
            assert self.read(again, key) == (self.chunk(key) if there else None)
            if isinstance(again, Indexed):
                assert again.has(key) == there
        if isinstance(again, Indexed):
            assert sorted(again.evictable()) == sorted(
                (key, self.chunk_bytes) for key in keys if key != keys[3]
            )
        if isinstance(again, Bounded):
            assert again.used_bytes() == used_bytes
        again.close()

    def test_a_new_epoch_outlives_the_tier(self, tmp_path: Path) -> None:
        """What was made void stays void after a restart."""
        tier = self.make(tmp_path, self.capacity_bytes)
        if not isinstance(tier, Epochal):
            tier.close()
            return
        key = key_of("void")
        tier.write_from(key, self.chunk(key))
        raised = tier.raise_epoch()
        tier.close()
        again = self.make(tmp_path, self.capacity_bytes)
        assert isinstance(again, Epochal)
        assert again.epoch() == raised
        assert not again.contains(key)
        assert self.read(again, key) is None
        again.close()

    def test_an_owed_reset_outlives_the_tier(self, tmp_path: Path) -> None:
        """Asked for and not carried out: nothing is served, and the next one carries it out."""
        tier = self.make(tmp_path, self.capacity_bytes)
        if not (isinstance(tier, Owing) and isinstance(tier, Epochal)):
            tier.close()
            return
        key = key_of("owed")
        tier.write_from(key, self.chunk(key))
        before = tier.epoch()
        assert tier.owe_reset()
        assert tier.owed_at()
        if isinstance(tier, Indexed):
            assert not tier.has(key)
        tier.close()
        again = self.make(tmp_path, self.capacity_bytes)
        assert isinstance(again, Epochal)
        assert again.epoch() > before
        assert not again.contains(key)
        again.write_from(key, self.chunk(key))
        assert self.read(again, key) == self.chunk(key)
        again.close()
