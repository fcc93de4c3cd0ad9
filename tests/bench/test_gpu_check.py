"""The check of a GPU machine: that it works at all, and that it sees what is wrong."""

import contextlib
import ctypes
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gpu_check
from undercroft.testing.fake_device import FakeDevice


def test_a_device_that_works_is_good(tmp_path: Any, capsys: Any) -> None:
    """Every check passes, every line of the table is there, and the report is JSON."""
    path = tmp_path / "report.json"
    assert gpu_check.main(["--fake", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["facts"]["device"] == "fake"
    assert all(check["ok"] for check in report["checks"])
    assert len(report["checks"]) >= 10
    assert {row["page_bytes"] for row in report["bandwidth"]} == set(gpu_check.SIZES[:2])
    shown = capsys.readouterr().out
    assert "good, " in shown
    assert "storms without a wait" in shown


def test_wrong_bytes_are_seen(monkeypatch: Any, capsys: Any) -> None:
    """A device that drops every third batch ends with status 1, and the line says what is wrong."""
    real = FakeDevice.copy

    def copy(self: FakeDevice, stream: Any, batch: Any, num_copies: int, **how: Any) -> None:
        real(self, stream, batch, num_copies if self.num_batches % 3 else 0, **how)

    monkeypatch.setattr(FakeDevice, "copy", copy)
    monkeypatch.setattr(gpu_check, "FAKE_STORMS", 3)
    assert gpu_check.main(["--fake"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL  round trip" in shown
    assert "bytes" in shown
    assert "NOT GOOD" in shown


def test_a_machine_that_hides_a_missing_wait_is_not_trusted(monkeypatch: Any, capsys: Any) -> None:
    """If the storm cannot fail, that it passes means nothing."""
    monkeypatch.setattr(gpu_check, "_EngineNotAwaited", gpu_check.DeviceMover)
    monkeypatch.setattr(gpu_check, "FAKE_STORMS", 3)
    assert gpu_check.main(["--fake"]) == 1
    assert "FAIL  storms without a wait" in capsys.readouterr().out


class _AtOnce:
    """torch's module of a device that does everything at once."""

    class Stream:
        def __init__(self, device: Any = None) -> None:
            self.device = device

        def wait_event(self, event: Any) -> None: ...

    class Event:
        def __init__(self, *, enable_timing: bool) -> None: ...

        def record(self, stream: Any) -> None: ...

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Any) -> float:
            return 1.0

    @staticmethod
    def current_stream(device: Any) -> Any:
        return _AtOnce.Stream(device)

    @staticmethod
    def stream(stream: Any) -> Any:
        return contextlib.nullcontext(stream)

    @staticmethod
    def get_device_name(device: Any) -> str:
        return f"at once, {device}"

    @staticmethod
    def get_device_properties(index: int) -> Any:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0)


class _Driver:
    """Registers whatever it is told to."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def register(self, address: int, num_bytes: int) -> bool:
        self.held.add(address)
        return True

    def unregister(self, address: int) -> None:
        self.held.remove(address)


def test_the_way_of_a_real_device_is_the_same(monkeypatch: Any, capsys: Any) -> None:
    """With torch's calls instead of the fake's: all is right, but for a control that cannot be."""
    driver = _Driver()
    copier = gpu_check.Copier(torch.device("cpu"), "one by one", registrar=driver)
    for name, value in (
        ("find_copier", lambda fake: copier),
        ("SIZES", (2048, 65536)),
        ("ODD_SIZES", (1000,)),
        ("STORMS", 6),
        ("MEASURED_BYTES", 1 << 20),
        ("ROUND_TRIP_BYTES", 1 << 18),
        ("BALLAST_WORDS", 8),
    ):
        monkeypatch.setattr(gpu_check, name, value)
    monkeypatch.setattr(torch, "get_device_module", lambda _device: _AtOnce)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    assert gpu_check.main(["--quick"]) == 1
    shown = capsys.readouterr().out
    failed = [line for line in shown.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1, shown
    assert "storms without a wait (EngineNotAwaited)" in failed[0]
    assert "65536 aged   paged" in shown
    assert "65536 aged   pinned" in shown
    assert driver.held == set()


def test_without_a_gpu_it_says_so(capsys: Any) -> None:
    """Status 3 and one line; an unknown flag is status 2."""
    assert gpu_check.main([]) == 3
    assert "--fake" in capsys.readouterr().err
    with pytest.raises(SystemExit) as raised:
        gpu_check.main(["--fast"])
    assert raised.value.code == 2


@pytest.mark.parametrize(("version", "num_arguments"), [("_v2", 8), ("", 9)])
def test_the_drivers_call_gets_what_its_header_says(
    version: str, num_arguments: int, monkeypatch: Any
) -> None:
    """Targets before sources, one set of attributes for all, and the current stream last."""
    calls: list[Any] = []

    def call(*arguments: Any) -> int:
        calls.append(arguments)
        return 0 if len(calls) == 1 else 1

    monkeypatch.setattr(
        ctypes, "CDLL", lambda _name: SimpleNamespace(**{f"cuMemcpyBatchAsync{version}": call})
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    batch = gpu_check.DriverBatch()
    source, target, sizes = (torch.zeros(5, dtype=torch.int64) for _ in range(3))
    batch(source, target, sizes, is_src_access_order_any=True)
    (arguments,) = calls
    assert len(arguments) == num_arguments
    assert [arguments[0].value, arguments[1].value] == [target.data_ptr(), source.data_ptr()]
    assert arguments[2].value == sizes.data_ptr()
    assert arguments[3].value == 5
    assert arguments[4]._obj.source_order == 3
    assert ctypes.sizeof(arguments[4]._obj) == 24
    assert arguments[-1].value == 77
    with pytest.raises(RuntimeError, match="error 1"):
        batch(source, target, sizes, is_src_access_order_any=False)
