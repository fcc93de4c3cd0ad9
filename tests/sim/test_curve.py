"""Golden counts: what policies get on traces that are made anew each time, alike."""

import pytest
from paths import chats

from undercroft.sim import hit_curve

CAPACITIES = [20, 60, 200, 600, 2000]


@pytest.mark.parametrize(
    ("policy", "hits"),
    [
        ("lru", [2149, 5079, 9406, 12096, 12593]),
        ("arc", [3157, 6258, 9679, 12007, 12477]),
        ("belady", [5137, 8743, 11941, 12593, 12593]),
        ("unbounded", [12593] * 5),
    ],
)
def test_golden_hits(policy, hits):
    """Hits of 1,000 requests at five capacities: what changes them changes what is measured."""
    found = [row.hit_blocks for row in hit_curve(chats(1000, 7), policy, CAPACITIES)]
    assert found == hits
