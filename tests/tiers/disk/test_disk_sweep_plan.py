"""What can go is named with its reason; what an engine has open never is; removing it is safe."""

import os
import time
from pathlib import Path

import pytest

from undercroft.clock import SystemClock
from undercroft.keys import Namespace
from undercroft.tiers.disk.catalog import Catalog
from undercroft.tiers.disk.fsck import Fsck
from undercroft.tiers.disk.removal import Removal
from undercroft.tiers.disk.sweep import Reason, Waste, plan, remove

from .stores import CAPACITY, OTHER, age, fill, held, look
from .support import NAMESPACE, disk, du, files, right
from .test_disk_history import history

DAY_S = 86400.0


def planned(path: Path, **limits: float) -> list[Waste]:
    return plan(look(path), now_s=time.time(), **limits)  # type: ignore[arg-type]


def swept(path: Path, **limits: float) -> list[str]:
    removal = Removal(Catalog(str(path), SystemClock()))
    return [remove(waste, removal) for waste in planned(path, **limits)]


def test_a_tidy_store_has_no_waste(tmp_path: Path) -> None:
    """Nothing goes without a reason."""
    fill(tmp_path, range(9))
    assert planned(tmp_path, unused_s=DAY_S, capacity_bytes=CAPACITY) == []


def test_namespaces_unused_for_long_go_whole(tmp_path: Path) -> None:
    """By when something was last stored; those of running engines stay, however old."""
    fill(tmp_path, range(9))
    fill(tmp_path, range(9), namespace=OTHER)
    with held(tmp_path):
        age(tmp_path, 40 * DAY_S)
        (waste,) = planned(tmp_path, unused_s=30 * DAY_S)
        assert (waste.reason, Path(waste.path).name) == (Reason.UNUSED, OTHER.id)
        before = du(tmp_path)
        assert swept(tmp_path, unused_s=30 * DAY_S) == [""]
        assert du(tmp_path) == before - waste.num_bytes
    assert [n.namespace_id for n in look(tmp_path).namespaces] == [NAMESPACE.id]
    assert planned(tmp_path, unused_s=60 * DAY_S) == []


def test_debris_and_what_serves_nothing_goes(tmp_path: Path) -> None:
    """Temporary files, halves of segments, segments without a good header, empty namespaces."""
    fill(tmp_path, range(28), capacity_bytes=300 << 10)
    disk(tmp_path, namespace=OTHER).close()
    indexes = files(tmp_path, ".index")
    files(tmp_path, ".slab")[0].unlink()
    indexes[1].write_bytes(b"z" * 5000)
    (indexes[0].parent / "manifest.json.tmp").write_bytes(b"")
    reasons = [waste.reason for waste in planned(tmp_path)]
    assert sorted(reason.name for reason in reasons) == ["DAMAGED", "DEBRIS", "DEBRIS", "EMPTY"]
    assert swept(tmp_path) == [""] * 4
    assert planned(tmp_path) == []
    assert Fsck(Catalog(str(tmp_path), SystemClock())).check(look(tmp_path)).findings == []


def test_the_coldest_go_until_the_rest_fits(tmp_path: Path) -> None:
    """Over the capacity, segments nobody owns go, oldest first, and no more than needed."""
    fill(tmp_path, range(200))
    indexes = sorted(files(tmp_path, ".index"), key=lambda p: p.stat().st_mtime_ns)
    assert planned(tmp_path, capacity_bytes=du(tmp_path)) == [], "it fits"
    wanted = du(tmp_path) - 1
    (waste,) = planned(tmp_path, capacity_bytes=wanted)
    assert waste.reason is Reason.OVER_CAPACITY
    assert Path(waste.path).stem == indexes[0].stem
    assert swept(tmp_path, capacity_bytes=du(tmp_path) // 2)
    assert du(tmp_path) <= wanted // 2 + 1
    with held(tmp_path):
        assert planned(tmp_path, capacity_bytes=1) == []


def test_old_manifests_go_and_later_segments_stay(tmp_path: Path) -> None:
    """No engine of this release asks for an older manifest; a later format is not ours to judge."""
    old = Namespace({"format": 0, "model": {"name": "m"}})
    fill(tmp_path, range(3), namespace=old)
    assert [waste.reason for waste in planned(tmp_path)] == [Reason.OLD_FORMAT]
    index = files(tmp_path, ".index")[0]
    page = bytearray(index.read_bytes())
    page[8] = 9
    index.write_bytes(page)
    assert planned(tmp_path, unused_s=0.0, capacity_bytes=1) == []


@pytest.mark.parametrize("is_one_running", [True, False])
def test_histories_of_engines_long_gone_go(tmp_path: Path, is_one_running: bool) -> None:
    """Of three engines that ran at once: neither what one writes nor the youngest of them goes."""
    fill(tmp_path, range(9))
    engines = [history(tmp_path) for _ in range(3)]
    paths = []
    for engine in engines:
        before = set(files(tmp_path, "history-*"))
        assert engine.open()
        paths += set(files(tmp_path, "history-*")) - before
    for engine in engines[is_one_running:]:
        engine.close()
    age(tmp_path, 40 * DAY_S)
    os.utime(paths[2], (time.time() - 35 * DAY_S,) * 2)
    gone = paths[1:2] if is_one_running else paths[:2]
    found = planned(tmp_path)
    assert {waste.reason for waste in found} == {Reason.OLD_HISTORY}
    assert {Path(waste.path) for waste in found} == set(gone)
    catalog = Catalog(str(tmp_path), SystemClock())
    engines[1].open()  # goes on with one of them
    answers = [remove(waste, Removal(catalog)) for waste in found]
    assert all(not answer or "goes on with it" in answer for answer in answers)
    assert [Path(w.path).exists() for w in found] == [bool(answer) for answer in answers]
    for engine in engines:
        engine.close()
    os.utime(paths[2], (time.time(),) * 2)
    assert not any(swept(tmp_path))
    assert planned(tmp_path) == []
    assert paths[2].exists()
    assert history(tmp_path).open()


def test_nothing_is_planned_on_an_unsettled_look(tmp_path: Path) -> None:
    """While somebody may be creating files, nothing is called debris."""
    fill(tmp_path, range(3))
    (files(tmp_path, ".index")[0].parent / "manifest.json.tmp").write_bytes(b"")
    import dataclasses

    store = dataclasses.replace(look(tmp_path), is_settled=False)
    assert plan(store, now_s=time.time(), unused_s=0.0, capacity_bytes=1) == []


def test_an_engine_that_comes_meanwhile_keeps_its_own(tmp_path: Path) -> None:
    """Between plan and removal an engine opens the namespace: it stays, and works."""
    fill(tmp_path, range(9))
    catalog = Catalog(str(tmp_path), SystemClock())
    (waste,) = plan(catalog.look(), now_s=time.time() + 2, unused_s=0.0)
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert "open" in remove(waste, Removal(catalog))
    assert all(right(tier, number) for number in range(9))
    tier.close()


@pytest.mark.parametrize("name", ["mine.txt", "seg-0000000000000000.slab.bak"])
def test_a_directory_with_strangers_files_stays(tmp_path: Path, name: str) -> None:
    """Its segments go; what is not ours stays, with its directory, and is named."""
    fill(tmp_path, range(9))
    folder = files(tmp_path, "manifest.json")[0].parent
    (folder / name).write_bytes(b"precious")
    (left,) = swept(tmp_path, unused_s=0.0)
    assert "not ours" in left
    assert (folder / name).read_bytes() == b"precious"
    assert not files(tmp_path, ".slab")
