"""How near to memcpy the copies between engine blocks and host slots come.

For each page size: store (engine to slots) and load (slots to engine) of chunks of one block and 24
layers, each layer in a tensor of its own. `fresh`: consecutive blocks and slots, as in a young
engine; `aged`: blocks and slots in random order. The engine's memory is torch's and the slots' is
shared, as in a worker: small memory pages both, where numpy would ask for huge ones. Processor time
of the one thread that copies. The base is a contiguous memcpy of as many bytes between the same
buffers; the ceiling, `pieces`, is one numpy copy of page-sized pieces that nearly touch: the best
that rows of this size can do. With two ranks, a canonical page takes half from each: the copies of
one of them, beside its copies of direct pages.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from harness import AGAIN, Goal, Options, Row, Side
from undercroft.layout.pages import HeadsPage, heads_page
from undercroft.layout.plan import GroupGeometry, PageRef, TensorGeometry, fragments, place
from undercroft.layout.topology import Topology

PAGE_KIBS = (2, 4, 8, 16, 64)
NUM_LAYERS = 24
OS_PAGE = 4096
SPARE_BLOCKS = 37
"""Blocks are then no power of two: tensors do not evict each other."""
SHARED_KIB = 64
"""From this page size on, canonical pages are measured too."""

Memory: TypeAlias = NDArray[np.uint8]


def _engine_memory(num_bytes: int) -> NDArray[np.uint8]:
    import torch

    return torch.ones(num_bytes, dtype=torch.uint8).numpy()


def _region_memory(num_bytes: int) -> NDArray[np.uint8]:
    region = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    region[:] = 1
    return region


def _ways(
    group: GroupGeometry, slot_bytes: int, engine: Memory, region: Memory, *, aged: bool
) -> dict[str, Callable]:
    """Store and load of as many chunks as there is engine memory for, half of it used."""
    from undercroft.engines.vllm.copy import Span, copy_pages

    pick = np.random.default_rng(0).permutation if aged else np.arange
    layers, page_bytes = len(group.refs), group.refs[0].page_bytes
    num_blocks = engine.nbytes // (page_bytes * layers)
    tensors = [
        TensorGeometry(layer * num_blocks * page_bytes, page_bytes, num_blocks, page_bytes)
        for layer in range(layers)
    ]
    num_chunks = (num_blocks - SPARE_BLOCKS) // 2
    blocks = pick(num_blocks)[:num_chunks].astype(np.int64)
    slots = pick(num_blocks)[:num_chunks].astype(np.int64) * slot_bytes
    engine_span, region_span = Span.of(engine), Span.of(region)

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

    return {"store": store, "load": load}


def _case(page_bytes: int, total_bytes: int, layers: int, *, aged: bool) -> dict[str, Callable]:
    from undercroft.engines.vllm.copy import Span

    num_chunks = max(8, total_bytes // (page_bytes * layers))
    num_blocks = 2 * num_chunks + SPARE_BLOCKS
    is_shared = page_bytes >= SHARED_KIB << 10
    direct = GroupGeometry(tuple(PageRef(layer, page_bytes) for layer in range(layers)), 1)
    slot_bytes = -(-direct.payload_bytes // OS_PAGE) * OS_PAGE
    engine = _engine_memory(num_blocks * page_bytes * layers)
    region = _region_memory(num_blocks * slot_bytes * (1 + is_shared))
    work = _ways(direct, slot_bytes, engine, region, aged=aged)
    if is_shared:  # the second of two ranks, each with half of a page's heads
        heads = HeadsPage(num_heads=8, num_tokens=16, element_bytes=page_bytes // 64)
        part = heads_page(heads, Topology(tp_size=2), 1)
        refs = tuple(PageRef(layer, page_bytes, part) for layer in range(layers))
        ways = _ways(GroupGeometry(refs, 1), 2 * slot_bytes, engine, region, aged=aged)
        work |= {f"canonical {verb}": way for verb, way in ways.items()}
    moved = num_chunks * direct.payload_bytes

    def memcpy() -> None:
        region[:moved] = engine[:moved]

    gap = page_bytes + 64
    spans = Span.of(region), Span.of(engine)
    into, origin = (span.rows(page_bytes)[0:moved:gap] for span in spans)

    def pieces() -> None:
        into[...] = origin

    return {"memcpy": memcpy, "pieces": pieces, **work}


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
            rows += [
                Row(
                    f"canonical {verb}, 2 ranks, rows of {side}, beside direct",
                    (side, f"canonical {verb}"),
                    (side, verb),
                    (side, "pieces"),
                    amount=amount,
                    goals=[Goal(least=0.70)],
                )
                for verb in ("store", "load")
                if kib >= SHARED_KIB
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
