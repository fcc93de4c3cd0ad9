"""The namespace manifest: all that decides a chunk's bytes besides its key.

Not in it, on purpose: the engine's id, data parallel numbers, the epoch, capacities and paths.
They decide where chunks are and for how long, not what is in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from undercroft.config import EngineConfig, OffloadingConfig
from undercroft.errors import ConfigError
from undercroft.identity.weights import Fingerprint
from undercroft.keys import Namespace

__all__ = ["MANIFEST_FORMAT", "EngineFacts", "KeyHash", "key_hash", "namespace"]

MANIFEST_FORMAT = 3
"""Raised when a field is added to the manifest, renamed, or changes its meaning."""

_NOT_COLLISION_RESISTANT = ("xxhash", "xxhash_cbor")


@dataclass(frozen=True, slots=True)
class KeyHash:
    """How the engine makes block hashes.

    Args:
        algorithm: The engine's name for it; None if it does not say.
        seed: Digest of the seed it starts from, or words for the usual one; never the seed.
        note: One line to warn with, or None.
    """

    algorithm: str | None
    seed: str
    note: str | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the adapter knows of the engine beyond its configuration object.

    Args:
        name: Such as `vllm`.
        version: The engine's version: another one may compute other bytes.
        kv_format: Number of the adapter's own idea of how pages lie in a chunk.
        chunk_bytes: Bytes of one chunk, all ranks together, by group id.
        key_hash: How block hashes are made.
        stored_layout: How the bytes of all ranks make up a chunk, see `layout.stored`. `direct`:
            the topology decides, and is in the manifest.
        layer_names: By group id the layers of all pipeline stages; empty: the configuration's.
        stages: Of each pipeline stage, by group id, the names of its layers; empty: there is one.
        model: More about the model as JSON data, where the adapter can see it: quantization,
            rope, sliding windows, attention backend.
        settled_extras: Extras of the configuration, by dotted path, that stay out because `model`
            says what of them decides bytes.
    """

    name: str
    version: str
    kv_format: int
    chunk_bytes: Mapping[int, int]
    key_hash: KeyHash
    stored_layout: str = "direct"
    layer_names: Mapping[int, Sequence[str]] = field(default_factory=dict)
    stages: Sequence[Mapping[int, Sequence[str]]] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    settled_extras: frozenset[str] = frozenset()


def key_hash(algorithm: str | None, environ: Mapping[str, str]) -> KeyHash:
    """What is known of the engine's block hashes.

    Args:
        algorithm: The engine's `prefix_caching_hash_algo`; None if unknown.
        environ: The process's environment; `PYTHONHASHSEED` is the seed, if set.
    """
    seed = environ.get("PYTHONHASHSEED")
    if seed is not None:
        return KeyHash(algorithm, f"sha256:{hashlib.sha256(seed.encode()).hexdigest()[:16]}")
    if algorithm in _NOT_COLLISION_RESISTANT:
        return KeyHash(
            algorithm,
            "random per process",
            f"the engine hashes blocks with {algorithm} and a random seed: no other process, and "
            f"no restart, will find what is stored now; set PYTHONHASHSEED, or use sha256",
        )
    return KeyHash(algorithm, "the engine's default")


def namespace(engine: EngineConfig, fingerprint: Fingerprint, facts: EngineFacts) -> Namespace:
    """The namespace of this engine's chunks.

    With a `model_id` the model's name is left out: the user says which weights are the same.

    Raises:
        ConfigError: `facts.chunk_bytes` is not about exactly the configured groups.
    """
    config = engine.config
    ids = {group.group_id for group in config.groups}
    if set(facts.chunk_bytes) != ids:
        raise ConfigError(
            f"chunk_bytes has the groups {sorted(facts.chunk_bytes)}, but the configuration has "
            f"{sorted(ids)}"
        )
    manifest = {
        "format": MANIFEST_FORMAT,
        "engine": {"name": facts.name, "version": facts.version, "kv_format": facts.kv_format},
        "model": _model(config, fingerprint, facts),
        "groups": _groups(config, facts),
        "cache": {
            "tokens_per_hash": config.cache.tokens_per_hash,
            "blocks_per_chunk": config.cache.blocks_per_chunk,
        },
        "layout": {
            "kv_cache_layout": config.kv_cache_layout,
            "stored": facts.stored_layout,
        },
        "topology": _topology(config, facts) if facts.stored_layout == "direct" else {},
        "hash": {"algorithm": facts.key_hash.algorithm, "seed": facts.key_hash.seed},
        "extras": {
            name: _veiled(value)
            for name, value in engine.extras.items()
            if name not in facts.settled_extras
        },
    }
    return Namespace(manifest)


def _model(
    config: OffloadingConfig, fingerprint: Fingerprint, facts: EngineFacts
) -> dict[str, Any]:
    return {
        "name": None if fingerprint.kind == "model_id" else config.model.name,
        "weights": _weights(fingerprint),
        "dtype": config.model.dtype,
        "facts": dict(facts.model),
    }


def _weights(fingerprint: Fingerprint) -> dict[str, str]:
    return {"kind": fingerprint.kind, "value": fingerprint.value}


def _groups(config: OffloadingConfig, facts: EngineFacts) -> list[dict[str, Any]]:
    return [
        {
            "group_id": group.group_id,
            "tokens_per_block": group.tokens_per_block,
            "chunk_bytes": facts.chunk_bytes[group.group_id],
            "layer_names": list(facts.layer_names.get(group.group_id, group.layer_names)),
        }
        for group in sorted(config.groups, key=lambda group: group.group_id)
    ]


def _topology(config: OffloadingConfig, facts: EngineFacts) -> dict[str, Any]:
    """No rank: a slot holds the bytes of all."""
    parallel = config.parallel
    return {
        "tp_size": parallel.tp_size,
        "pp_size": parallel.pp_size,
        "pcp_size": parallel.pcp_size,
        "dcp_size": parallel.dcp_size,
        "stages": [
            {str(group_id): list(stage[group_id]) for group_id in sorted(stage)}
            for stage in facts.stages
        ],
    }


def _veiled(value: object) -> object:
    """`value` with digests for its texts: nobody knows what they are, and manifests are readable.

    Equal texts have equal digests, so engines are kept apart as before.
    """
    if isinstance(value, str):
        return f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:16]}"
    if isinstance(value, Mapping):
        return {name: _veiled(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_veiled(one) for one in value]
    return value
