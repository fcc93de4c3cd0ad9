"""What lies under our names and is not ours: never read, never written, never in the way."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from undercroft.errors import ConfigError, TierError, TierUnavailable
from undercroft.tiers.disk.files import Files, NotOurs

from .stores import CAPACITY, OTHER, fill, look
from .support import NAMESPACE, disk, files, key, put, right

NUMBERS = range(4)
SECRET = b"not ours to read or to change" * 200
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def _link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def _hard_link(path: Path, elsewhere: Path) -> None:
    os.link(elsewhere, path)


def _pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, _: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path, _: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        path.symlink_to("/dev/zero")


def _directory(path: Path, _: Path) -> None:
    path.mkdir()


def _given_away(path: Path, _: Path) -> None:
    path.write_bytes(SECRET)
    os.chown(path, 12345, 12345)


STRANGERS = [_link, _hard_link, _pipe, _socket, _device, _directory]
if os.geteuid() == 0:
    STRANGERS.append(_given_away)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A file that must stay as it is."""
    path = tmp_path / "elsewhere"
    path.write_bytes(SECRET)
    yield path
    assert path.read_bytes() == SECRET, "a file that is not ours was changed"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "kv"
    fill(path, NUMBERS)
    return path


def put_in_place_of(victim: Path, make: Callable[[Path, Path], None], elsewhere: Path) -> None:
    victim.unlink()
    make(victim, elsewhere)


@pytest.mark.parametrize("make", STRANGERS)
@pytest.mark.parametrize("suffix", [".index", ".slab"])
def test_a_stranger_in_a_segments_place_costs_its_chunks(
    store: Path, elsewhere: Path, suffix: str, make: Callable[[Path, Path], None]
) -> None:
    """It is not read, the tier works on, and nothing behind it is touched."""
    put_in_place_of(files(store, suffix)[0], make, elsewhere)
    tier = disk(store, capacity_bytes=CAPACITY)
    assert not any(right(tier, number) for number in NUMBERS)
    put(tier, 9)
    assert right(tier, 9)
    assert tier.stats()["foreign_files"] >= 1
    tier.close()


@pytest.mark.parametrize("make", STRANGERS)
@pytest.mark.parametrize("name", ["lock", "epoch", "manifest.json"])
def test_a_stranger_in_the_place_of_what_all_share_is_named(
    store: Path, elsewhere: Path, name: str, make: Callable[[Path, Path], None], caplog
) -> None:
    """The tier starts without its disk and says what to remove; once that is gone it works."""
    (victim,) = store.rglob(name)
    put_in_place_of(victim, make, elsewhere)
    tier = disk(store, capacity_bytes=CAPACITY, flush_interval_s=0)
    with pytest.raises(TierUnavailable, match=rf"{name}.* not a file of ours; remove it"):
        put(tier, 9)
    assert "starts without its disk" in caplog.text
    victim.rmdir() if victim.is_dir() and not victim.is_symlink() else victim.unlink()
    put(tier, 9)
    assert right(tier, 9)
    tier.close()


@pytest.mark.parametrize("make", STRANGERS)
def test_strangers_among_the_namespaces_are_left_alone(
    store: Path, elsewhere: Path, make: Callable[[Path, Path], None]
) -> None:
    """Files of another namespace, and things named like one, stop nobody."""
    fill(store, range(2), namespace=OTHER)
    other = store / "undercroft-v1" / OTHER.id
    for victim in other.iterdir():
        put_in_place_of(victim, make, elsewhere)
    make(store / "undercroft-v1" / ("0" * 32), elsewhere)
    make(other / ("seg-" + "1" * 16 + ".index.tmp"), elsewhere)
    make(store / "undercroft-v1" / NAMESPACE.id / ("history-" + "2" * 16), elsewhere)
    tier = disk(store, capacity_bytes=CAPACITY)
    assert all(right(tier, number) for number in NUMBERS)
    tier.close()
    assert look(store).namespaces


def test_a_namespace_that_is_a_link_is_never_swept(store: Path, tmp_path: Path) -> None:
    """What lies behind it has the names that a crash leaves, and is somebody's."""
    behind = tmp_path / "behind"
    behind.mkdir()
    names = ("manifest.json", "manifest.json.tmp", "epoch", f"seg-{'3' * 16}.slab")
    for name in names:
        (behind / name).write_bytes(SECRET)
    (store / "undercroft-v1" / ("4" * 32)).symlink_to(behind)
    tier = disk(store, capacity_bytes=CAPACITY)
    assert right(tier, 0)
    tier.close()
    assert {p.name: p.read_bytes() for p in behind.iterdir()} == dict.fromkeys(names, SECRET)


