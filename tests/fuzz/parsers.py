"""Every parser of what others may have written, by name: what both fuzzers drive.

A parser takes any bytes and returns, or raises one of this library's documented errors; all else is
a crash. Where a checksum guards a format, the bytes are tried as they are and resealed, since else
no fuzzer gets past it.
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.tiers.disk.support import NAMESPACE
from undercroft.clock import SystemClock
from undercroft.config import (
    EngineConfig,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
    from_json,
    to_json,
)
from undercroft.engines import told
from undercroft.errors import CorruptChunk, KvError
from undercroft.hierarchy.region import Region, RegionConfig
from undercroft.hierarchy.region_control import Control, Header, RegionShape
from undercroft.identity.weights import _ranges
from undercroft.keys import first_difference
from undercroft.settings.limits import host_limits
from undercroft.settings.sources import load, parse_file
from undercroft.tiers import frame
from undercroft.tiers.disk.epoch import MAX_EPOCH, EpochFile, parse_epoch
from undercroft.tiers.disk.files import Files
from undercroft.tiers.disk.foreign import ForeignSegment
from undercroft.tiers.disk.history import read_history
from undercroft.tiers.disk.holdings import Holdings
from undercroft.tiers.disk.manifest import parse_manifest
from undercroft.tiers.disk.table import (
    Entries,
    changed_slots,
    next_change,
    parse_entries,
    parse_header,
    ring_runs,
)

from . import store
from .patches import (
    PAGE,
    patched,
    pieces,
    sealed_epoch,
    sealed_history,
    sealed_index,
    sealed_page,
    sealed_rows,
)

HARD = [
    b"9" * 5000,
    b"1e999",
    b"NaN",
    b'"\\ud800"',
    b"[" * 5000,
    *(b"[" * n + b"]" * n for n in (60, 300, 900)),
    *(b'{"a":' * n + b"1" + b"}" * n for n in (60, 300, 900)),
    b"a=" + b"[" * 900 + b"]" * 900,
    b"a=" + b"{a=" * 300 + b"1" + b"}" * 300,
    b"a." * 900 + b"a=1",
]
"""No parser's own files look like this."""
DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True)
class Parser:
    """One parser, and files that the code itself wrote for it.

    Args:
        run: Takes any bytes.
        corpus: Made at run time.
        allowed: What may come out besides nothing.
        most_bytes: Memory that one call may take.
        max_len: Longest input worth trying.
        seal: Makes the checksums in it good.
        is_text: Whether what is hard for readers of text is worth trying, see `HARD`.
    """

    run: Callable[[bytes], object]
    corpus: Callable[[], list[bytes]]
    allowed: tuple[type[BaseException], ...] = (KvError,)
    most_bytes: int = 16 << 20
    max_len: int = 8192
    seal: Callable[[bytes], bytes] | None = None
    is_text: bool = False


def _of_store(kind: int) -> bytes:
    return store.image()[store.file_of(kind)]


# --- the disk tier's files ---------------------------------------------------------------------


def _frame(data: bytes) -> None:
    block = memoryview(data.ljust(frame.HEADER_BYTES, b"\0"))
    head = frame.unpack(block)
    frame.pack(head, memoryview(bytearray(frame.HEADER_BYTES)))
    payload = memoryview(data)[frame.HEADER_BYTES :]
    frame.verify(block, payload, key=head.key, namespace=head.namespace, epoch=head.epoch)


def _header(data: bytes) -> None:
    header = parse_header(data)
    assert header.num_slots * 128 <= 1 << 30
    next_change(data[:PAGE])
    for change in (0, next_change(data[:PAGE]), 0xFFFFFFFF):
        assert len(changed_slots(data[:PAGE], change) or []) <= 448


def _entries(data: bytes) -> Entries:
    found = parse_entries(data, NAMESPACE.digest)
    assert len(found.keys) == len(found.slots) <= len(data) // 128
    assert int(found.epochs.max(initial=0)) <= MAX_EPOCH
    return found


