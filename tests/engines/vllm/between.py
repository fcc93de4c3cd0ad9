"""Stand between a hierarchy and its tiers: chunks go a test's way, whether alone or in a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from undercroft.engines import assemble
from undercroft.keys import ChunkKey
from undercroft.testing.chunkwise import Chunkwise

Go = Callable[[], bool]
Choose = Callable[[str, ChunkKey], Callable[[Go], bool] | None]


def stand_between(monkeypatch: pytest.MonkeyPatch, choose: Choose) -> list[Chunkwise]:
    """Tiers that are opened from now on, wrapped before anybody keeps a verb of theirs.

    `choose` is told of the verb and the key, and says what is done instead, which is told how to go
    on; None: the chunk goes on.
    """
    opened: list[Chunkwise] = []
    really = assemble._open_tier

    def wrapped(*args: Any) -> Chunkwise:
        tier: Any = None

        def chosen(verb: str, key: ChunkKey) -> Any:
            act = choose(verb, key)
            if act is None:
                return None
            return lambda data, epoch: act(lambda: tier.straight(verb, key, data, epoch))

        tier = Chunkwise(really(*args), chosen)
        opened.append(tier)
        return tier

    monkeypatch.setattr(assemble, "_open_tier", wrapped)
    return opened


@contextmanager
def between(choose: Choose) -> Iterator[list[Chunkwise]]:
    """As `stand_between`, for as long."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield stand_between(monkeypatch, choose)
