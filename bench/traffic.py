"""Reads and writes chunks at a given rate until its input ends, as a disk tier's movers would.

    python bench/traffic.py FILE BYTES_A_SECOND [CHUNK_BYTES]

Four threads, two that read and two that write chunks, of 1 MiB unless told otherwise, with direct
I/O and check them, in a process of its own: what this does to others, the machine does to them.
FILE has 64 MiB. Prints a line once it has begun, and at the end how many bytes it moved in how many
seconds.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time

from xxhash import xxh3_64_intdigest

NUM_THREADS = 4
FILE_BYTES = 64 << 20


def main(path: str, rate: float, chunk_bytes: int) -> None:
    num_chunks = FILE_BYTES // chunk_bytes
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    moved, begun = [0] * NUM_THREADS, time.perf_counter()
    stop = threading.Event()

    def move(number: int) -> None:
        data = mmap.mmap(-1, chunk_bytes)
        while not stop.is_set():
            turn = moved[number] // chunk_bytes
            at = (turn * NUM_THREADS + number) % num_chunks * chunk_bytes
            if number % 2:
                os.preadv(fd, [data], at)
            else:
                os.pwritev(fd, [data], at)
            xxh3_64_intdigest(data)
            moved[number] += chunk_bytes
            due = begun + moved[number] * NUM_THREADS / rate
            stop.wait(max(0.0, due - time.perf_counter()))

    threads = [threading.Thread(target=move, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    print("moving", flush=True)
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    print(sum(moved), time.perf_counter() - begun, flush=True)
    os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int([*sys.argv, 1 << 20][3]))
