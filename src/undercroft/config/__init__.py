"""The boundary between an inference engine and this library: what the engine says of itself.

`boundary` holds the five frozen dataclasses, `convert` reads an engine's own objects and JSON.
"""

from __future__ import annotations

from undercroft.config.boundary import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from undercroft.config.convert import EngineConfig, from_engine, from_json, to_json

__all__ = [
    "EngineConfig",
    "OffloadingCacheConfig",
    "OffloadingConfig",
    "OffloadingGroupConfig",
    "OffloadingModelConfig",
    "OffloadingParallelConfig",
    "from_engine",
    "from_json",
    "to_json",
]
