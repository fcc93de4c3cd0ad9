"""Runs of equal values in an array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Run", "runs_of"]

Run = tuple[int, int, int]
"""Start, stop, and the value that lies between."""


def runs_of(values: NDArray[np.int32]) -> list[Run]:
    """Each run of equal values, in order; of none, none."""
    if not len(values):
        return []
    cuts = ((values[1:] != values[:-1]).nonzero()[0] + 1).tolist()
    starts = [0, *cuts]
    return [
        (at, stop, values.item(at)) for at, stop in zip(starts, [*cuts, len(values)], strict=True)
    ]
