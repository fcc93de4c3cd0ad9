"""What vLLM's build brings for its accelerator: copies of many pieces, and registered memory.

Copies are made by `vllm._custom_ops.swap_blocks_batch`: one driver call on CUDA 12.8 and later, a
loop of asynchronous copies elsewhere. Loads of small pages on CUDA are made by vLLM's Triton
kernel, as in vLLM's own worker: a copy engine is slow below some 28 KiB apiece.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

import torch

from undercroft.engines.accelerator.torch_device import Operators
from undercroft.errors import ConfigError

__all__ = ["EngineRegistrar", "operators_for"]

_MAX_KERNEL_CHUNK = 8192
_WARM_UP_COPIES = (16, 17)  # Triton compiles anew for counts that sixteen does not divide

_LOG = logging.getLogger(__name__)


def operators_for(device: torch.device, page_bytes: Collection[int]) -> Operators:
    """The copies that this build of vLLM has for `device`, ready to be called.

    Args:
        device: The rank's, and the calling thread's current one.
        page_bytes: The sizes of the model's pages.

    Raises:
        ConfigError: vLLM's operators cannot be loaded at all.
    """
    try:
        from vllm import _custom_ops  # noqa: PLC0415 - loading it has side effects
        from vllm.platforms import current_platform  # noqa: PLC0415 - resolving it too
    except ImportError as error:
        raise ConfigError(f"vLLM's operators cannot be loaded: {error}") from error
    if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):  # noqa: SLF001 - its public name
        _LOG.warning(
            "this build of vLLM has no batched copy (swap_blocks_batch): KV cache is copied piece "
            "by piece, which is slower"
        )
        return Operators(None)
    return Operators(
        _custom_ops.swap_blocks_batch,
        _small_page_kernel(device, page_bytes),
        can_pin=torch.accelerator.is_available() and current_platform.is_pin_memory_available(),
    )


def _small_page_kernel(
    device: torch.device, page_bytes: Collection[int]
) -> Callable[..., None] | None:
    """The engine's kernel for small pages, compiled, where it is faster than copies."""
    if device.type != "cuda" or torch.version.hip or not page_bytes:
        return None
    try:
        from vllm.triton_utils import HAS_TRITON, triton  # noqa: PLC0415 - only on CUDA
        from vllm.v1.kv_offload.cpu.swap_blocks_triton import (  # noqa: PLC0415 - only on CUDA
            THRESHOLD_BYTES,
            swap_blocks_batch,
        )

        if not HAS_TRITON or max(page_bytes) >= THRESHOLD_BYTES:
            return None
        chunk = min(triton.next_power_of_2(max(page_bytes)), _MAX_KERNEL_CHUNK)
        kernel = partial(swap_blocks_batch, bytes_per_chunk=chunk)
        for num_copies in _WARM_UP_COPIES:  # of no bytes; so that no load waits for a compiler
            kernel(*(torch.zeros(num_copies, dtype=torch.int64) for _ in range(3)))
        torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - the operator does the same, slower
        _LOG.info("vLLM's kernel for small pages is not used: %s", error)
        return None
    return kernel


class EngineRegistrar:
    """Registration by vLLM, which knows each platform's call, and leaves no error pending in it.

    Raises:
        ImportError: This vLLM has none.
    """

    def __init__(self) -> None:
        from vllm.v1.kv_offload.cpu.host_register import (  # noqa: PLC0415 - loads the engine
            host_register,
            host_unregister,
        )

        self._register: Callable[[int, int], bool] = host_register
        self._unregister: Callable[[int], None] = host_unregister

    def register(self, address: int, num_bytes: int) -> bool:
        """See `pinning.Registrar.register`."""
        return bool(self._register(address, num_bytes))

    def unregister(self, address: int) -> None:
        """See `pinning.Registrar.unregister`."""
        self._unregister(address)
