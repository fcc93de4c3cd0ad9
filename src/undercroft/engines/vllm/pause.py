"""Who asked for a reset: the user, or an engine that is about to sleep or pause.

vLLM 0.32 says nothing: its connector is told to reset and no more, the same for `/sleep`, `/pause`,
`release_kv_cache_memory` and `/reset_prefix_cache`, and nothing at all when it wakes up. The first
three go through one method of the engine core, which only they call; so whoever is told can see it
on the stack. Whether new weights come while the engine is asleep, or paused, cannot be seen.
"""

from __future__ import annotations

import inspect

__all__ = ["is_pause"]

_ENGINE_CORE = "vllm.v1.engine.core"
_OF_A_PAUSE = "_reset_caches"


def is_pause() -> bool:
    """Whether this call, a reset, is part of a sleep or pause.

    In an engine that does this some other way the answer is no: then everything is dropped, which
    is never wrong.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == _OF_A_PAUSE and frame.f_globals.get("__name__") == _ENGINE_CORE:
            return True
        frame = frame.f_back
    return False
