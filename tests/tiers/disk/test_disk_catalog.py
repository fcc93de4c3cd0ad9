"""The catalogue shows what is there, beside running engines and without, and disturbs nobody."""

import os
import shutil
import time
from pathlib import Path

import pytest

from undercroft.clock import SystemClock
from undercroft.errors import TierUnavailable
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.names import ROOT_NAME
from undercroft.tiers.disk.stored import Store

from .stores import CAPACITY, OTHER, fill, held, look
from .support import NAMESPACE, ManualClock, disk, du, files, key, put, right


def chunks(path: Path, store: Store) -> set[tuple[bytes, int, bool]]:
    catalog = Catalog(str(path), SystemClock())
    return {
        (chunk.key, chunk.payload_bytes, chunk.is_current)
        for namespace in store.namespaces
        for chunk in catalog.chunks(namespace)
    }


@pytest.mark.parametrize("below", ["", ROOT_NAME])
def test_everything_is_shown(tmp_path: Path, below: str) -> None:
    """Namespaces with their manifests, chunks with key and length; all bytes, as `du` has them."""
    fill(tmp_path, range(20))
    fill(tmp_path, range(100, 103), namespace=OTHER)
    store = look(tmp_path / below)
    assert {n.namespace_id for n in store.namespaces} == {NAMESPACE.id, OTHER.id}
    assert [n.manifest for n in store.namespaces if n.namespace_id == OTHER.id] == [OTHER.manifest]
    assert chunks(tmp_path, store) == {
        (key(number), 4096, True) for number in (*range(20), 100, 101, 102)
    }
    assert store.disk_bytes == du(tmp_path)
    assert store.charged_bytes == du(tmp_path) <= CAPACITY
    assert store.is_settled
    assert not any(n.is_in_use or n.problem for n in store.namespaces)


def test_strangers_files_are_counted_and_named(tmp_path: Path) -> None:
    """Foreign files and trees, wherever they lie, are in the total and in no namespace."""
    fill(tmp_path, range(2))
    root = tmp_path / ROOT_NAME
    (root / NAMESPACE.id / "notes.txt").write_bytes(b"x" * 9000)
    (root / "tree" / "deep").mkdir(parents=True)
    (root / "tree" / "deep" / "file").write_bytes(b"y" * 5000)
    store = look(tmp_path)
    assert {Path(piece.path).name for piece in store.foreign} == {"notes.txt", "tree"}
    assert store.disk_bytes == du(tmp_path)


def test_who_has_it_open_is_seen(tmp_path: Path) -> None:
    """While another process has a store open, its namespace and segments are its own."""
    fill(tmp_path, range(3), namespace=OTHER)
    with held(tmp_path, 0, 5) as pid:
        by_id = {n.namespace_id: n for n in look(tmp_path).namespaces}
        mine = by_id[NAMESPACE.id]
        assert mine.users.is_held
        assert mine.is_in_use
        assert [segment.users.is_held for segment in mine.segments] == [True]
        assert mine.pids in ((pid,), ())  # (): the kernel lists no locks here
        assert not by_id[OTHER.id].is_in_use
        assert chunks(tmp_path, look(tmp_path)) >= {(key(4), 4096, True)}
    assert not any(n.is_in_use for n in look(tmp_path).namespaces)


def test_looking_disturbs_no_engine(tmp_path: Path) -> None:
    """Engines that open, store and adopt while a tool looks on lose nothing to it."""
    fill(tmp_path, range(30))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    look(tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        tier = disk(tmp_path, capacity_bytes=CAPACITY)
        for _ in range(3):
            store = look(tmp_path)
        assert tier.stats()["segments"] == len(store.namespaces[0].segments)
        assert all(right(tier, number) for number in range(30))
        tier.close()


def test_without_the_lock_nothing_is_called_free(tmp_path: Path) -> None:
    """While somebody holds the root's lock for long, who holds what is unknown, the rest is not."""
    fill(tmp_path, range(3))
    catalog = Catalog(str(tmp_path), SystemClock())
    with catalog.locked():
        store = Catalog(str(tmp_path), ManualClock()).look()
    assert not store.is_settled
    assert [n.users.is_held for n in store.namespaces] == [None]
    assert all(n.is_in_use for n in store.namespaces)
    assert len(chunks(tmp_path, store)) == 3


def test_chunks_of_an_earlier_epoch_are_void(tmp_path: Path) -> None:
    """What a reset voided is still listed, and not current."""
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    put(tier, 1)
    tier.raise_epoch()
    put(tier, 2)
    tier.close()
    assert chunks(tmp_path, look(tmp_path)) >= {(key(2), 4096, True)}
    assert (key(1), 4096, True) not in chunks(tmp_path, look(tmp_path))


@pytest.mark.parametrize("harm", ["gone", "cut", "edited", "binary"])
def test_a_damaged_manifest_is_told_and_its_chunks_listed(tmp_path: Path, harm: str) -> None:
    """A manifest that does not fit its directory is a problem; keys are still there."""
    fill(tmp_path, range(3))
    manifest = tmp_path / ROOT_NAME / NAMESPACE.id / "manifest.json"
    text = manifest.read_bytes()
    if harm == "gone":
        manifest.unlink()
    else:
        damaged = {"cut": text[:20], "edited": text.replace(b"bf16", b"fp32"), "binary": b"\xff\0"}
        manifest.write_bytes(damaged[harm])
    store = look(tmp_path)
    assert "manifest" in store.namespaces[0].problem
    assert len(chunks(tmp_path, store)) == 3


@pytest.mark.parametrize("where", ["nowhere", "file"])
def test_no_store_is_unavailable(tmp_path: Path, where: str) -> None:
    """A path without a store, or a file, is told as what it is."""
    path = tmp_path / where
    if where == "file":
        path.write_bytes(b"")
    with pytest.raises(TierUnavailable, match="no store"):
        look(path)


def test_what_vanishes_meanwhile_is_left_out(tmp_path: Path) -> None:
    """A namespace or segment removed between listing and reading is no error."""
    fill(tmp_path, range(3))
    fill(tmp_path, range(3), namespace=OTHER)
    catalog = Catalog(str(tmp_path), SystemClock())

    class Removing(Catalog):
        def _fill(self, listed):  # type: ignore[no-untyped-def]
            shutil.rmtree(listed.directory.path)
            return super()._fill(listed)

    assert Removing(str(tmp_path), SystemClock()).look().namespaces == ()
    assert catalog.look().namespaces == ()


def test_segments_that_serve_nothing_say_why(tmp_path: Path) -> None:
    """A damaged header, a missing half, a later format: each with its reason, none an error."""
    fill(tmp_path, range(28), capacity_bytes=300 << 10)
    indexes, slabs = files(tmp_path, ".index"), files(tmp_path, ".slab")
    assert len(indexes) >= 4, "a smaller capacity makes more segments"
    os.truncate(indexes[0], 100)
    slabs[1].unlink()
    indexes[2].unlink()
    page = bytearray(indexes[3].read_bytes())
    page[20] ^= 1
    indexes[3].write_bytes(page)
    segments = {s.segment_id: s.problem for s in look(tmp_path).namespaces[0].segments}
    words = ["damaged", "slab is missing", "index is missing", "checksum differs"]
    for index, word in zip(indexes, words, strict=False):
        assert word in segments[index.stem.removeprefix("seg-")]
