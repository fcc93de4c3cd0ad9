"""The tools under every kind of fault at every system call: no good chunk goes, none is wrong."""

import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest

from undercroft.clock import SystemClock
from undercroft.errors import KvError
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.fsck import Fsck
from undercroft.tiers.disk.removal import Removal
from undercroft.tiers.disk.repair import repair
from undercroft.tiers.disk.sweep import plan, remove
from undercroft.tiers.disk.table import ENTRY_BYTES

from .injection import EFFECTS, FaultyFiles
from .stores import OTHER, fill
from .support import NAMESPACE, disk, du, key, open_files, right

CAPACITY = 400 << 10
MAX_CALLS = 400
NUM = 14
BAD = {2, 5}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 8
    path.write_bytes(data)


@pytest.fixture
def harmed(memory_path: Path) -> Path:
    """A bad record, a bad entry, debris, a segment without a header; and another namespace."""
    path = memory_path / "harmed"
    fill(path, range(NUM), capacity_bytes=CAPACITY)
    fill(path, range(3), capacity_bytes=CAPACITY, namespace=OTHER)
    catalog = Catalog(str(path), SystemClock())
    (space,) = [n for n in catalog.look().namespaces if n.namespace_id == NAMESPACE.id]
    places = {chunk.key: chunk for chunk in catalog.chunks(space)}
    record, entry = places[key(2)], places[key(5)]
    flip(Path(record.segment.slab_path), record.slot * 8192 + 5000)
    index = Path(entry.segment.index_path)
    flip(index, 4096 + entry.slot * ENTRY_BYTES + 9)
    (index.parent / "manifest.json.tmp").write_bytes(b"")
    (index.parent / "seg-0123456789abcdef.slab").write_bytes(b"z" * 8192)
    (index.parent / "seg-0123456789abcdef.index").write_bytes(b"z" * 8192)
    return path


def use_tools(path: Path, injected: FaultyFiles) -> None:
    """Check, repair, and let another namespace go; a fault may stop any of them."""
    catalog = Catalog(str(path), SystemClock(), injected)
    removal = Removal(catalog)
    with suppress(OSError, KvError):
        store = catalog.look()
        fsck = Fsck(catalog, num_threads=1)
        list(repair(fsck.check(store), store, fsck, removal, CAPACITY))
    with suppress(OSError, KvError):
        store = catalog.look()
        for waste in plan(store, now_s=time.time()):
            remove(waste, removal)
        for namespace in store.namespaces:
            if namespace.namespace_id == OTHER.id:
                removal.remove_namespace(namespace)


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_fault_at_any_call_costs_no_good_chunk(harmed: Path, effect: str) -> None:
    """Afterwards an engine finds all that was good, or that call was the one that lost it."""
    spare = harmed.parent / "spare"
    before = open_files()
    for at in range(MAX_CALLS):
        shutil.copytree(harmed, spare)
        injected = FaultyFiles(effect, at)
        use_tools(spare, injected)
        assert open_files() <= before, f"{effect} at {at}: {injected.log}"
        assert du(spare) <= CAPACITY
        tier = disk(spare, capacity_bytes=CAPACITY)
        found = {number for number in range(NUM) if tier.contains(key(number))}
        assert found >= set(range(NUM)) - BAD, f"{effect} at {at}: {injected.log}"
        assert all(right(tier, number) for number in found - BAD)
        tier.close()
        shutil.rmtree(spare)
        if not injected.fired:
            assert found == set(range(NUM)) - BAD
            return
    pytest.fail(f"more than {MAX_CALLS} calls")
