"""How near to memcpy the copies between engine blocks and host slots come.

    flock /tmp/bench.lock python bench/copies.py [--mib 48] [--rounds 9]

For each page size: store (engine to slots) and load (slots to engine) of chunks of one block and
`--layers` layers, each layer in a tensor of its own. `fresh`: consecutive blocks and slots, as in a
young engine; `aged`: blocks and slots in random order. Ratios are medians of pairs measured one
after the other, order alternating, in seconds of this thread's processor time; 1.00 is a
contiguous memcpy of as many bytes between the same buffers. `pieces` is one numpy copy of
page-sized pieces that nearly touch: the best that rows of this size can do. `same` is the memcpy
against itself: the noise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from undercroft.engines.vllm.copy import Span, copy_pages
from undercroft.layout.plan import GroupGeometry, PageRef, TensorGeometry, fragments, place

OS_PAGE = 4096


def _case(page_bytes: int, total_bytes: int, layers: int, *, aged: bool) -> dict[str, Callable]:
    rng = np.random.default_rng(0)
    num_chunks = max(8, total_bytes // (page_bytes * layers))
    num_blocks = 2 * num_chunks + 37  # no power of two: tensors do not evict each other
    group = GroupGeometry(tuple(PageRef(layer, page_bytes) for layer in range(layers)), 1)
    slot_bytes = -(-group.payload_bytes // OS_PAGE) * OS_PAGE
    engine = np.ones(num_blocks * page_bytes * layers, np.uint8)
    region = np.ones(num_blocks * slot_bytes, np.uint8)
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
    into, origin = (
        span.rows(0, moved // gap, gap, page_bytes) for span in (region_span, engine_span)
    )

    def pieces() -> None:
        into[...] = origin

    return {"memcpy": memcpy, "same": memcpy, "pieces": pieces, "store": store, "load": load}


def _measure(work: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Median ratio of each to `memcpy` measured beside it."""
    ratios: dict[str, list[float]] = {name: [] for name in work if name != "memcpy"}

    def timed(name: str) -> float:
        begun = time.thread_time()
        work[name]()
        return time.thread_time() - begun

    for name in work:
        timed(name)
    for turn in range(rounds):
        for name, found in ratios.items():
            if turn % 2:
                base, own = timed("memcpy"), timed(name)
            else:
                own, base = timed(name), timed("memcpy")
            found.append(base / own)
    return {name: statistics.median(found) for name, found in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=48, help="bytes moved per copy")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=24)
    args = parser.parse_args()
    print("     page  order  store   load  pieces   same   (1.00 = memcpy)")
    for kib in (2, 16, 64, 256):
        for aged in (False, True):
            work = _case(kib << 10, args.mib << 20, args.layers, aged=aged)
            got = _measure(work, args.rounds)
            print(
                f"{kib:5d} KiB  {'aged' if aged else 'fresh':5}  {got['store']:5.2f}  "
                f"{got['load']:5.2f}  {got['pieces']:6.2f}  {got['same']:5.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
