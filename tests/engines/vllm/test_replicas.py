"""Replicas of many topologies: what one stores, another loads, or they never meet."""

from typing import Any

import numpy as np
import pytest
from replicas import Layers, Replica, Sizes, block_ids, round_trip

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
            stored = round_trip(replica, 5)
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
                        source = block_ids(3 * bpc - position, 5 + index)[-bpc:]
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
        if sizes.pcp * sizes.dcp > 1:
            expected = "direct"
        elif asked:
            # Which ranks of a stage hold one head alike, none of them can see.
            is_shared = heads and sizes.pp == 1 and sizes.tp % heads == 0
            expected = "canonical" if not heads or is_sharded or is_shared else "direct"
        elif not heads:
            expected = "replicated" if sizes.tp > 1 and sizes.pp == 1 else "direct"
        else:
            expected = "canonical" if is_sharded and len(MODELS[model]) == 1 else "direct"
        assert how == expected, (model, asked, sizes)
    for kind in ("canonical", "replicated"):
        assert len({namespace.id for _, namespace, _, how in seen if how == kind}) <= 1


def test_stages_whose_tensors_nobody_shows_are_stored_rank_by_rank() -> None:
    """As with stock's connector: several ranks a stage are bound, single ones are whole."""
    for sizes, how in ((Sizes(tp=2, pp=2), "direct"), (Sizes(pp=2), "canonical")):
        with Replica(MODELS["eight heads"], sizes, sees_tensors=False) as replica:
            round_trip(replica, 5)
            assert replica.stored == how


class Uneven(Replica):
    """Three layers in the first of two stages, one in the second."""

    def stage_layers(self, rank: int, group: Any) -> range:
        return range(3) if rank < self.sizes.tp else range(3, group.num_layers)


def test_stages_of_other_layers_are_kept_apart_where_their_bytes_are() -> None:
    """Each rank's by itself: never found by others. As one rank would have them: the same."""
    sizes, found = Sizes(tp=2, pp=2), {}
    for kind in (Replica, Uneven):
        for sees in (False, True):
            with kind(MODELS["eight heads"], sizes, sees_tensors=sees) as replica:
                found[kind, sees] = (replica.namespace, round_trip(replica, 5))
    assert found[Replica, True] == found[Uneven, True]
    even, uneven = found[Replica, False], found[Uneven, False]
    assert even[1] != uneven[1]
    difference = first_difference(even[0], uneven[0])
    assert difference == "topology.stages[0].0[2]: absent here, 'g0.layer2' there"


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
