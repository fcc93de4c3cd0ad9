"""The region is registered piece by piece as it comes to exist, and nothing stays behind."""

import logging
import threading
import time
from typing import Any

import pytest

from undercroft.clock import SystemClock
from undercroft.engines.accelerator import pinning as module
from undercroft.engines.accelerator.pinning import HostMemory, Pinning

ADDRESS, PIECE = 1 << 20, 100


class Driver:
    """Notes what is registered; refuses from the byte `refuse_at` on."""

    def __init__(self, refuse_at: int = 1 << 40) -> None:
        self.refuse_at = refuse_at
        self.held: dict[int, int] = {}
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.is_held_up = threading.Event()

    def register(self, address: int, num_bytes: int) -> bool:
        if not self.gate.is_set():
            self.is_held_up.set()
        self.gate.wait(60)
        self.threads.add(threading.current_thread().name)
        if address - ADDRESS >= self.refuse_at:
            return False
        assert address not in self.held
        self.held[address] = num_bytes
        return True

    def unregister(self, address: int) -> None:
        del self.held[address]


def pin(driver: Any, ready: Any, total: int = 350, bind: Any = lambda: None) -> Pinning:
    return Pinning(
        driver,
        memory=HostMemory(ADDRESS, total, ready),
        bind_thread=bind,
        clock=SystemClock(),
        piece_bytes=PIECE,
    )


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def _quick_and_tidy(monkeypatch: Any) -> Any:
    monkeypatch.setattr(module, "_POLL_S", 0.005)
    before = set(threading.enumerate())
    yield
    until(lambda: set(threading.enumerate()) <= before)


def test_what_exists_at_the_start_is_registered_before_anything_else(caplog: Any) -> None:
    """In pieces that tile the region, on the caller's thread; the last one may be short."""
    driver = Driver()
    with caplog.at_level(logging.INFO, module.__name__):
        pinning = pin(driver, lambda: 350)
    assert driver.held == {ADDRESS: 100, ADDRESS + 100: 100, ADDRESS + 200: 100, ADDRESS + 300: 50}
    assert driver.threads == {threading.current_thread().name}
    assert pinning.pinned_bytes == 350
    assert "all 350 bytes are registered" in caplog.text
    assert pinning.close()
    assert pinning.close()
    assert driver.held == {}
    assert pinning.pinned_bytes == 0


def test_the_rest_is_registered_as_it_comes_to_exist() -> None:
    """Whole pieces only, never a page that is not there, on a thread bound to the device."""
    driver, ready, bound = Driver(), [120], threading.Event()
    pinning = pin(driver, lambda: ready[0], bind=bound.set)
    assert pinning.pinned_bytes == 100
    bound.wait(10)
    ready[0] = 260
    until(lambda: pinning.pinned_bytes == 200)
    time.sleep(0.05)
    assert pinning.pinned_bytes == 200
    ready[0] = 350
    until(lambda: pinning.pinned_bytes == 350)
    assert "undercroft-pinning" in driver.threads
    assert pinning.close()
    assert driver.held == {}


def test_a_driver_that_refuses_at_the_start_is_told_to_forget_all(caplog: Any) -> None:
    """What it took is taken back, one line says so, and nothing is tried again."""
    driver = Driver(refuse_at=200)
    pinning = pin(driver, lambda: 350)
    assert driver.held == {}
    assert pinning.pinned_bytes == 0
    assert len(caplog.records) == 1
    assert "could not be registered" in caplog.text
    assert "byte 200 of 350" in caplog.text
    assert pinning.close()


def test_a_refusal_later_leaves_what_copies_may_be_using(caplog: Any) -> None:
    """The prefix stays registered until the end; one line names both numbers."""
    driver, ready = Driver(refuse_at=200), [100]
    pinning = pin(driver, lambda: ready[0])
    ready[0] = 350
    until(lambda: caplog.records)
    assert pinning.pinned_bytes == 200
    assert len(driver.held) == 2
    assert "200 of 350 bytes are registered" in caplog.text
    assert pinning.close()
    assert driver.held == {}
    assert len(caplog.records) == 1


def test_a_platform_without_registration_says_so_once(caplog: Any) -> None:
    """And copies go on without it."""
    pinning = pin(None, lambda: 350)
    assert pinning.pinned_bytes == 0
    assert len(caplog.records) == 1
    assert pinning.close()


def test_a_driver_that_fails_badly_costs_speed_only(caplog: Any) -> None:
    """An exception on the thread is logged; the worker goes on."""

    def fail() -> None:
        raise OSError("no such device")

    pinning = pin(Driver(), lambda: 100, bind=fail)
    until(lambda: caplog.records)
    assert "100 of 350" in caplog.text
    assert pinning.close()


def test_a_driver_that_does_not_come_back_is_left_behind(monkeypatch: Any) -> None:
    """Closing is bounded, and says that the memory must stay."""
    monkeypatch.setattr(module, "_STOP_S", 0.05)
    driver, ready = Driver(), [100]
    pinning = pin(driver, lambda: ready[0])
    driver.gate.clear()
    ready[0] = 350
    assert driver.is_held_up.wait(60)
    assert not pinning.close()
    driver.gate.set()
    monkeypatch.setattr(module, "_STOP_S", 10.0)
    assert pinning.close()
    assert driver.held == {}