class _Memory(Files):
    """Files whose content is given."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        bytearray(num_bytes)  # the system call takes its buffer first, whatever there is
        return self.content[offset : offset + num_bytes]

    def pwrite(self, fd: int, data: bytes, offset: int) -> None:
        whole = bytearray(self.content.ljust(offset, b"\0"))
        whole[offset : offset + len(data)] = data
        self.content = bytes(whole)

    def fdatasync(self, fd: int) -> None:
        pass


def _followed(data: bytes) -> None:
    """An index that its owner, or something else, changes while it is followed."""
    before = _of_store(0)
    header, holdings = parse_header(before), Holdings()
    holdings.void(1)
    segment = ForeignSegment(1, header, -1, -1, "")
    holdings.add_foreign(segment)
    slots = [int.from_bytes(data[at : at + 4], "little") for at in range(0, min(len(data), 64), 4)]
    told_of = patched(before, b"")
    for place, items in ring_runs(next_change(before[:PAGE]), slots or [0]):
        told_of = told_of[:place] + items + told_of[place + len(items) :]
    wrong = patched(before, data)
    for content in (before, told_of, sealed_index(wrong), wrong, before):
        try:
            sighting = segment.disk_look(_Memory(content), 0.0)
        except KvError:
            segment.stale = True
            continue
        if sighting:
            holdings.see(segment, sighting)
    assert len(segment.keys) == header.num_slots


def _epoch(data: bytes) -> None:
    epoch = parse_epoch(data)
    if epoch is not None:
        assert 1 <= epoch <= MAX_EPOCH
        with suppress(OSError):
            EpochFile(_Memory(b""), "epoch").write(epoch + 1)


def _manifest(data: bytes) -> None:
    stored = parse_manifest(data)
    for one, other in ((NAMESPACE, stored), (stored, NAMESPACE)):
        first_difference(one, other)


# --- shared memory -----------------------------------------------------------------------------

_SHAPE = RegionShape(2, 1 << 16)


def _note() -> bytes:
    return told.pack(
        {"stored": "canonical", "why": "", "is_less": False, "layers": [["model.layers.0"]]}
    )


@cache
def _region() -> bytes:
    """Of two ranks that have joined, one with a failed store; the body left out."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="undercroft-fuzz-") as path:
        config = RegionConfig("fuzz", 2, 1 << 16, b"identity", Path(path))
        ranks = [
            Region.join(
                config, role=r, chunk_bytes=(8192,), note=_note(), deadline_s=9, clock=SystemClock()
            )
            for r in (0, 1)
        ]
        ranks[0].report_failed_store(7)
        (file,) = Path(path).iterdir()
        with file.open("rb") as open_file:
            data = open_file.read(_SHAPE.control_bytes)
        for rank in ranks:
            rank.close()
        return data


def _unpacked(data: bytes) -> None:
    with suppress(ValueError):
        told.unpack(data)
    told.parse_note(0, data if data[:1] == b"x" else zlib.compress(data))


def _region_header(data: bytes) -> None:
    header = Header.parse(data)
    if header:
        header.missing()
        header.difference(_SHAPE, b"identity", "version")
        assert header.shape.num_ranks <= 256
        assert max(header.joined, default=0) <= 256


def _region_control(data: bytes) -> None:
    whole = bytearray(_SHAPE.file_bytes)
    whole[: _SHAPE.control_bytes] = patched(_region(), data)[: _SHAPE.control_bytes].ljust(
        _SHAPE.control_bytes, b"\0"
    )
    control = Control(whole, _SHAPE)  # type: ignore[arg-type] # any writable buffer
    try:
        assert control.ready_bytes <= _SHAPE.total_bytes
        for rank in (0, 1):
            seen, stores = control.read_failures(rank, 0)
            assert len(stores or ()) <= 1024
            control.read_failures(rank, seen)
            start, length = control.record_span(rank)
            control.proves(rank, bytes(whole[start : start + length]), (1, 2), in_body=True)
        for part in (control.note, control.chunk_bytes):
            for rank in (0, 1):
                try:
                    assert len(part(rank)) <= 8192
                except CorruptChunk:
                    continue
    finally:
        control.release()


# --- what people and models write --------------------------------------------------------------


def _settings_corpus() -> list[bytes]:
    text = (DOCS / "reference/settings.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```toml\n")[1:]]
    more = 'cpu_bytes_to_use = 1e9\nsecondary_tiers = [{type = "fs", root_dir = "/x"}]\n'
    keys = (
        'host = "1GiB"\nadmission = {type = "frequency"}\nlookup_deadline_s = 0.1\nmodel_id = "a"'
    )
    return [block.encode() for block in [*blocks, more, keys]]


