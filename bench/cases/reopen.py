"""How long a disk tier of a million chunks takes to reopen.

The slabs are sparse files of the right size, so that no gigabytes are written; the index files are
real, and read in full at each reopening. They are in the page cache after the first.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from harness import Goal, Options, Row, Side
from undercroft.clock import SystemClock
from undercroft.keys import Namespace
from undercroft.tiers.disk import DiskTier
from undercroft.tiers.disk.epoch import EpochFile
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.table import (
    IndexHeader,
    fold_rows,
    index_bytes,
    pack_header,
)

RECORD_BYTES = 8192
NUM_SLOTS = 32768
NAMESPACE = Namespace({"bench": "reopen"})


def build(path: Path, num_chunks: int) -> None:
    space = path / "undercroft-v1" / NAMESPACE.id
    space.mkdir(parents=True, mode=0o700)
    epoch = EpochFile(Files(), str(space / "epoch"))
    epoch.open(read_only=False)
    epoch.write(1)
    epoch.close()
    random = np.random.default_rng(1)
    for number, start in enumerate(range(0, num_chunks, NUM_SLOTS)):
        count = min(NUM_SLOTS, num_chunks - start)
        rows = np.zeros((NUM_SLOTS, 16), np.uint64)
        rows[:count, 0] = np.uint64(36) | (np.arange(count, dtype=np.uint64) << np.uint64(32))
        rows[:count, 1:5] = random.integers(0, 1 << 63, (count, 4), dtype=np.uint64)
        rows[:count, 9] = 1
        rows[:count, 10] = np.arange(start + 1, start + count + 1)
        rows[:count, 11] = 4096
        rows[:count, 12] = int.from_bytes(NAMESPACE.digest[:8], "little")
        rows[:count, 15] = fold_rows(rows[:count])
        name = f"{number:016x}"
        head = pack_header(IndexHeader(name, NAMESPACE.digest, RECORD_BYTES, NUM_SLOTS))
        index = space / f"seg-{name}.index"
        index.write_bytes(head.ljust(4096, b"\0") + rows.tobytes())
        os.truncate(index, index_bytes(NUM_SLOTS))
        (space / f"seg-{name}.slab").touch(0o600)
        os.truncate(space / f"seg-{name}.slab", NUM_SLOTS * RECORD_BYTES)


def reopen(path: str) -> dict[str, float]:
    begun, cpu = time.perf_counter(), time.process_time()
    tier = DiskTier(
        path,
        name="disk",
        namespace=NAMESPACE,
        capacity_bytes=1 << 36,
        clock=SystemClock(),
        free_space_floor_bytes=0,
    )
    found = {"wall": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
    keys = [key for key, _ in tier.evictable()]
    begun = time.perf_counter()
    for key in keys[:200_000]:
        tier.has(key)
    found["has"] = (time.perf_counter() - begun) / len(keys[:200_000])
    found["chunks"] = float(len(keys))
    tier.close()
    return found


class Reopen:
    """The case."""

    name = "reopen"
    about = "a disk tier of many chunks reopens"
    rounds = 3

    def rows(self, options: Options) -> Sequence[Row]:
        del options
        return [
            Row("chunks found", ("ours", "chunks"), unit=""),
            Row("reopen, wall time", ("ours", "wall"), unit="s", best=True, goals=[Goal(most=2.0)]),
            Row("reopen, processor time", ("ours", "cpu"), unit="s", best=True),
            Row("has(), a chunk", ("ours", "has"), unit="us", scale=1e6),
        ]

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        chunks = min(options.chunks, 20_000) if options.quick else options.chunks
        with tempfile.TemporaryDirectory(dir=options.path, prefix="undercroft-bench-") as path:
            build(Path(path), chunks)
            yield {"ours": partial(reopen, path)}
