"""Replicas of many topologies: what one stores, another loads, or they never meet."""

from typing import Any

import numpy as np
import pytest
from replicas import Layers, Replica, Sizes

from undercroft.keys import first_difference

MODELS = {
    "eight heads": (Layers(4, 8, 8),),
    "two heads": (Layers(3, 2, 8),),
    "three heads": (Layers(2, 3, 8),),
    "latent": (Layers(3, 0, 24),),
    "windows too": (Layers(2, 8, 8), Layers(3, 8, 16, window=16), Layers(2, 8, 8, window=32)),
}


def _topologies(model: str) -> list[Sizes]:
    num_heads = max(1, MODELS[model][0].num_heads)
    found = []
    for tp in (1, 2, 4, 8):
        for pp in (1, 2):
            for pcp, dcp in ((1, 1), (1, 2), (2, 1), (2, 2)):
                copies = max(1, tp // num_heads)
                is_served = num_heads % tp == 0 or tp % num_heads == 0
                if (pp * pcp * dcp > 1 and tp > 4) or (pp * pcp * dcp > 2 and tp > 2):
                    continue  # nothing new in 16 ranks
                if copies % dcp == 0 and tp % dcp == 0 and (is_served or pcp * dcp == 1):
                    found.append(Sizes(tp, pp, pcp, dcp, interleave=2 if dcp > 1 else 1))
    return found


def _block_ids(count: int, seed: int) -> list[int]:
    return (np.random.default_rng(seed).permutation(23)[:count] + 1).tolist()


def _whole_chunk(whole: Any, index: int, blocks: list[int | None]) -> bytes:
    """The chunk as one rank would have it: layer by layer, block by block; zeros for none."""
    return b"".join(
        bytes(layer[0].nbytes) if block is None else layer[block].tobytes()
        for layer in whole[index]
        for block in blocks
    )


def _ranks_chunk(replica: Replica, whole: Any, index: int, blocks: list[int | None]) -> bytes:
    """The chunk as all ranks' bytes side by side."""
    parts = []
    for rank in range(replica.sizes.world):
        pages = [b and replica.expected(rank, whole, index, b) for b in blocks]
        sizes = [len(page) for page in replica.expected(rank, whole, index, 1)]
        parts += [
            page[n] if page else bytes(size) for n, size in enumerate(sizes) for page in pages
        ]
    return b"".join(parts)


def _round_trip(replica: Replica, seed: int) -> dict[tuple[int, int], bytes]:
    """Store and load under one topology; the stored chunks."""
    bpc, stored = replica.bpc, {}
    for index in range(len(replica.groups)):
        whole = replica.fill(seed)
        replica.region[...] = 0xAA
        position = min(1, bpc - 1)
        blocks = _block_ids(3 * bpc - position, seed + index)
        slots = [5, 2, 9]
        copied = replica.store(index, blocks, bpc + position, slots)
        filled = [None] * position + blocks
        for number, slot in enumerate(slots):
            mine = filled[number * bpc : (number + 1) * bpc]
            expected = (
                _ranks_chunk(replica, whole, index, mine)
                if replica.stored == "direct"
                else _whole_chunk(whole, index, mine)
            )
            assert replica.chunk(index, slot).tobytes() == expected
            stored[index, number] = expected
            after = replica.region[slot * replica.slot_bytes :][: replica.slot_bytes]
            assert set(after[replica.payload[index] :].tolist()) <= {0xAA}
        # Each byte was written once, by whoever's turn it was.
        assert sum(copied) == len(blocks) * replica.payload[index] // bpc
        _load_and_check(replica, whole, index, filled, bpc, slots)
    return stored


def _load_and_check(
    replica: Replica, whole: Any, index: int, filled: list[Any], bpc: int, slots: list[int]
) -> None:
    """Load into other blocks, the first and the last chunk in part; nothing else changes."""
    before = replica.fill(999)
    first = max(1, bpc // 2) if bpc > 1 else 0
    count = len(filled) - first - max(0, bpc - 2)
    targets = [b + 1 if b + 1 < 24 else 1 for b in _block_ids(count, 77)]
    replica.load(index, targets, bpc + first, slots)
    for rank in range(replica.sizes.world):
        for block in range(24):
            now = replica.got(rank, index, block)
            if block in targets:
                source = filled[first + targets.index(block)]
                assert now == replica.expected(rank, whole, index, source)
            else:
                assert now == replica.expected(rank, before, index, block)


@pytest.mark.parametrize("asked", [False, True], ids=["as it is", "canonical"])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_portable_is_the_unsharded_bytes_and_the_rest_never_meets(
    model: str, asked: bool
) -> None:
    """Over all topologies: equal namespaces hold equal chunks, and each loads the other's."""
    groups, bpc = MODELS[model], 1 + len(model) % 4
    seen: list[tuple[Sizes, Any, Any, str]] = []
    for sizes in _topologies(model):
        with Replica(groups, sizes, bpc=bpc, canonical_layout=asked) as replica:
            stored = _round_trip(replica, 5)
            for other, namespace, chunks, how in seen:
                if namespace == replica.namespace:
                    assert (how, chunks) == (replica.stored, stored), (sizes, other)
                    assert how != "direct"
                else:
                    assert first_difference(namespace, replica.namespace)
            # What another topology stored (here: the bytes it left) loads here.
            for other, namespace, chunks, _how in seen:
                if namespace == replica.namespace and other != sizes:
                    whole = replica.fill(5)
                    for index in range(len(groups)):
                        data = chunks[index, 2]
                        replica.chunk(index, 3)[...] = np.frombuffer(data, np.uint8)
                        position = min(1, bpc - 1)
                        source = _block_ids(3 * bpc - position, 5 + index)[-bpc:]
                        replica.fill(6)
                        replica.load(index, list(range(1, bpc + 1)), 0, [3])
                        for rank in range(sizes.world):
                            for at, block in enumerate(source):
                                assert replica.got(rank, index, at + 1) == replica.expected(
                                    rank, whole, index, block
                                )
            seen.append((sizes, replica.namespace, stored, replica.stored))
    _check_kinds(model, asked, {sizes: how for sizes, _, _, how in seen}, seen)


def _check_kinds(model: str, asked: bool, kinds: dict[Sizes, str], seen: list[Any]) -> None:
    """Which topologies share is known beforehand: nothing is bound that need not be."""
    heads = MODELS[model][0].num_heads
    for sizes, how in kinds.items():
        is_sharded = heads and heads % sizes.tp == 0
        no_cp = sizes.pcp * sizes.dcp == 1
        if sizes.pp > 1:
            whole = sizes.tp * sizes.pcp == 1 and len(MODELS[model]) == 1 and heads
            expected = "canonical" if whole and (not asked or is_sharded) else "direct"
        elif not no_cp:
            expected = "direct"
        elif asked:
            is_certified = not heads or heads % sizes.tp == 0 or sizes.tp % heads == 0
            expected = "canonical" if is_certified else "direct"
        elif not heads:
            expected = "replicated" if sizes.tp > 1 else "direct"
        else:
            expected = "canonical" if is_sharded and len(MODELS[model]) == 1 else "direct"
        assert how == expected, (model, asked, sizes)
    for kind in ("canonical", "replicated"):
        assert len({namespace.id for _, namespace, _, how in seen if how == kind}) <= 1


def test_ranks_with_equal_bytes_take_turns() -> None:
    """Of many chunks each rank of four writes its share, and no byte twice."""
    with Replica(MODELS["latent"], Sizes(tp=4)) as replica:
        replica.fill(1)
        copied = np.array([0] * 4)
        for _ in range(4):
            copied += replica.store(0, list(range(1, 9)), 0, list(range(8)))
        assert replica.stored == "replicated"
        assert copied.tolist() == [8 * replica.payload[0]] * 4
        loaded = replica.load(0, list(range(1, 9)), 0, list(range(8)))
        assert loaded == [8 * replica.payload[0]] * 4
