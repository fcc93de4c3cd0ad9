"""The keys that vLLM would ask for, for a prompt, computed by vLLM's own functions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from undercroft.errors import ConfigError
from undercroft.keys import ChunkKey

__all__ = ["Prompt", "keys_of", "tokens_of"]

_DEFAULT_ALGORITHM = "sha256"
_RANDOM_SEED = "random per process"
_NO_SEED = "the engine's default"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What decides a request's block hashes.

    Args:
        tokens: Its token ids.
        cache_salt: As sent with the request; None for none.
        adapter: Name and path of its LoRA adapter; None for none.
    """

    tokens: Sequence[int]
    cache_salt: str | None = None
    adapter: tuple[str, str] | None = None


def tokens_of(model: str, text: str) -> list[int]:
    """Token ids of `text`, special tokens added, as vLLM has them for a completion.

    Raises:
        ConfigError: The tokenizer cannot be loaded.
    """
    from vllm.tokenizers import get_tokenizer  # noqa: PLC0415 - slow, and rarely needed

    try:
        return [int(token) for token in get_tokenizer(model).encode(text)]
    except Exception as error:
        raise ConfigError(f"the tokenizer of {model} cannot be loaded: {error}") from error


def keys_of(
    prompt: Prompt, manifest: Mapping[str, Any], environ: Mapping[str, str]
) -> dict[int, list[ChunkKey]]:
    """The keys of a prompt's chunks in the order of the prompt, by group id.

    Args:
        prompt: Whose.
        manifest: Of the namespace to look in: it says how many tokens a hash and a chunk cover.
        environ: This process's environment: `PYTHONHASHSEED` must be the engine's.

    Raises:
        ConfigError: The manifest is not that of a vLLM engine, or its hashes cannot be computed
            here; the message says why.
    """
    try:
        tokens_per_hash = int(manifest["cache"]["tokens_per_hash"])
        blocks_per_chunk = int(manifest["cache"]["blocks_per_chunk"])
        groups = {int(g["group_id"]): int(g["tokens_per_block"]) for g in manifest["groups"]}
        hashing = manifest["hash"]
        algorithm = str(hashing["algorithm"] or _DEFAULT_ALGORITHM)
        seed = str(hashing["seed"])
        steps = {
            group_id: _hashes_per_chunk(num_tokens * blocks_per_chunk, tokens_per_hash)
            for group_id, num_tokens in groups.items()
        }
        for group_id in groups:
            make_offload_key(b"", group_id)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"its manifest is not one of a vLLM engine: {error!r}") from error
    _check_seed(seed, environ)
    try:
        hash_fn = get_hash_fn_by_name(algorithm)
    except ValueError as error:
        raise ConfigError(f"this vLLM has no hash algorithm {algorithm}") from error
    init_none_hash(hash_fn)
    request = Request(
        "explain",
        list(prompt.tokens),
        SamplingParams(max_tokens=1),
        None,
        cache_salt=prompt.cache_salt,
        lora_request=LoRARequest(prompt.adapter[0], 1, prompt.adapter[1])
        if prompt.adapter
        else None,
        block_hasher=get_request_block_hasher(tokens_per_hash, hash_fn),
    )
    found: dict[int, list[ChunkKey]] = {}
    for group_id, step in steps.items():
        hashes = request.block_hashes[step - 1 :: step]
        found[group_id] = [ChunkKey(make_offload_key(one, group_id)) for one in hashes]
    return found


def _hashes_per_chunk(chunk_tokens: int, tokens_per_hash: int) -> int:
    if tokens_per_hash < 1 or chunk_tokens < 1 or chunk_tokens % tokens_per_hash:
        raise ValueError(f"chunks of {chunk_tokens} tokens, hashes of {tokens_per_hash}")
    return chunk_tokens // tokens_per_hash


def _check_seed(seed: str, environ: Mapping[str, str]) -> None:
    given = environ.get("PYTHONHASHSEED")
    ours = _NO_SEED
    if given is not None:
        ours = f"sha256:{hashlib.sha256(given.encode()).hexdigest()[:16]}"
    if seed == _RANDOM_SEED:
        raise ConfigError(
            "its engine hashed with a random seed, so that no other process can name its keys: "
            "set PYTHONHASHSEED for the engine, or let it use sha256"
        )
    if seed != ours:
        raise ConfigError(
            "its engine's PYTHONHASHSEED is not the one here: "
            + ("unset it" if seed == _NO_SEED else "run this with the engine's value")
        )