def test_our_namespace_as_a_link_is_refused(tmp_path: Path) -> None:
    """Its directory is made by us, so a link is none of ours."""
    behind = tmp_path / "behind"
    behind.mkdir()
    root = tmp_path / "kv" / "undercroft-v1"
    root.mkdir(parents=True)
    (root / NAMESPACE.id).symlink_to(behind)
    with pytest.raises(ConfigError, match="not a directory of its own"):
        disk(tmp_path / "kv")
    assert list(behind.iterdir()) == []


@as_root
def test_directories_and_links_of_others_are_refused(tmp_path: Path) -> None:
    """A namespace of another user, and a link of another user on the way to the root."""
    directory = tmp_path / "kv" / "undercroft-v1" / NAMESPACE.id
    directory.mkdir(parents=True)
    os.chown(directory, 12345, 12345)
    with pytest.raises(ConfigError, match="12345"):
        disk(tmp_path / "kv")
    (tmp_path / "led").symlink_to(tmp_path / "place")
    os.lchown(tmp_path / "led", 12345, 12345)
    (tmp_path / "place").mkdir()
    with pytest.raises(ConfigError, match="symbolic link of user 12345"):
        disk(tmp_path / "led" / "kv")
    assert list((tmp_path / "place").iterdir()) == []


def test_a_link_of_our_own_on_the_way_is_followed(tmp_path: Path) -> None:
    """People move a directory to a larger disk and leave a link."""
    (tmp_path / "large").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "large")
    tier = disk(tmp_path / "kv")
    put(tier, 1)
    assert right(tier, 1)
    tier.close()


@as_root
def test_a_directory_of_others_among_the_namespaces_is_foreign(store: Path) -> None:
    """It counts against the capacity, is named, and is not entered."""
    theirs = store / "undercroft-v1" / ("5" * 32)
    theirs.mkdir()
    (theirs / "manifest.json.tmp").write_bytes(SECRET)
    os.chown(theirs, 12345, 12345)
    tier = disk(store, capacity_bytes=CAPACITY)
    assert right(tier, 0)
    assert tier.stats()["foreign_files"] == 1
    tier.close()
    assert (theirs / "manifest.json.tmp").read_bytes() == SECRET


def test_removing_a_segment_spares_what_its_slab_links_to(store: Path, elsewhere: Path) -> None:
    """A capacity that has shrunk lets segments go: their names, not the bytes behind a link."""
    for slab in files(store, ".slab"):
        put_in_place_of(slab, _hard_link, elsewhere)
    for index in files(store, ".index"):
        index.write_bytes(b"\xff" * index.stat().st_size)
    tier = disk(store, capacity_bytes=CAPACITY)
    assert not right(tier, 0)
    tier.close()


@pytest.mark.parametrize("umask", [0, 0o022, 0o077, 0o277, 0o777])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    """0600 and 0700, the directories above that we make included; reopened under the same."""
    old = os.umask(umask)
    try:
        for _ in range(2):
            tier = disk(tmp_path / "a" / "b")
            put(tier, 1)
            tier.close()
    finally:
        os.umask(old)
    paths = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert len(paths) >= 8
    for path in paths:
        assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_what_was_opened_up_is_closed_again(store: Path) -> None:
    """Modes that somebody loosened are tightened by whoever writes there next."""
    for path in store.rglob("*"):
        path.chmod(0o777)
    tier = disk(store, capacity_bytes=CAPACITY)
    put(tier, 9)
    tier.close()
    for path in store.rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.lstat().st_mode) == wanted or path.name == "manifest.json", path


@pytest.mark.parametrize("make", STRANGERS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT])
def test_nothing_but_a_plain_file_is_opened(
    tmp_path: Path, elsewhere: Path, flags: int, make: Callable[[Path, Path], None]
) -> None:
    """In any mode, without waiting for anybody."""
    make(tmp_path / "name", elsewhere)
    with pytest.raises(NotOurs) as caught:
        Files().open(str(tmp_path / "name"), flags)
    assert caught.value.errno == errno.EBADFD
    assert caught.value.filename == str(tmp_path / "name")


def test_a_file_behind_a_directory_that_is_a_link_is_not_opened(tmp_path: Path) -> None:
    """The directory may have been replaced since it was looked at."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(NotOurs, match="behind a symbolic link"):
        Files().open(str(tmp_path / "link" / "file"), os.O_RDONLY)


def test_a_stranger_that_comes_while_the_tier_runs_is_noticed(store: Path, elsewhere: Path) -> None:
    """The open files stay ours; at the next look the tier lets go of what lost its name."""
    tier = disk(store, capacity_bytes=CAPACITY, flush_interval_s=0)
    for victim in (*files(store, ".index"), *files(store, ".slab"), *files(store, "epoch")):
        put_in_place_of(victim, _link, elsewhere)
    for number in NUMBERS:
        tier.contains(key(number))
        try:
            right(tier, number)
        except TierError:
            continue
    tier.close()
