"""Does the copying between a GPU and host memory work on this machine, and how fast?

    python bench/gpu_check.py                      on the first GPU that torch sees; some minutes
    python bench/gpu_check.py --quick --json report.json
    python bench/gpu_check.py --fake               without a GPU: only that this script itself works

Needs torch with a GPU, and Undercroft (`PYTHONPATH=src` will do). If vLLM is installed, its copy
operators and its registration of host memory are used, as in serving. If not, on CUDA: the
driver call that vLLM's operator consists of, and torch's registration.

Checked: bytes come back as they were, for pages of many sizes; and a storm of jobs, with the GPU
kept busy so that copies would be early if they did not wait, ends as if everything had been done
one by one. The storm is run again without one of its waits, and has to notice. Measured: stores,
loads, and both at once, against torch's copy of as many bytes of pinned memory in one piece.

Exit status: 0; 1 if bytes were wrong; 2 for wrong usage; 3 without a GPU. A goal that was missed is
marked `MISSED`, and is no error.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from undercroft.clock import SystemClock
from undercroft.engines.accelerator.descriptors import copies
from undercroft.engines.accelerator.device_mover import BATCH_COPIES, DeviceMover, DeviceWork
from undercroft.engines.accelerator.numa import nodes_of_devices, place_near
from undercroft.engines.accelerator.pinning import HostMemory, Pinning
from undercroft.engines.accelerator.torch_device import DEVICE_TYPES, Operators, TorchDevice
from undercroft.engines.jobs import Job
from undercroft.layout.plan import GroupGeometry, PageRef, TensorGeometry, fragments, place
from undercroft.testing.fake_device import FakeDevice, StepClock

OS_PAGE = 4096
LAYERS = 8
SIZES = (2 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
ODD_SIZES = (8, 520, 1000, 4104)
GOALS = {2 << 10: 0.60, 16 << 10: 0.85, 64 << 10: 0.85, 256 << 10: 0.85, 1 << 20: 0.85}
STORMS, FAKE_STORMS = 12, 15
ROUND_TRIP_BYTES, MEASURED_BYTES = 32 << 20, 256 << 20
BALLAST_WORDS = 64 << 20


# --- what copies here -----------------------------------------------------------------------------


class CudartRegistrar:
    """Registration by torch's binding of the CUDA (or HIP) runtime."""

    def register(self, address: int, num_bytes: int) -> bool:
        runtime = torch.cuda.cudart()
        if runtime.cudaHostRegister(address, num_bytes, 0) == runtime.cudaError.success:
            return True
        with suppress(RuntimeError):  # the runtime tells the next launch about it, too
            torch.zeros(1, device="cuda")
        return False

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order of reads, where the two sides are (0: see for yourself)."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_place", ctypes.c_int * 2),
        ("target_place", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class DriverBatch:
    """cuMemcpyBatchAsync of CUDA 12.8 and later, called as vLLM's operator calls it."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._is_new = hasattr(library, "cuMemcpyBatchAsync_v2")  # CUDA 13 dropped an argument
        self._call = library.cuMemcpyBatchAsync_v2 if self._is_new else library.cuMemcpyBatchAsync

    def __call__(
        self, source: Any, target: Any, sizes: Any, *, is_src_access_order_any: bool
    ) -> None:
        attributes = _Attributes(source_order=3 if is_src_access_order_any else 1)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        arguments = [
            *(ctypes.c_void_p(each.data_ptr()) for each in (target, source, sizes)),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        if not self._is_new:
            arguments.append(ctypes.byref(failed))
        code = self._call(*arguments, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if code:
            raise RuntimeError(f"cuMemcpyBatchAsync: error {code}")


@dataclass
class Copier:
    """How bytes are copied on this machine."""

    device: torch.device | None
    name: str
    operators_for: Callable[[Sequence[int]], Operators] = lambda _sizes: Operators(None)
    registrar: Any = None


def find_copier(*, fake: bool) -> Copier | None:
    """None: there is no GPU."""
    if fake:
        return Copier(None, "fake device")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type not in DEVICE_TYPES:
        return None
    device = torch.device(found.type, torch.accelerator.current_device_index())
    try:
        from undercroft.engines.vllm.operators import EngineRegistrar, operators_for

        made = operators_for(device, [1 << 20])
        name = "vLLM's swap_blocks_batch" if made.batch else "torch, one by one"
        return Copier(device, name, lambda n: operators_for(device, n), EngineRegistrar())
    except Exception as error:  # noqa: BLE001 - no vLLM, or one for another platform
        print(f"without vLLM's operators: {error}")
    if device.type != "cuda":
        return Copier(device, "torch, one by one")
    try:
        batch: Any = None if torch.version.hip else DriverBatch()
    except (OSError, AttributeError) as error:
        print(f"without cuMemcpyBatchAsync: {error}")
        batch = None
    name = "cuMemcpyBatchAsync" if batch else "torch, one by one"
    return Copier(device, name, lambda _n: Operators(batch, can_pin=True), CudartRegistrar())


# --- blocks, slots, jobs --------------------------------------------------------------------------


class Bed:
    """Blocks on the device, `(num_blocks, page)` a layer, and slots for as many in host memory."""

    def __init__(
        self,
        copier: Copier,
        page_bytes: int,
        num_blocks: int,
        *,
        layers: int = LAYERS,
        make_mover: Callable[..., DeviceMover] = DeviceMover,
        pinned: bool = True,
        schedule: tuple[int, int] = (0, 30),
    ) -> None:
        self.page_bytes, self.num_blocks = page_bytes, num_blocks
        self.group = GroupGeometry(tuple(PageRef(i, page_bytes) for i in range(layers)), 1)
        self.slot_bytes = -(-self.group.payload_bytes // OS_PAGE) * OS_PAGE
        self.tensors = [
            torch.zeros((num_blocks, page_bytes), dtype=torch.uint8, device=copier.device)
            for _ in range(layers)
        ]
        self.geometry = tuple(
            TensorGeometry(each.data_ptr(), page_bytes, num_blocks, page_bytes)
            for each in self.tensors
        )
        self._memory = mmap.mmap(-1, num_blocks * self.slot_bytes)  # shared, as in serving
        self.region = np.frombuffer(self._memory, np.uint8)
        if copier.device is not None:
            place_near(
                self.region.ctypes.data, self.region.nbytes, nodes_of_devices(copier.device, 1)
            )
        self.region[:] = 0
        self.fake = (
            FakeDevice(schedule[0], max_steps=schedule[1]) if copier.device is None else None
        )
        self.device: Any = self.fake or self._real_device(copier, pinned=pinned)
        self.clock: Any = StepClock(self.fake) if self.fake else SystemClock()
        address = self.region.ctypes.data
        self.mover = make_mover(self.device, self.clock, region_address=address)
        self.num_jobs = 0

    def _real_device(self, copier: Copier, *, pinned: bool) -> TorchDevice:
        if copier.device is None:
            raise RuntimeError("no device")
        nbytes = self.region.nbytes
        self.pinning = Pinning(
            copier.registrar if pinned else None,
            memory=HostMemory(self.region.ctypes.data, nbytes, lambda: nbytes),
            bind_thread=lambda: None,
            clock=SystemClock(),
        )
        return TorchDevice(
            copier.device,
            tensors=self.tensors,
            region=self.region,
            operators=copier.operators_for([self.page_bytes]),
            pinning=self.pinning,
        )

    @property
    def pinned_bytes(self) -> int:
        return self.region.nbytes if self.fake else self.pinning.pinned_bytes

    def job(self, blocks: Any, slots: Any, *, is_store: bool) -> Job[DeviceWork]:
        self.num_jobs += 1
        blocks, slots = np.asarray(blocks, np.int64), np.asarray(slots, np.int64)

        def steps() -> Iterator[DeviceWork]:
            places = place(blocks, slots * self.slot_bytes, 0, 1)
            for pages in fragments(self.group, self.geometry, places, self.region.nbytes):
                yield from copies(
                    pages, piece_bytes=self.device.piece_bytes, max_copies=BATCH_COPIES
                )

        return Job(
            job_id=self.num_jobs,
            is_store=is_store,
            blocks=frozenset(blocks.tolist()),
            slots=frozenset(slots.tolist()),
            steps=steps,
            on_failure=lambda error: print(f"a job failed: {error!r}"),
        )

    def run(self, *jobs: Job[DeviceWork]) -> None:
        for job in jobs:
            self.mover.submit(job)
        self.mover.wait({job.job_id for job in jobs})
        for job in self.mover.take_finished():
            if job.error is not None:
                raise job.error

    def compute(self, work: Callable[[], object]) -> None:
        """Put work of the engine's own into its stream."""
        if self.fake:
            self.fake.engine_stream.compute(lambda: (work(), None)[1])
        else:
            work()

    def synchronize(self) -> None:
        if self.fake:
            self.fake.run()
        else:
            torch.accelerator.synchronize()

    def slot_pages(self) -> np.ndarray:
        """`(num_slots, layers, page)`, a view."""
        rows = self.region.reshape(self.num_blocks, self.slot_bytes)
        used = rows[:, : self.group.payload_bytes]
        return used.reshape(self.num_blocks, len(self.tensors), self.page_bytes)

    def block_pages(self) -> np.ndarray:
        """`(num_blocks, layers, page)`, a copy."""
        self.synchronize()
        return np.stack([each.cpu().numpy() for each in self.tensors], axis=1)

    def close(self) -> bool:
        return self.mover.close(10.0) and self.device.close()


# --- correctness ----------------------------------------------------------------------------------


def round_trip(copier: Copier, page_bytes: int, *, pinned: bool) -> str | None:
    """Store all blocks in any order, overwrite them, load them into other blocks; what is wrong."""
    num_blocks = 24 if copier.device is None else max(64, min(4096, ROUND_TRIP_BYTES // page_bytes))
    rng = np.random.default_rng(page_bytes)
    bed = Bed(copier, page_bytes, num_blocks, layers=3, pinned=pinned)
    for tensor in bed.tensors:
        tensor.copy_(torch.from_numpy(rng.integers(0, 256, tensor.shape, np.uint8)))
    wanted = bed.block_pages()
    slots, targets = rng.permutation(num_blocks), rng.permutation(num_blocks)
    half = num_blocks // 2
    stores = [
        bed.job(np.arange(half), slots[:half], is_store=True),
        bed.job(np.arange(half, num_blocks), slots[half:], is_store=True),
    ]
    bed.run(*stores)
    if not np.array_equal(bed.slot_pages()[slots], wanted):
        return "stored bytes are not those of the blocks"
    for tensor in bed.tensors:
        tensor.fill_(0xEE)
    bed.run(bed.job(targets, slots, is_store=False))
    if not np.array_equal(bed.block_pages()[targets], wanted):
        return "loaded bytes are not those that were stored"
    return None if bed.close() else "copies were still under way at the end"


class Storm:
    """Jobs and compute in any order; every page holds one number, the truth is known at once."""

    NUM_BLOCKS = 12

    def __init__(self, copier: Copier, seed: int, make_mover: Callable[..., DeviceMover]) -> None:
        self.random = random.Random(seed)
        is_fake = copier.device is None
        page = 64 if is_fake else self.random.choice([512, 4096, 65536, 1 << 20])
        self.bed = Bed(
            copier, page, self.NUM_BLOCKS, layers=2, make_mover=make_mover, schedule=(seed, 2)
        )
        self.words = [each.view(torch.int64) for each in self.bed.tensors]
        self.truth_blocks = [0] * self.NUM_BLOCKS
        self.truth_slots = [0] * self.NUM_BLOCKS
        self.flights: dict[int, Job[DeviceWork]] = {}
        self.ballast = None if is_fake else torch.zeros(BALLAST_WORDS, device=copier.device)
        self.num_writes = 0

    def write(self, block: int, number: int) -> None:
        """After some time, in the engine's stream."""
        self.truth_blocks[block] = number
        if self.ballast is not None:
            for _ in range(self.random.choice([0, 4, 16])):
                self.ballast.add_(1.0)
        for words in self.words:
            self.bed.compute(lambda words=words: words[block].fill_(number))

    def blocks_of(self, *, stores: bool, loads: bool) -> set[int]:
        wanted = [job for job in self.flights.values() if (stores if job.is_store else loads)]
        return {block for job in wanted for block in job.blocks}

    def act(self) -> None:
        everything = set(range(self.NUM_BLOCKS))
        what = self.random.choice(["compute", "store", "store", "load", "load", "collect", "wait"])
        if what == "compute":
            free = everything - self.blocks_of(stores=True, loads=True)
            for block in self.random.sample(sorted(free), min(2, len(free))):
                self.num_writes += 1
                self.write(block, self.num_writes)
        elif what == "collect":
            self.collect()
        elif what == "wait":
            self.bed.mover.wait(
                set(self.random.sample(sorted(self.flights), len(self.flights) // 2))
            )
            self.collect()
        else:
            self.submit(is_store=what == "store")

    def submit(self, *, is_store: bool) -> None:
        pool = set(range(self.NUM_BLOCKS))
        if is_store:
            pool -= self.blocks_of(stores=False, loads=True)
        blocks = self.random.sample(sorted(pool), min(len(pool), self.random.randint(1, 4)))
        slots = self.random.sample(range(self.NUM_BLOCKS), len(blocks))
        if not blocks:
            return
        busy = self.blocks_of(stores=True, loads=True)
        for block, slot in zip(blocks, slots, strict=True):
            if is_store:
                self.truth_slots[slot] = self.truth_blocks[block]
            else:
                if block not in busy:
                    self.write(block, 0)  # fresh blocks are zeroed
                self.truth_blocks[block] = self.truth_slots[slot]
        job = self.bed.job(blocks, slots, is_store=is_store)
        self.flights[job.job_id] = job
        self.bed.mover.submit(job)

    def collect(self) -> None:
        for job in self.bed.mover.take_finished():
            del self.flights[job.job_id]
            if job.error is not None:
                raise job.error

    def run(self) -> str | None:
        """What is wrong."""
        for _ in range(150):
            self.act()
        self.bed.mover.wait(set(self.flights))
        self.collect()
        blocks = self.bed.block_pages().view(np.int64)
        slots = self.bed.slot_pages().view(np.int64)
        self.bed.close()
        for name, pages, truth in (
            ("block", blocks, self.truth_blocks),
            ("slot", slots, self.truth_slots),
        ):
            wrong = [i for i, number in enumerate(truth) if not (pages[i] == number).all()]
            if wrong:
                return f"{name} {wrong[0]} holds other bytes than it should"
        return "a job was never reported" if self.flights else None


class _EngineNotAwaited(DeviceMover):
    def _wait_for_engine(self, flight: Any) -> None:
        """Left out: copies are early."""


class _OthersNotAwaited(DeviceMover):
    def _wait_for_earlier(self, flight: Any) -> None:
        """Left out: copies of the two directions meet."""


@dataclass
class Report:
    """What is printed and written."""

    facts: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)
    bandwidth: list[dict[str, Any]] = field(default_factory=list)

    def check(self, name: str, wrong: str | None, *, must: bool = True) -> None:
        self.checks.append({"name": name, "ok": wrong is None, "detail": wrong, "must": must})
        print(f"{'ok  ' if wrong is None else 'FAIL' if must else 'note'}  {name}"
              f"{'' if wrong is None else ': ' + wrong}", flush=True)  # fmt: skip

    @property
    def is_good(self) -> bool:
        return all(check["ok"] or not check["must"] for check in self.checks)


def attempt(work: Callable[[], str | None]) -> str | None:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - it is what is looked for
        return repr(error)


def check_bytes(copier: Copier, report: Report, *, quick: bool) -> None:
    sizes = (*ODD_SIZES, *SIZES[:2]) if copier.device is None else (*ODD_SIZES, *SIZES)
    for page_bytes in sizes:
        name = f"round trip of {page_bytes}-byte pages"
        report.check(name, attempt(lambda size=page_bytes: round_trip(copier, size, pinned=True)))
    unpinned = attempt(lambda: round_trip(copier, 4096, pinned=False))
    report.check("round trip through unregistered memory", unpinned)
    num_storms = FAKE_STORMS if copier.device is None else STORMS // 3 if quick else STORMS
    wrong = [
        f"seed {seed}: {found}"
        for seed in range(num_storms)
        if (found := attempt(lambda seed=seed: Storm(copier, seed, DeviceMover).run()))
    ]
    report.check(f"{num_storms} storms", wrong[0] if wrong else None)
    # Whether directions meet is up to the hardware; that compute is late, the ballast sees to.
    for mover, must in ((_EngineNotAwaited, True), (_OthersNotAwaited, copier.device is None)):
        noticed = any(
            attempt(lambda seed=seed, mover=mover: Storm(copier, seed, mover).run())
            for seed in range(num_storms)
        )
        name = f"storms without a wait ({mover.__name__.strip('_')}) are noticed"
        report.check(name, None if noticed else "they are not: this machine hides it", must=must)


# --- speed ----------------------------------------------------------------------------------------


def memcpy_rates(copier: Copier, num_bytes: int, rounds: int) -> dict[str, float]:
    """GB/s of torch's own copies of one piece of pinned memory."""
    host = [
        torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())
        for _ in "ab"
    ]
    there = [torch.empty(num_bytes, dtype=torch.uint8, device=copier.device) for _ in "ab"]
    for each in host:
        each.fill_(1)

    def both() -> None:
        module = torch.get_device_module(copier.device or torch.device("cpu"))
        streams = [module.Stream(), module.Stream()]
        with module.stream(streams[0]):
            host[0].copy_(there[0], non_blocking=True)
        with module.stream(streams[1]):
            there[1].copy_(host[1], non_blocking=True)

    ways: dict[str, Callable[[], object]] = {
        "store": lambda: host[0].copy_(there[0], non_blocking=True),
        "load": lambda: there[0].copy_(host[0], non_blocking=True),
        "both": both,
    }
    found = {}
    for name, way in ways.items():
        times = []
        for _ in range(rounds + 1):
            synchronize(copier)
            begun_s = time.perf_counter()
            way()
            synchronize(copier)
            times.append(time.perf_counter() - begun_s)
        total = num_bytes * (2 if name == "both" else 1)
        found[name] = total / statistics.median(times[1:]) / 1e9
    return found


def synchronize(copier: Copier) -> None:
    if copier.device is not None:
        torch.accelerator.synchronize()


def our_rates(
    copier: Copier, page_bytes: int, num_bytes: int, rounds: int, *, aged: bool, pinned: bool
) -> dict[str, Any]:
    """GB/s of jobs of half the blocks, and the milliseconds that a submit takes."""
    num_chunks = max(4, num_bytes // (page_bytes * LAYERS))
    bed = Bed(copier, page_bytes, 2 * num_chunks, pinned=pinned)
    rng = np.random.default_rng(1)
    order = rng.permutation if aged else np.arange
    blocks, slots = order(2 * num_chunks), order(2 * num_chunks)
    one, two = slice(0, num_chunks), slice(num_chunks, None)
    rates: dict[str, Any] = {"store": [], "load": [], "both": [], "submit_ms": []}
    for number in range(rounds + 1):
        for name in ("store", "load", "both"):
            jobs = []
            if name != "load":
                jobs.append(bed.job(blocks[one], slots[one], is_store=True))
            if name != "store":
                jobs.append(bed.job(blocks[two], slots[two], is_store=False))
            bed.synchronize()
            begun_s = time.perf_counter()
            for job in jobs:
                bed.mover.submit(job)
            submitted_s = time.perf_counter()
            bed.mover.wait({job.job_id for job in jobs})
            ended_s = time.perf_counter()
            bed.mover.take_finished()
            if number:
                total = sum(job.num_bytes for job in jobs)
                rates[name].append(total / (ended_s - begun_s) / 1e9)
                rates["submit_ms"].append((submitted_s - begun_s) / len(jobs) * 1e3)
    result = {name: statistics.median(values) for name, values in rates.items()}
    result["pinned"] = bed.pinned_bytes == bed.region.nbytes
    bed.close()
    del bed, job, jobs
    gc.collect()  # a gigabyte, half of it on the device
    return result


def measure(copier: Copier, report: Report, *, quick: bool) -> None:
    is_fake = copier.device is None
    num_bytes = 1 << 16 if is_fake else MEASURED_BYTES
    rounds = 1 if is_fake else 3 if quick else 7
    base = memcpy_rates(copier, num_bytes, rounds)
    report.facts["memcpy_gb_s"] = base
    print(f"\ntorch's copy of {num_bytes >> 10} KiB of pinned memory: " +
          ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in base.items()))  # fmt: skip
    print(f"\n{'pages':>9} {'order':6} {'memory':7} {'store':>13} {'load':>13} {'both':>13} "
          f"{'submit':>9}   (GB/s, of torch's copy)")  # fmt: skip
    cases = [
        (size, aged, True) for size in (SIZES[:2] if is_fake else SIZES) for aged in (False, True)
    ]
    cases.append((SIZES[-1] if not is_fake else SIZES[0], True, False))
    for page_bytes, aged, pinned in cases:
        rates = our_rates(copier, page_bytes, num_bytes, rounds, aged=aged, pinned=pinned)
        shares = {name: rates[name] / base[name] for name in ("store", "load", "both")}
        goal = GOALS.get(page_bytes) if pinned else None
        is_missed = goal is not None and min(shares["store"], shares["load"]) < goal
        report.bandwidth.append(
            {"page_bytes": page_bytes, "aged": aged, **rates, "shares": shares, "goal": goal}
        )
        cells = " ".join(f"{rates[n]:7.2f} {share:4.0%} " for n, share in shares.items())
        print(f"{page_bytes:9} {'aged' if aged else 'fresh':6} "
              f"{'pinned' if rates['pinned'] else 'paged':7} {cells} {rates['submit_ms']:6.2f} ms"
              f"{'   MISSED' if is_missed and not is_fake else ''}", flush=True)  # fmt: skip


def facts(copier: Copier) -> dict[str, Any]:
    found: dict[str, Any] = {
        "copies": copier.name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": "fake",
        "nodes": [],
    }
    if copier.device is not None:
        module: Any = torch.get_device_module(copier.device)
        found["device"] = module.get_device_name(copier.device)
        found["runtime"] = torch.version.cuda or torch.version.hip or "xpu"
        found["nodes"] = sorted(nodes_of_devices(copier.device, 1))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--fake", action="store_true", help="no GPU: checks only this script")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about a minute")
    parser.add_argument("--json", type=Path, help="write the report there, too")
    args = parser.parse_args(argv)
    copier = find_copier(fake=args.fake)
    if copier is None:
        print("torch sees no GPU here; --fake checks this script without one", file=sys.stderr)
        return 3
    begun_s = time.perf_counter()
    report = Report(facts(copier))
    for name, value in report.facts.items():
        print(f"{name:8} {value}")
    print()
    check_bytes(copier, report, quick=args.quick)
    wrong = attempt(lambda: measure(copier, report, quick=args.quick))
    report.check("measuring", wrong)
    report.facts["seconds"] = round(time.perf_counter() - begun_s, 1)
    if args.json:
        args.json.write_text(json.dumps(vars(report), indent=2) + "\n")
    print(f"\n{'good' if report.is_good else 'NOT GOOD'}, {report.facts['seconds']} s")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
