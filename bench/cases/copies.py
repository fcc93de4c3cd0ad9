"""How near to memcpy the copies between engine blocks and host slots come.

For each page size: store (engine to slots) and load (slots to engine) of chunks of one block and 24
layers, each layer in a tensor of its own. `fresh`: consecutive blocks and slots, as in a young
engine; `aged`: blocks and slots in random order. The engine's memory is torch's and the slots' is
shared, as in a worker: small memory pages both, where numpy would ask for huge ones. Processor time
of the one thread that copies. The base is a contiguous memcpy of as many bytes between the same
buffers; the ceiling, `pieces`, is one numpy copy of page-sized pieces that nearly touch: the best
that rows of this size can do.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from harness import AGAIN, Goal, Options, Row, Side
from undercroft.layout.plan import GroupGeometry, PageRef, TensorGeometry, fragments, place

PAGE_KIBS = (2, 4, 8, 16, 64)
NUM_LAYERS = 24
OS_PAGE = 4096


def _engine_memory(num_bytes: int) -> NDArray[np.uint8]:
    import torch

    return torch.ones(num_bytes, dtype=torch.uint8).numpy()


def _region_memory(num_bytes: int) -> NDArray[np.uint8]:
    region = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    region[:] = 1
    return region


def _case(page_bytes: int, total_bytes: int, layers: int, *, aged: bool) -> dict[str, Callable]:
    from undercroft.engines.vllm.copy import Span, copy_pages

    rng = np.random.default_rng(0)
    num_chunks = max(8, total_bytes // (page_bytes * layers))
    num_blocks = 2 * num_chunks + 37  # no power of two: tensors do not evict each other
    group = GroupGeometry(tuple(PageRef(layer, page_bytes) for layer in range(layers)), 1)
    slot_bytes = -(-group.payload_bytes // OS_PAGE) * OS_PAGE
    engine = _engine_memory(num_blocks * page_bytes * layers)
    region = _region_memory(num_blocks * slot_bytes)
    tensors = [
        TensorGeometry(layer * num_blocks * page_bytes, page_bytes, num_blocks, page_bytes)
        for layer in range(layers)
    ]
    pick = rng.permutation if aged else np.arange
    blocks = pick(num_blocks)[:num_chunks].astype(np.int64)
    slots = pick(num_blocks)[:num_chunks].astype(np.int64) * slot_bytes
    engine_span, region_span = Span.of(engine), Span.of(region)
    moved = num_chunks * group.payload_bytes

    def plan() -> list:
        return fragments(group, tensors, place(blocks, slots, 0, 1), region.nbytes)

    def store() -> None:
        for pages in plan():
            for _ in copy_pages(
                region_span, pages.region, engine_span, pages.engine, pages.page_bytes
            ):
                pass

    def load() -> None:
        for pages in plan():
            for _ in copy_pages(
                engine_span, pages.engine, region_span, pages.region, pages.page_bytes
            ):
                pass

    def memcpy() -> None:
        region[:moved] = engine[:moved]

    gap = page_bytes + 64
    into, origin = (span.rows(page_bytes)[0:moved:gap] for span in (region_span, engine_span))

    def pieces() -> None:
        into[...] = origin

    return {"memcpy": memcpy, "pieces": pieces, "store": store, "load": load}


def _timed(work: dict[str, Callable[[], None]]) -> dict[str, float]:
    costs: dict[str, float] = {}
    for name, copy in work.items():
        begun = time.thread_time()
        copy()
        costs[name] = time.thread_time() - begun
    return costs


class Copies:
    """The case."""

    name = "copies"
    about = "copies between engine blocks and host slots, beside memcpy"
    rounds = 15

    def rows(self, options: Options) -> Sequence[Row]:
        rows: list[Row] = []
        for kib, aged in self._cases(options):
            side, amount = self._side(kib, aged=aged), self._bytes(options) / 1e9
            goal = Goal(least=0.60 if kib < 16 else 0.85)
            rows += [
                Row(
                    f"{verb}, rows of {side}",
                    (side, verb),
                    (side, "memcpy"),
                    (side, "pieces"),
                    amount=amount,
                    goals=[goal],
                )
                for verb in ("store", "load")
            ]
        return rows

    def _side(self, kib: int, *, aged: bool) -> str:
        return f"{kib} KiB, {'aged' if aged else 'fresh'}"

    def _bytes(self, options: Options) -> int:
        return (4 if options.quick else 48) << 20

    def _cases(self, options: Options) -> list[tuple[int, bool]]:
        kibs = PAGE_KIBS[:2] if options.quick else PAGE_KIBS
        return [(kib, aged) for kib in kibs for aged in (False, True)]

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        sides: dict[str, Side] = {}
        for kib, aged in self._cases(options):
            work = _case(kib << 10, self._bytes(options), NUM_LAYERS, aged=aged)
            _timed(work)
            sides[self._side(kib, aged=aged)] = partial(_timed, work)
        first = next(iter(sides))
        yield {**sides, first + AGAIN: sides[first]}