def _settings(data: bytes) -> None:
    written = parse_file(data, "a file")
    load(written)
    if all(isinstance(value, str) for value in written.values()):
        load(None, environ={f"UNDERCROFT_{name.upper()}": v for name, v in written.items()})


def _config_corpus() -> list[bytes]:
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("a", "b"), group_id=0),),
        worker_kv_bytes_per_block=4096,
        enable_kv_cache_events=False,
        extra_config={"host": "1GiB"},
        engine_id="e",
        model=OffloadingModelConfig("m", "bf16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )
    return [to_json(EngineConfig(config, {"extra": [1, None]})).encode()]


def _config(data: bytes) -> None:
    from_json(data.decode("utf-8", "surrogateescape"))


def _safetensors_corpus() -> list[bytes]:
    header = b'{"__metadata__":{},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    return [struct.pack("<Q", len(header)) + header + bytes(8)]


def _safetensors(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".safetensors") as file:
        for one in (data, struct.pack("<Q", len(data)) + data + bytes(16)):
            file.seek(0)
            file.truncate()
            file.write(one)
            file.flush()
            for start, _ in _ranges(Path(file.name), len(one), 16):
                assert 0 <= start <= len(one)


def _limits_corpus() -> list[bytes]:
    names = ("/proc/meminfo", "/proc/self/cgroup")
    return [Path(name).read_bytes()[:400] for name in names] + [b"max", b"123", b"active_file 4"]


def _limits(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="undercroft-fuzz-") as path:
        for name in (
            "proc/meminfo",
            "proc/self/cgroup",
            "sys/fs/cgroup/memory.max",
            "sys/fs/cgroup/memory.current",
            "sys/fs/cgroup/memory.stat",
        ):
            file = Path(path) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data if "cgroup/" not in name or len(data) % 2 else b"0::/\n")
        host_limits(Path(path), shm=None)


PARSERS: dict[str, Parser] = {
    "chunk-header": Parser(
        _frame,
        lambda: [_of_store(1)[at : at + 2 * PAGE] for at in (0, 2 * PAGE)],
        max_len=3 * PAGE,
        seal=lambda data: sealed_page(data, 4088),
    ),
    "index-header": Parser(
        _header,
        lambda: [_of_store(0)[:PAGE]],
        max_len=PAGE,
        seal=lambda data: sealed_page(data, 504),
    ),
    "index-table": Parser(
        _entries,
        lambda: [_of_store(0)[PAGE : PAGE + 1024]],
        max_len=2048,
        seal=sealed_rows,
    ),
    "index-followed": Parser(_followed, lambda: pieces(_of_store(0))),
    "epoch": Parser(_epoch, lambda: [_of_store(2)], max_len=32, seal=sealed_epoch),
    "manifest": Parser(_manifest, lambda: [_of_store(3)], most_bytes=64 << 20, is_text=True),
    "history": Parser(
        read_history,
        lambda: [_of_store(4)[: PAGE + 256]],
        max_len=2 * PAGE,
        seal=sealed_history,
    ),
    "store": Parser(store.run, store.corpus, allowed=(), max_len=4096),
    "region-header": Parser(_region_header, lambda: [_region()[:PAGE]], max_len=5000),
    "region-control": Parser(_region_control, lambda: pieces(_region())),
    "rank-note": Parser(
        _unpacked,
        lambda: [_note(), zlib.decompress(_note())],
        most_bytes=256 << 20,
        is_text=True,
    ),
    "settings-file": Parser(_settings, _settings_corpus, is_text=True),
    "engine-config": Parser(_config, _config_corpus, is_text=True),
    "safetensors-header": Parser(_safetensors, _safetensors_corpus, is_text=True),
    "machine-limits": Parser(_limits, _limits_corpus, is_text=True),
}


def call(parser: Parser, data: bytes) -> None:
    """Run it, and where there is a checksum once more with a good one; faults come out."""
    for one in (data, parser.seal(data)) if parser.seal else (data,):
        try:
            parser.run(one)
        except parser.allowed:
            continue


def seeds(parser: Parser) -> list[bytes]:
    """What a search begins with."""
    return parser.corpus() + (HARD if parser.is_text else [])
