"""What some set-ups need changed in vLLM on a CPU, in the engine's process, before it starts."""

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
