"""What some set-ups need changed in vLLM on a CPU, in the engine's process, before it starts."""

import ctypes
import sys
from types import ModuleType
from typing import Any


def mamba_states(driver: Any) -> None:
    """Let the scheduler split prefills where a state is kept.

    vLLM 0.32's scan on CPUs does not hand out the states within a pass, which its Mamba 2 layers
    promise: with prefix caching on, any prompt ends in an IndexError, without a connector too.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def plain_ngrams(driver: Any) -> None:
    """Run vLLM's n-gram proposer without its compiler, which the tests do without."""

    def as_it_is(*args: Any, **_options: Any) -> Any:
        return args[0] if args and callable(args[0]) else lambda function: function

    stand_in: Any = ModuleType("numba")
    stand_in.njit = stand_in.jit = as_it_is
    stand_in.prange = range
    stand_in.get_num_threads = lambda: 1
    stand_in.set_num_threads = lambda _number: None
    sys.modules["numba"] = stand_in


def speculative_states(driver: Any) -> None:
    """Move recurrent state under speculative decoding.

    vLLM 0.32 has two Triton kernels for that and nothing else, while its gated delta rule for CPUs
    takes drafts: without these stand-ins, any prompt ends in a TypeError, without a connector too.
    Drafts of varying length (n-grams) still end in an error there, and short convolutions (LFM2)
    give other answers in each run.
    """
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    MambaSpecDecodeGPUContext.run_fused_precopy = _precopy
    MambaSpecDecodeGPUContext.run_fused_postprocess = _postprocess


def _precopy(
    self: Any,
    num_reqs: int,
    state_idx_gpu: Any,
    src_col_gpu: Any,
    token_bias_gpu: Any,
    idx_mapping: Any,
) -> None:
    """From the block of the step before into this step's, before the pass."""
    for row in range(num_reqs):
        source, target = int(src_col_gpu[row]), int(state_idx_gpu[row])
        if source >= 0 and source != target:
            _move(self, row, source, target, int(token_bias_gpu[row]))


def _postprocess(  # noqa: PLR0917 - vLLM's own
    self: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: Any,
    mamba_state_idx_gpu: Any,
    num_scheduled_tokens_gpu: Any,
    num_computed_tokens_gpu: Any,
    num_draft_tokens_gpu: Any,
) -> None:
    """The state at a block's end into that block, if this step went over one."""
    self.num_accepted_tokens_out[:num_reqs].copy_(num_accepted_tokens_gpu[:num_reqs])
    for row in range(num_reqs):
        source = int(mamba_state_idx_gpu[row])
        num_running = int(num_computed_tokens_gpu[row] + num_scheduled_tokens_gpu[row])
        num_running -= int(num_draft_tokens_gpu[row])
        num_tokens = num_running + int(num_accepted_tokens_gpu[row]) - 1
        aligned = num_tokens // self.block_size * self.block_size
        if aligned < num_running:
            continue
        target, bias = aligned // self.block_size - 1, aligned - num_running
        if source == target:
            self.num_accepted_tokens_out[row] = 1
        if source != target or bias:
            _move(self, row, source, target, bias)


def _move(context: Any, row: int, source: int, target: int, bias: int) -> None:
    """Copy one request's states from one of its blocks to another, `bias` tokens further on."""
    for state in range(context.num_states):
        table_at = int(context.block_table_ptrs[context.state_group_indices[state]])
        table_at += row * context.block_table_stride_req * 4
        table = (ctypes.c_int32 * (max(source, target) + bias + 1)).from_address(table_at)
        base, stride = int(context.state_base_addrs[state]), int(context.state_block_strides[state])
        element = int(context.state_elem_sizes[state])
        inner = int(context.state_inner_sizes[state]) * element
        width, rows = int(context.state_conv_widths[state]), int(context.state_dim_row_count[state])
        to = base + table[target] * stride
        if not width:
            ctypes.memmove(to, base + table[source + bias] * stride, inner)
            continue
        since = base + table[source] * stride + bias * inner
        for offset in range(max(rows, 1)):
            at = offset * int(context.state_dim_row_stride[state])
            ctypes.memmove(to + at, since + at, (width - bias) * inner)
