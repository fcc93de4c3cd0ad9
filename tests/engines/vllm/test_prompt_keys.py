"""The keys computed for a prompt are those that vLLM's connector asks for."""

import hashlib
from typing import Any

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

from undercroft.engines.vllm.prompt_keys import Prompt, keys_of
from undercroft.errors import ConfigError

TOKENS = [number * 7 % 1000 for number in range(150)]


def manifest(**more: Any) -> dict[str, Any]:
    return {
        "cache": {"tokens_per_hash": 16, "blocks_per_chunk": 2},
        "groups": [
            {"group_id": 0, "tokens_per_block": 16},
            {"group_id": 3, "tokens_per_block": 32},
        ],
        "hash": {"algorithm": "sha256", "seed": "the engine's default"},
        **more,
    }


def test_keys_are_chained_hashes_with_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk n of a group has the hash of all tokens up to its end, and the group's id."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    init_none_hash(sha256)
    hashes, parent = [], None
    for start in range(0, 144, 16):
        parent = hash_block_tokens(sha256, parent, TOKENS[start : start + 16])
        hashes.append(parent)
    found = keys_of(Prompt(TOKENS), manifest(), {})
    assert found[0] == [hashes[n] + b"\0\0\0\0" for n in (1, 3, 5, 7)]
    assert found[3] == [hashes[n] + b"\0\0\0\3" for n in (3, 7)]


def test_salt_and_adapter_make_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM mixes into the hashes is mixed in here as well."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    found = {
        keys_of(Prompt(TOKENS, salt, adapter), manifest(), {})[0][0]
        for salt, adapter in (
            (None, None),
            ("s", None),
            (None, ("a", "/a")),
            (None, ("a", "/b")),
        )
    }
    assert len(found) == 4


def test_the_seed_must_be_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another PYTHONHASHSEED, or a random one, is told rather than hashed with."""
    seed = f"sha256:{hashlib.sha256(b'42').hexdigest()[:16]}"
    seeded = manifest(hash={"algorithm": "xxhash", "seed": seed})
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    assert keys_of(Prompt(TOKENS), seeded, {"PYTHONHASHSEED": "42"})[0]
    for hashing, environ, words in (
        ({"algorithm": "sha256", "seed": seed}, {}, "engine's value"),
        ({"algorithm": "sha256", "seed": seed}, {"PYTHONHASHSEED": "7"}, "engine's value"),
        ({"algorithm": "sha256", "seed": "the engine's default"}, {"PYTHONHASHSEED": "7"}, "unset"),
        ({"algorithm": "xxhash", "seed": "random per process"}, {}, "random seed"),
        ({"algorithm": "md5", "seed": "the engine's default"}, {}, "no hash algorithm md5"),
    ):
        with pytest.raises(ConfigError, match=words):
            keys_of(Prompt(TOKENS), manifest(hash=hashing), environ)


@pytest.mark.parametrize("harm", [{"cache": {}}, {"groups": [{}]}, {"hash": None}])
def test_a_manifest_of_something_else_is_refused(harm: dict[str, Any]) -> None:
    """No guesses about a namespace that no vLLM engine wrote."""
    with pytest.raises(ConfigError, match="not one of a vLLM engine"):
        keys_of(Prompt(TOKENS), manifest(**harm), {})
