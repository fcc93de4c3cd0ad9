from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercroft.errors import Bug
from undercroft.policies import path_ends
from undercroft.policies.path_ends import PathEnds

SERIALS = st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=200)


@settings(deadline=None, max_examples=80)
@given(SERIALS, st.sampled_from([4, 8, 512]))
def test_outermost_and_changed_are_those_of_a_sorted_list(
    calls: list[tuple[int, bool]], most: int
) -> None:
    """Whatever comes and leaves in whatever order, however small the blocks are."""
    before = path_ends._MAX_BLOCK, path_ends._LOW
    path_ends._MAX_BLOCK, path_ends._LOW = most, most // 4
    try:
        ends, there = PathEnds(2), list[int]()
        for serial, is_added in calls:
            outermost = ends.outermost(1)
            ends.changed.clear()
            if is_added and serial not in there:
                ends.add(1, serial, serial + 100)
                there = sorted([*there, serial])
            elif not is_added and serial in there:
                ends.remove(1, serial, serial + 100)
                there.remove(serial)
            wanted = (there[0] + 100, there[-1] + 100) if there else None
            assert ends.outermost(1) == wanted
            assert ends.num(1) == len(there)
            assert ends.outermost(0) is None
            if outermost != wanted:
                assert ends.changed == {1}
    finally:
        path_ends._MAX_BLOCK, path_ends._LOW = before


def test_blocks_do_not_dwindle() -> None:
    """Of many, most leave: what is left does not keep their room."""
    ends = PathEnds(1)
    for serial in range(20_000):
        ends.add(0, serial, serial)
    for serial in range(20_000):
        if serial % 50:
            ends.remove(0, serial, serial)
    assert ends.num(0) == 400
    assert len(ends._classes[0].blocks) <= 8


@pytest.mark.parametrize(("serial", "path_id"), [(1, 8), (2, 7), (0, 7)])
def test_what_is_no_candidate_cannot_leave(serial: int, path_id: int) -> None:
    """The books are wrong then."""
    ends = PathEnds(1)
    ends.add(0, 1, 7)
    with pytest.raises(Bug, match=f"path {path_id}, used by request {serial}"):
        ends.remove(0, serial, path_id)
