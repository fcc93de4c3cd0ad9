"""How long a disk tier of a million chunks takes to reopen, and what its index costs.

    python bench/disk_reopen.py [--chunks 1000000] [--path DIR]

The slabs are sparse files of the right size, so that no gigabytes are written; the index files are
real. Reopening reads the indexes only, in production as here.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from undercroft.clock import SystemClock
from undercroft.keys import Namespace
from undercroft.tiers.disk import DiskTier
from undercroft.tiers.disk.epoch import EpochFile
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.table import (
    IndexHeader,
    _fold_rows,
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
        rows[:count, 15] = _fold_rows(rows[:count])
        name = f"{number:016x}"
        head = pack_header(IndexHeader(name, NAMESPACE.digest, RECORD_BYTES, NUM_SLOTS))
        index = space / f"seg-{name}.index"
        index.write_bytes(head.ljust(4096, b"\0") + rows.tobytes())
        os.truncate(index, index_bytes(NUM_SLOTS))
        (space / f"seg-{name}.slab").touch(0o600)
        os.truncate(space / f"seg-{name}.slab", NUM_SLOTS * RECORD_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--path", default=tempfile.gettempdir())
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.path, prefix="undercroft-bench-") as path:
        build(Path(path), given.chunks)
        gc.collect()
        begun = time.perf_counter()
        gc.collect()
        empty_s = time.perf_counter() - begun
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(3):
            begun, cpu = time.perf_counter(), time.process_time()
            tier = DiskTier(
                path,
                name="disk",
                namespace=NAMESPACE,
                capacity_bytes=1 << 36,
                clock=SystemClock(),
                free_space_floor_bytes=0,
            )
            taken, busy = time.perf_counter() - begun, time.process_time() - cpu
            print(f"reopen {tier.stats()['chunks']} chunks: {taken:.2f} s, {busy:.2f} cpu-s")
            begun = time.perf_counter()
            gc.collect()
            print(f"  full gc.collect(): {time.perf_counter() - begun:.3f} s (empty {empty_s:.3f})")
            keys = [key for key, _ in tier.evictable()]
            print(f"  evictable(): {time.perf_counter() - begun:.2f} s")
            begun = time.perf_counter()
            for key in keys[:200_000]:
                tier.has(key)
            print(f"  has(): {(time.perf_counter() - begun) / 0.2:.2f} us")
            begun = time.perf_counter()
            for _ in range(1000):
                tier.free_chunks(4096)
            print(f"  free_chunks(): {(time.perf_counter() - begun) * 1000:.1f} us")
            begun = time.perf_counter()
            del keys
            tier.close()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(f"peak memory: {grown * 1024 / given.chunks:.0f} bytes a chunk, keys included")


if __name__ == "__main__":
    main()
