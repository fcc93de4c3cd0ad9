"""The error tree: what an engine adapter may rely on."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from undercroft import errors
from undercroft.errors import Bug, ConfigError, KvError, TierError, TierTimeout, TierUnavailable

CLASSES = [getattr(errors, name) for name in errors.__all__]


def test_one_except_catches_everything_but_bugs() -> None:
    """Every error is a `KvError` but `Bug`, which no handler of `KvError` may hide."""
    assert [c for c in CLASSES if not issubclass(c, KvError)] == [Bug]
    assert issubclass(Bug, AssertionError)


def test_only_what_may_pass_by_itself_is_retryable() -> None:
    """A retry is worth it for a medium that vanished or was slow, and for nothing else."""
    retryable = {c for c in CLASSES if issubclass(c, KvError) and c.retryable}
    assert retryable == {TierUnavailable, TierTimeout}


def test_configuration_errors_are_value_errors() -> None:
    """Code that knows nothing of us can catch a bad setting as `ValueError`; no other error is."""
    value_errors = {c for c in CLASSES if issubclass(c, ValueError)}
    assert value_errors == {c for c in CLASSES if issubclass(c, ConfigError)}


@pytest.mark.parametrize("cls", [c for c in CLASSES if issubclass(c, KvError)])
def test_errors_carry_message_tier_and_key(cls: type[KvError]) -> None:
    """The message is what `str` says; tier and key are there, and absent when not given."""
    full = cls("what, where, what to do", tier="disk", key=b"k")
    assert (str(full), full.tier, full.key) == ("what, where, what to do", "disk", b"k")
    assert (cls("m").tier, cls("m").key) == (None, None)


@pytest.mark.parametrize("cls", [c for c in CLASSES if issubclass(c, KvError)])
def test_errors_cross_process_boundaries(cls: type[KvError]) -> None:
    """Pickled and unpickled, an error keeps its type, message, tier and key."""
    back = pickle.loads(pickle.dumps(cls("m", tier="disk", key=b"k")))
    assert (type(back), str(back), back.tier, back.key) == (cls, "m", "disk", b"k")


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """The module's docstring names every class, once, under its base."""
    lines = re.findall(r"^    ([│├└ ]*)(\w+)", inspect.getdoc(errors) or "", re.MULTILINE)
    drawn = [(len(indent) // 2, name) for indent, name in lines]
    assert sorted(name for _, name in drawn) == sorted(errors.__all__)
    parents: list[str] = []
    for depth, name in drawn:
        del parents[depth:]
        if depth:
            assert parents[-1] in [base.__name__ for base in getattr(errors, name).__bases__]
        parents.append(name)


def test_tier_errors_are_told_from_corruption() -> None:
    """A corrupt chunk says nothing about the health of the tier: it is no `TierError`."""
    assert not issubclass(errors.CorruptChunk, TierError)
    assert not issubclass(errors.FormatTooNew, TierError)
