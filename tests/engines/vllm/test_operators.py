"""What is taken of vLLM's build, and what is done without."""

import ctypes
import logging
from typing import Any

import pytest
import torch

from undercroft.engines.vllm import operators
from undercroft.engines.vllm.operators import EngineRegistrar, operators_for

CUDA, XPU = torch.device("cuda", 0), torch.device("xpu", 0)


@pytest.fixture
def declared() -> Any:
    """The engine's operator as its CUDA build declares it, by memmove; how it was called."""
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define("swap_blocks_batch(Tensor src, Tensor dst, Tensor sizes, bool any) -> ()")
    calls: list[bool] = []

    def swap(source: Any, target: Any, sizes: Any, in_any_order: bool) -> None:
        calls.append(in_any_order)
        rows = zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True)
        for here, there, size in rows:
            ctypes.memmove(there, here, size)

    library.impl("swap_blocks_batch", swap, "CPU")
    yield calls
    library._destroy()


def test_the_engines_operator_takes_what_we_give_it(declared: Any) -> None:
    """Three tensors and a flag by name, through vLLM's own wrapper."""
    found = operators_for(CUDA, [1 << 20])
    assert found.batch is not None
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    rows = [torch.tensor([each]) for each in (source.data_ptr() + 8, target.data_ptr(), 40)]
    found.batch(*rows, is_src_access_order_any=True)
    assert declared == [True]
    assert target.tolist() == [*range(8, 48), *[0] * 24]
    assert not found.can_pin  # no accelerator here


def test_a_build_without_the_operator_is_told_once(caplog: Any) -> None:
    """As the CPU build is: torch copies piece by piece then."""
    found = operators_for(CUDA, [1024])
    assert found == (None, None, False)
    assert len(caplog.records) == 1
    assert "no batched copy" in caplog.text


@pytest.mark.parametrize("device", [CUDA, XPU])
def test_the_kernel_for_small_pages_is_used_only_where_it_runs(
    declared: Any, device: Any, caplog: Any
) -> None:
    """It cannot be compiled here; then the operator does it, and a line says so on CUDA."""
    with caplog.at_level(logging.INFO, operators.__name__):
        assert operators_for(device, [1024]).small_loads is None
    assert ("is not used" in caplog.text) <= (device == CUDA)


def test_the_engines_own_registration_is_found() -> None:
    """This vLLM has it; on its CPU build it registers nothing, and does no harm."""
    registrar = EngineRegistrar()
    assert registrar.register(1 << 20, 100) is False
    registrar.unregister(0)
