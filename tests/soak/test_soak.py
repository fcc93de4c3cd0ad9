"""The soak's judge, and a short soak."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.vllm.lab.engine import ROOT
from tests.soak.ledger import Ledger, report, verdict
from tests.soak.prompts import made_prompts, working_set_bytes
from tests.soak.vitals import Vitals, folder_bytes, growth, shared_memory_bytes, vitals
from tests.soak.weather import RARE, rare_faults
from undercroft.hierarchy.rendezvous import SeatLock, region_path

CAPACITY = 1000


def sample(number: int, **more: int) -> Vitals:
    values = {"rss": 500_000_000, "shared": 1, "descriptors": 80, "threads": 30, "named_shared": 0}
    return Vitals(at_s=float(number), num_requests=number, **{**values, **more})


def good() -> Ledger:
    ledger = Ledger()
    ledger.add(reused_tokens=5, kills=1, resets=1)
    ledger.compare(0, (1, 2), (1, 2))
    ledger.samples += [sample(number) for number in range(12)]
    ledger.accounts.append((900, 900))
    ledger.faults["reads fail"] = 3
    ledger.most_disk_bytes = CAPACITY
    return ledger


def test_a_good_run_is_good() -> None:
    ledger = good()
    assert verdict(ledger, CAPACITY, {"reads fail"}) == []
    assert report(ledger, CAPACITY, []).endswith("all as promised")


@pytest.mark.parametrize(
    ("vital", "at_the_end", "is_flat"),
    [
        ("rss", 509_000_000, True),
        ("rss", 511_000_000, False),
        ("descriptors", 81, True),
        ("descriptors", 82, False),
        ("threads", 31, True),
        ("threads", 32, False),
        ("named_shared", 4096, False),
        ("shared", 2, False),
    ],
)
def test_growth_is_seen(vital: str, at_the_end: int, is_flat: bool) -> None:
    ledger = good()
    ledger.samples[-4:] = [sample(number, **{vital: at_the_end}) for number in range(4)]
    bad = verdict(ledger, CAPACITY, set())
    assert (not bad) == is_flat
    assert is_flat or "grew" in bad[0]


def test_warm_up_is_no_growth() -> None:
    samples = [sample(number, rss=number * 100_000_000) for number in range(1, 4)]
    samples += [sample(number) for number in range(9)]
    assert growth(samples, lambda v: v.rss).ratio == 1.0
    with pytest.raises(ValueError, match="too few"):
        growth(samples[:7], lambda v: v.rss)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ledger: ledger.compare(3, (1, 2), (1, 3)), "wrong answers"),
        (lambda ledger: ledger.fail("it broke"), "it broke"),
        (lambda ledger: ledger.accounts.append((900, 901)), "du says 901"),
        (lambda ledger: ledger.accounts.clear(), "never compared"),
        (lambda ledger: setattr(ledger, "most_disk_bytes", CAPACITY + 1), "1000 at most"),
        (lambda ledger: ledger.faults.clear(), "no fault fired: reads fail"),
        (lambda ledger: ledger.counts.pop("kills"), "nothing was tried: kills"),
        (lambda ledger: ledger.counts.pop("answers"), "nothing was tried: answers"),
    ],
)
def test_what_is_bad_is_said(change, says) -> None:  # type: ignore[no-untyped-def]
    ledger = good()
    change(ledger)
    bad = verdict(ledger, CAPACITY, {"reads fail"})
    assert [each for each in bad if says in each]
    assert f"NOT AS PROMISED: {bad[0]}" in report(ledger, CAPACITY, bad)


def test_a_folder_is_measured_as_du_does(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(bytes(100_000))
    (tmp_path / "other").write_bytes(b"x")
    os.link(tmp_path / "other", tmp_path / "same")
    du = subprocess.run(
        ["du", "-s", "--block-size=1", str(tmp_path)], capture_output=True, check=True, text=True
    )
    assert folder_bytes(tmp_path) == int(du.stdout.split()[0])


def test_vitals_are_those_of_the_process() -> None:
    seen = vitals(os.getpid(), 1.0, 2)
    assert 10_000_000 < seen.rss < 1 << 40
    with Path("/dev/null").open("rb"):
        assert vitals(os.getpid(), 1.0, 2).descriptors == seen.descriptors + 1


def test_shared_memory_is_left_once_its_engine_is_gone(tmp_path: Path) -> None:
    """As after a kill; what a living one has just made is not left behind."""
    lock = SeatLock(region_path(tmp_path, "soak"), 0)
    assert lock.open_door(create=True)
    lock.path.write_bytes(bytes(8192))
    assert shared_memory_bytes(tmp_path) == 0
    os.close(lock.fd)  # as the kernel does
    assert shared_memory_bytes(tmp_path) == 8192


def test_prompts_share_beginnings_and_their_chunks_count_once() -> None:
    prompts = made_prompts(60, 1)
    assert prompts == made_prompts(60, 1) != made_prompts(60, 2)
    assert all(100 < len(tokens) < 1000 for tokens in prompts)
    in_all = working_set_bytes(prompts)
    assert in_all < sum(working_set_bytes([tokens]) for tokens in prompts) * 0.9
    assert working_set_bytes(prompts + prompts) == in_all


def test_rare_faults_are_rare_and_those_of_each_round_are_others() -> None:
    """Each of them may fire; nothing lies above the checksums unless asked to."""
    dice = random.Random(0)
    faults, more = rare_faults(dice), rare_faults(dice)
    assert tuple(fault.label for fault in faults) == RARE
    assert all(fault.ratio is not None and 0 < fault.ratio <= 0.01 for fault in faults)
    assert not any(fault.lies for fault in faults)
    assert len({fault.seed for fault in (*faults, *more)}) == 6
    assert [fault.label for fault in rare_faults(dice, lies=True) if fault.lies] == ["lies"]


def soak(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The soak itself, too short for all that may grow slowly."""
    words = ("--minutes", "2", "--prompts", "120", "--json", str(folder / "soak.json"), *words)
    return subprocess.run(
        [sys.executable, "-m", "tests.soak", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
def test_two_minutes(tmp_path: Path) -> None:
    """All as promised, and every rare fault of either engine's tier fired."""
    done = soak(tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "all as promised" in done.stdout
    fired = json.loads((tmp_path / "soak.json").read_text())["faults"]
    assert all(fired[f"{who}: {kind}"] for who in ("resident", "victim") for kind in RARE), fired


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_tier_that_lies_is_found(tmp_path: Path) -> None:
    """The control: what no checksum sees becomes a wrong answer, and the verdict says so."""
    done = soak(tmp_path, "--lies")
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-4000:]
    assert "NOT AS PROMISED" in done.stdout
    assert "wrong answers or more" in done.stdout
