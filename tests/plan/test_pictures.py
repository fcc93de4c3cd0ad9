"""Pictures and the page: there, whole, the same each time; and what is said without matplotlib."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tests.plan.traces import BLOCK, drive, sessions, study_of

from undercroft.errors import ConfigError
from undercroft.plan import pictures as module
from undercroft.plan.advice import advise
from undercroft.plan.page import Page, write_page
from undercroft.plan.pictures import SHOWN, Told, check_installed, draw
from undercroft.plan.terms import Prices

HOSTS = [8 * BLOCK, 32 * BLOCK, 128 * BLOCK]
PRICES = Prices(host=1e-3, disk=1e-5, engine=1e-4)


def told(disks: list[int], prices: Prices = PRICES, endurance: str | None = "1DWPD") -> Told:
    study = study_of(sessions(40, 10), HOSTS, disks, policies=("lru", "arc"))
    disk = drive(endurance)
    return Told(study, advise(study, disk, prices), disk, prices, "tiny & <co>")


def texts(svg: Path) -> str:
    """matplotlib draws words as shapes, and says them in comments."""
    return " ".join(re.findall(r"<!-- (.*?) -->", svg.read_text()))


def test_each_picture_in_each_format(tmp_path: Path) -> None:
    """PNG and SVG that programs can read, with the words that they are about."""
    files = draw(told([0, 128 * BLOCK, 512 * BLOCK]), tmp_path)
    assert list(files) == ["hits", "levels", "writes", "money"]
    for png, svg in files.values():
        assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert 5_000 < png.stat().st_size < 60_000
        ET.parse(svg)
    assert sorted(tmp_path.iterdir()) == sorted(f for pair in files.values() for f in pair)
    shown = texts(files["hits"][1])
    for words in ("optimum, which knows the future", "arc", "lru", "host memory", "8 KiB"):
        assert words in shown
    assert "1.2x rated" in texts(files["writes"][1]) or "x rated" in texts(files["writes"][1])
    assert "no disk" in texts(files["levels"][1])


def test_settings_that_would_not_do_are_hatched(tmp_path: Path) -> None:
    """And the key says so; where all would do, there is none."""
    disks = [0, 128 * BLOCK, 512 * BLOCK]
    worn = draw(told(disks, endurance="0.01DWPD"), tmp_path)
    assert "framed: the advice; hatched: disk too slow or worn out" in texts(worn["levels"][1])
    assert "<pattern" in worn["levels"][1].read_text()
    assert "hatched: too much" in texts(worn["writes"][1])
    fine = draw(told(disks, endurance="100000DWPD"), tmp_path)
    assert "hatched: disk" not in texts(fine["levels"][1])
    assert "<pattern" not in fine["levels"][1].read_text()


def test_every_picture_is_described(tmp_path: Path) -> None:
    """In words for those who do not see it."""
    assert set(draw(told([0, 512 * BLOCK]), tmp_path)) == set(SHOWN)


def test_one_size_alone_is_seen(tmp_path: Path) -> None:
    """A line of one point would show nothing of the optimum."""
    study = study_of(sessions(40, 10), [32 * BLOCK], [0])
    disk = drive()
    one = Told(study, advise(study, disk, Prices()), disk, Prices(), "m")
    svg = draw(one, tmp_path)["hits"][1].read_text()
    assert svg.count("#009e73") >= 4  # the diamond of the optimum, here and in the legend


def test_only_what_there_is_something_to_show_of(tmp_path: Path) -> None:
    """No disk, no prices: the curve alone. No rating: writes without one."""
    assert list(draw(told([0], Prices(), None), tmp_path)) == ["hits"]
    files = draw(told([0, 512 * BLOCK], Prices(), None), tmp_path)
    assert list(files) == ["hits", "levels", "writes"]
    assert "rated" not in texts(files["writes"][1])


def test_the_same_study_gives_the_same_bytes(tmp_path: Path) -> None:
    """So that pictures can be kept under version control."""
    one, two = tmp_path / "1", tmp_path / "2"
    for folder in (one, two):
        folder.mkdir()
        draw(told([0, 512 * BLOCK]), folder)
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is replayed."""
    check_installed()
    monkeypatch.setattr(module, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'undercroft\[plan\]'"):
        check_installed()


def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    """Pictures are in it, ids do not collide, names cannot be markup, nothing is fetched."""
    files = draw(told([0, 512 * BLOCK]), tmp_path)
    page = Page(
        title="a <b>trace</b>",
        under="& more",
        advice=["take <this>"],
        command="serve '<m>'",
        pictures={name: (pair[1], f"{name}: <what> it shows") for name, pair in files.items()},
        tables=[("HEAD", ["A", "B"], [["1", "<2>"]])],
        notes=["a note"],
    )
    write_page(page, tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    for words in ("a &lt;b&gt;trace", "&amp; more", "take &lt;this&gt;", "&lt;2&gt;", "a note"):
        assert words in text
    for name in files:
        assert f'<figure role="img" aria-label="{name}: &lt;what&gt; it shows"><svg' in text
    assert text.count("<svg") == text.count("</svg>") == len(files)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) > 50
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
    assert used
    assert set(used) <= set(ids)
    assert not re.search(r'(?:src|href)="(?!#|data:image/png)', text)
    assert "<script" not in text
