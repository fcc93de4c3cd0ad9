"""Namespaces: equal exactly when everything that decides a chunk's bytes is equal."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercroft.keys import Namespace, first_difference

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
MANIFESTS = st.dictionaries(st.text(max_size=8), VALUES, max_size=6)


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same value with the keys of every mapping in another order."""
    if isinstance(value, dict):
        items = [(key, shuffled(inner, rng)) for key, inner in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [shuffled(inner, rng) for inner in value] if isinstance(value, list) else value


@given(manifest=MANIFESTS, rng=st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(manifest: dict[str, Any], rng: random.Random) -> None:
    """However a manifest was put together, its text, digest and id are the same."""
    one, other = Namespace(manifest), Namespace(shuffled(manifest, rng))
    assert (one.text, one.digest, one.id) == (other.text, other.digest, other.id)


@given(one=MANIFESTS, other=MANIFESTS)
def test_digests_are_equal_only_for_equal_manifests(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    """Two manifests share a digest if and only if they are the same JSON."""
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (Namespace(one).digest == Namespace(other).digest) == same


@given(manifest=MANIFESTS)
def test_the_text_reads_back(manifest: dict[str, Any]) -> None:
    """The text is JSON that gives the manifest back, so it can be stored and compared."""
    assert json.loads(Namespace(manifest).text) == manifest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "float16"}),
        ({"tp": 1}, {"tp": "1"}),
        ({"tp": 1}, {"tp": True}),
        ({"tp": 1}, {"tp": 1, "pp": None}),
        ({"groups": [[1], [2]]}, {"groups": [[1, 2]]}),
        ({"layers": ["a", "b"]}, {"layers": ["b", "a"]}),
        ({"a": "b,c"}, {"a": ["b", "c"]}),
    ],
)
def test_near_misses_are_different(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Values that print alike, or hold the same words in other places, are other namespaces."""
    assert Namespace(one).digest != Namespace(other).digest


def test_the_digest_is_frozen() -> None:
    """The digest of a manifest never changes: chunks on disk are found by it for years."""
    namespace = Namespace({"model": "m", "groups": [{"tokens_per_block": 16}], "epoch": 0})
    assert namespace.text == '{"epoch":0,"groups":[{"tokens_per_block":16}],"model":"m"}'
    assert namespace.digest == hashlib.sha256(namespace.text.encode()).digest()
    assert namespace.id == "ca06d898b5055dc9780b1cdd613622a4"
    assert len(namespace.digest) == 32


def test_what_json_cannot_say_is_refused() -> None:
    """NaN and objects have no canonical text: better an error than two namespaces that match."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        _ = Namespace({"scale": float("nan")}).text
    with pytest.raises(TypeError):
        _ = Namespace({"model": object()}).text


def test_a_difference_names_the_innermost_field() -> None:
    """Also where one side lacks everything round it; an empty mapping is not an absent one."""
    whole, bare = Namespace({"a": {"b": {"c": 1}}}), Namespace({})
    assert first_difference(whole, bare) == "a.b.c: 1 here, absent there"
    assert first_difference(bare, whole) == "a.b.c: absent here, 1 there"
    assert first_difference(Namespace({"a": {}}), bare) == "a: {} here, absent there"
