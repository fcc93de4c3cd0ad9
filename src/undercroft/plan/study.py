"""What each size would have found of a trace: hits by level, time saved, bytes written.

One level alone is replayed at each size, by the classes that an engine runs. Two levels are put
together from that: every chunk in host memory is copied to the disk, which so holds what host
memory holds, and more. Host memory then finds what it would find alone, and both together what the
larger of them would. Where the disk is quick enough to take what is written, that is within some
tenths of a percent what `undercroft.sim.simulate` finds with the whole hierarchy. Left out: the
time that copies take, write budgets, and admission.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from undercroft.errors import ConfigError
from undercroft.plan.shape import Shape
from undercroft.plan.terms import SECONDS_A_DAY, Drive
from undercroft.sim import Hits, LevelPlan, Report, Service, hit_curve, simulate
from undercroft.traces import Trace

__all__ = ["Curve", "Levels", "Study", "block_bytes", "check", "replay"]


@dataclass(frozen=True, slots=True)
class Curve:
    """What a policy finds, by size.

    Args:
        policy: Its name; `belady` is the optimum.
        sizes: In bytes, smallest first.
        rows: What it found at each.
    """

    policy: str
    sizes: tuple[int, ...]
    rows: tuple[Hits, ...]

    def at(self, size: int) -> Hits:
        """What it found at one of `sizes`."""
        return self.rows[self.sizes.index(size)]

    def ratio(self, size: int) -> float:
        """Of input tokens, those found; 0 for no room at all."""
        return self.at(size).token_hit_ratio if size else 0.0


@dataclass(frozen=True, slots=True)
class Levels:
    """Host memory of one size above a disk of one size.

    Args:
        host_bytes: Its size.
        disk_bytes: Its size; 0: there is none.
        host_ratio: Of input tokens, those found in host memory.
        disk_ratio: Those found on disk only.
        optimum_ratio: Those that no policy could find more of in that room.
        saved_s: Engine seconds of prefill not spent, for each second of the trace.
        read_bytes_per_s: From the disk, on average.
        written_bytes: To the disk, a day.
    """

    host_bytes: int
    disk_bytes: int
    host_ratio: float
    disk_ratio: float
    optimum_ratio: float
    saved_s: float
    read_bytes_per_s: float
    written_bytes: float

    @property
    def ratio(self) -> float:
        """Of input tokens, those found."""
        return self.host_ratio + self.disk_ratio


@dataclass(frozen=True)
class Study:
    """A trace, replayed.

    Args:
        trace: The requests, full blocks only.
        block_bytes: Of one of its blocks, windows and states shared out.
        policies: Curves of what was asked for, the first the one that is planned with.
        optimum: The curve of the optimum.
        limit: What unlimited room finds.
        hosts: Sizes of host memory.
        disks: Sizes of the disk.
        prefill_tokens_per_s: Of an engine.
        disk_bytes_per_s: What a disk reads.
    """

    trace: Trace
    block_bytes: float
    policies: tuple[Curve, ...]
    optimum: Curve
    limit: Hits
    hosts: tuple[int, ...]
    disks: tuple[int, ...]
    prefill_tokens_per_s: float
    disk_bytes_per_s: float

    @cached_property
    def seconds(self) -> float:
        """That the trace lasts, at the pace of the middle nine tenths of its requests.

        A few that come long after the others would else thin out all of them.
        """
        early, late = np.quantile(self.trace.times_ms, (0.05, 0.95))
        return max(float(late - early) / 0.9, 1.0) / 1e3

    @property
    def disk_worth(self) -> float:
        """What a token from disk saves of the time that computing it takes, 0 to 1."""
        token_bytes = self.block_bytes / self.trace.block_tokens
        return max(0.0, 1 - self.prefill_tokens_per_s * token_bytes / self.disk_bytes_per_s)

    @property
    def all_bytes(self) -> float:
        """Of all blocks of the trace."""
        return self.trace.num_blocks * self.block_bytes

    @property
    def longest_bytes(self) -> int:
        """Of the longest prompt."""
        return int(int(self.trace.lengths.max()) * self.block_bytes)

    def levels(self, host_bytes: int, disk_bytes: int) -> Levels:
        """Two of the sizes, one above the other."""
        curve, larger = self.policies[0], max(host_bytes, disk_bytes)
        host_ratio, ratio = curve.ratio(host_bytes), curve.ratio(larger)
        written = curve.at(disk_bytes).num_stored if disk_bytes else 0
        from_disk = curve.at(larger).hit_blocks - curve.at(host_bytes).hit_blocks
        return Levels(
            host_bytes,
            disk_bytes,
            host_ratio,
            max(0.0, ratio - host_ratio),
            max(ratio, self.optimum.ratio(larger)),
            self._saved_s(ratio),
            max(0, from_disk) * self.block_bytes / self.seconds,
            written * self.block_bytes / self.seconds * SECONDS_A_DAY,
        )

    def _saved_s(self, ratio: float) -> float:
        tokens_per_s = ratio * self.limit.num_tokens / self.seconds
        return tokens_per_s / self.prefill_tokens_per_s


def block_bytes(trace: Trace, shape: Shape) -> float:
    """Bytes of a block of `trace`, on average.

    Each prompt of which something is new leaves a window and a state at its end; they are shared
    out among all blocks.
    """
    num_ends = int((trace.num_new > 0).sum())
    mean_tokens = float(trace.lengths.mean()) * trace.block_tokens if trace.num_requests else 0.0
    ends = num_ends * shape.tail_bytes(mean_tokens) / max(1, trace.num_blocks)
    return shape.token_bytes * trace.block_tokens + ends


def replay(
    trace: Trace,
    policy: str,
    sizes: Sequence[int],
    each_bytes: float,
    on_size: Callable[[], None],
) -> Curve:
    """The curve of one policy.

    Args:
        trace: Full blocks only.
        policy: Its name, or `belady`.
        sizes: In bytes; none may be less than a block.
        each_bytes: Of a block.
        on_size: Called as each size is done.

    Raises:
        ConfigError: A size is less than a block.
    """
    sizes = sorted(set(sizes))
    capacities = [int(size / each_bytes) for size in sizes]
    if not all(capacities):
        raise ConfigError(
            f"{sizes[0]} bytes are less than one block of the trace, {trace.block_tokens} tokens "
            f"of {each_bytes:.0f} bytes; plan with larger sizes"
        )
    # Where everything fits, nothing is evicted, whoever would choose.
    some = [capacity for capacity in capacities if capacity < trace.num_blocks]
    rows = hit_curve(trace, policy, some, on_capacity=on_size) if some else []
    if len(some) < len(capacities):
        rows = [*rows, *hit_curve(trace, "unbounded", capacities[len(some) :], on_capacity=on_size)]
    return Curve(policy, tuple(sizes), tuple(rows))


def check(
    study: Study, levels: Levels, drive: Drive, on_request: Callable[[], None] | None = None
) -> Report:
    """What the whole hierarchy finds at these sizes, with a drive that takes its time.

    Args:
        study: Of the trace; the first of its policies is simulated.
        levels: The sizes.
        drive: How fast it is.
        on_request: Called as each request comes.

    Cost: some 5 to 60 us a block reference; minutes, for a large trace.
    """
    policy = study.policies[0].policy
    sizes = [("host", levels.host_bytes, Service())]
    if levels.disk_bytes:
        service = Service(0.0, drive.read_bytes_per_s, drive.write_bytes_per_s)
        sizes.append(("disk", levels.disk_bytes, service))
    return simulate(
        study.trace,
        [
            LevelPlan(name, int(size / study.block_bytes), policy, service=service)
            for name, size, service in sizes
        ],
        bytes_per_token=round(study.block_bytes / study.trace.block_tokens),
        prefill_tokens_per_s=study.prefill_tokens_per_s,
        on_request=on_request,
    )
