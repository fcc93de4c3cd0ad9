"""Of every chunk it is said what became of it, and why, as far as that can be known."""

from pathlib import Path

from undercroft.clock import SystemClock
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.fate import FateKind, Fates
from undercroft.tiers.disk.history import HistoryFile, Incident, key_part

from .stores import CAPACITY, OTHER, fill
from .support import NAMESPACE, disk, files, key, put


def fates(path: Path) -> Fates:
    catalog = Catalog(str(path), SystemClock())
    return Fates(catalog, catalog.look())


def test_each_fate_is_told_apart(tmp_path: Path) -> None:
    """Stored, damaged, void, evicted, declined, dropped, and no trace; late lookups besides."""
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    for number in (10, 11, 12, 0):
        put(tier, number)
    tier.raise_epoch()
    for number in (1, 2, 3):
        put(tier, number)
    tier.close()
    slab = files(tmp_path, ".slab")[0]
    data = bytearray(slab.read_bytes())
    at = data.index(key(2)) - 80 + 4096
    data[at] ^= 1
    slab.write_bytes(data)
    file = HistoryFile(
        str(tmp_path),
        namespace=NAMESPACE,
        levels=["host", "disk"],
        num_bytes=8192,
        capacity_bytes=CAPACITY,
        free_space_floor_bytes=0,
        clock=SystemClock(),
    )
    assert file.open()
    told = [
        Incident(100, "opened", "other", "host"),
        Incident(110, "declined", "not_admitted", "disk", key_part(key(4))),
        Incident(120, "evicted", "capacity", "disk", key_part(key(4))),
        Incident(130, "declined", "full", "host", key_part(key(5))),
        Incident(140, "dropped", "corrupt", "disk", key_part(key(6))),
        Incident(150, "evicted", "capacity", "disk", key_part(key(3))),  # and stored again
        Incident(160, "missed", "deadline", "host", key_part(key(3))),
        Incident(170, "down", "timeout", "disk"),
    ]
    file.add(told)
    file.close()

    known = fates(tmp_path)
    (space,) = known._store.namespaces
    found = {number: known.of(space, key(number)) for number in range(8)}
    assert {number: fate.kind for number, fate in found.items()} == {
        0: FateKind.VOID,
        1: FateKind.STORED,
        2: FateKind.DAMAGED,
        3: FateKind.STORED,
        4: FateKind.EVICTED,
        5: FateKind.DECLINED,
        6: FateKind.DROPPED,
        7: FateKind.NO_TRACE,
    }
    assert "checksum" in found[2].detail
    assert found[3].missed == told[6]
    assert [found[n].incident for n in (4, 5, 6)] == [told[2], told[3], told[4]]
    assert known.general(space) == [told[0], told[7]]
    assert known.since_s(space) == 100
    assert [known.has(space, key(n)) for n in (0, 1, 4)] == [False, True, False]


def test_without_a_history_what_is_there_is_still_told(tmp_path: Path) -> None:
    """An absent or damaged history leaves no trace, and no error."""
    fill(tmp_path, range(2))
    fill(tmp_path, range(9, 10), namespace=OTHER)
    folder = files(tmp_path, "epoch")[0].parent
    (folder / "history-0123456789abcdef").write_bytes(b"\0" * 8192)
    known = fates(tmp_path)
    for space in known._store.namespaces:
        mine = space.namespace_id == NAMESPACE.id
        assert known.since_s(space) is None
        assert (known.of(space, key(1)).kind is FateKind.STORED) == mine
        assert (known.of(space, key(9)).kind is FateKind.NO_TRACE) == mine
