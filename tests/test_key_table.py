import gc
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercroft.key_table import NUM_SHARDS, KeyTable

KEYS = st.binary(min_size=1, max_size=64)


@given(st.lists(st.tuples(st.sampled_from(["set", "pop", "get", "clear"]), KEYS, st.integers(0))))
def test_behaves_as_a_dict(calls: list[tuple[str, bytes, int]]) -> None:
    """Every call gives what a plain dict gives."""
    table = KeyTable()
    model: dict[bytes, int] = {}
    for verb, key, value in calls:
        if verb == "set":
            table.set(key, value)
            model[key] = value
        elif verb == "pop":
            assert table.pop(key) == model.pop(key, -1)
        elif verb == "get":
            assert table.get(key) == model.get(key, -1)
            assert table.get(key, 7) == model.get(key, 7)
        else:
            table.clear()
            model.clear()
        assert (key in table) == (key in model)
        assert len(table) == len(model)
    assert sorted(table.items()) == sorted(model.items())


def test_a_missing_key_has_no_value() -> None:
    """The defaults are those of a lookup that found nothing."""
    table = KeyTable()
    assert table.get(b"x") == table.pop(b"x") == -1
    assert table.get(b"x", 5) == table.pop(b"x", 5) == 5


@pytest.mark.parametrize("suffix", [b"", b"the same end"])
@pytest.mark.parametrize("prefix", [b"", b"the same beginning"])
def test_no_shard_is_crowded(prefix: bytes, suffix: bytes) -> None:
    """Keys that begin or end alike spread as well as random ones: no long rehash."""
    table = KeyTable()
    num_keys = 100 * NUM_SHARDS
    for index in range(num_keys):
        table.set(prefix + index.to_bytes(8, "big") + suffix, index)
    assert max(map(len, table.shards)) < 2 * num_keys / NUM_SHARDS


def test_keys_of_a_shard_differ_in_the_hash_bits_a_dict_uses() -> None:
    """The low ones: were they alike, every lookup would walk a chain of collisions."""
    table = KeyTable()
    for index in range(64 * NUM_SHARDS):
        table.set(index.to_bytes(8, "big"), index)
    largest = max(table.shards, key=len)
    low_bits = {hash(key) & 1023 for key in largest}
    assert len(low_bits) > len(largest) // 2


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="3.14 tracks every dict")
def test_shards_are_invisible_to_the_garbage_collector() -> None:
    """Growing, shrinking and overwriting do not make it track a shard."""
    table = KeyTable()
    for index in range(20_000):
        table.set(index.to_bytes(8, "big"), index)
    for index in range(0, 20_000, 3):
        table.pop(index.to_bytes(8, "big"))
        table.set(index.to_bytes(8, "big"), index + 1)
    gc.collect()
    assert not any(gc.is_tracked(shard) for shard in table.shards)


def test_shard_is_where_the_key_is() -> None:
    """A hot loop that writes to a shard and a caller of the methods see one table."""
    table = KeyTable()
    table.shard(b"key")[b"key"] = 3
    assert table.get(b"key") == 3
    assert table.shard(b"key").get(b"key") == 3
    table.pop(b"key")
    assert b"key" not in table.shard(b"key")


def test_items_are_lazy_and_each_once() -> None:
    """A caller may stop early; whoever goes on gets every pair once."""
    table = KeyTable()
    for index in range(5_000):
        table.set(index.to_bytes(8, "big"), index)
    assert next(table.items())[1] < 5_000
    values = sorted(value for _, value in table.items())
    assert values[0] == 0
    assert all(high - low == 1 for low, high in pairwise(values))
