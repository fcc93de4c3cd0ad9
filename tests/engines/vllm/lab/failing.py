"""Makes copies from host slots into engine blocks fail, inside the worker of this process.

Both ways of copying fail alike, and the fast one only after it has copied a part: what arrives
must not be trusted.
"""

from collections.abc import Iterator
from typing import Any

from undercroft.engines.vllm import worker


class FailingCopies:
    """Patches the worker's two copy functions, once; loads fail as told from then on."""

    def __init__(self, engine: Any) -> None:
        self.slots: set[int] = set()
        """Offsets of slots that cannot be read any more."""
        self.everything = False
        self.next_chunk: int | None = None
        """The index, in the next load, of the chunk whose slot goes bad then."""
        self.heals_after: int | None = None
        """So many failures, and all is well again."""
        self.num_failures = 0
        self._engine = engine
        self._good = {name: getattr(worker, name) for name in ("copy_pages", "copy_pages_singly")}
        for name in self._good:
            setattr(worker, name, self._failing(name))

    def stop(self) -> None:
        """Give the worker its functions back."""
        for name, good in self._good.items():
            setattr(worker, name, good)

    def _failing(self, name: str) -> Any:
        good = self._good[name]

        def copy(to: Any, to_at: Any, source: Any, at: Any, page_bytes: int) -> Iterator[int]:
            if to is not self._engine:
                yield from good(to, to_at, source, at, page_bytes)
                return
            if self.next_chunk is not None:
                # One group, one block a chunk: the first page of a block begins its slot.
                self.slots.add(int(at[self.next_chunk, 0]))
                self.next_chunk = None
            healed = self.num_failures == self.heals_after
            is_bad = self.everything or not self.slots.isdisjoint(at[:, 0].tolist())
            if healed or not is_bad:
                yield from good(to, to_at, source, at, page_bytes)
                return
            self.num_failures += 1
            if len(at) > 1:
                yield from good(to, to_at[:1], source, at[:1], page_bytes)
            raise OSError("the way to the engine is broken")

        return copy


def _installed(driver: Any) -> FailingCopies:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if not hasattr(driver, "failing"):
        connector = get_kv_transfer_group()
        driver.failing = FailingCopies(connector.connector_worker.worker._worker._engine)
    failing: FailingCopies = driver.failing
    return failing


def fail(driver: Any, *, chunk: int | None = None, everything: bool = False) -> int:
    """For `Engine.inside`: which copies fail from now on; how many have so far."""
    failing = _installed(driver)
    failing.next_chunk, failing.everything = chunk, everything
    return failing.num_failures


def heal(driver: Any) -> None:
    """For `Engine.inside`: every slot can be read again."""
    failing = _installed(driver)
    failing.slots, failing.next_chunk, failing.everything = set(), None, False
