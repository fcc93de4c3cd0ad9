"""Prometheus' text format, read: as much of it as vLLM's `/metrics` uses.

Source: the text-based exposition format, version 0.0.4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["Reading", "Sample", "parse"]

_LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][\w:]*)\s*(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*"
)
_LABEL = re.compile(r'\s*(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One line.

    Args:
        name: With `_total`, `_bucket` and so on.
        labels: All of them.
        value: The number.
    """

    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> Iterator[Sample]:
    """The samples of a page; comments, and lines that are none of this format, are left out."""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        labels = {
            name: _ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[1]), written)
            for name, written in _LABEL.findall(found["labels"] or "")
        }
        yield Sample(found["name"], labels, value)


class Reading:
    """The samples of one page whose names share a prefix, added up over engines.

    Infinity and NaN are left out: they cannot be shown, added up, or written as JSON.

    Args:
        samples: As parsed.
        prefix: Left off the names.
        taken_s: When, on a monotonic clock.
    """

    def __init__(self, samples: Iterable[Sample], prefix: str, taken_s: float) -> None:
        self.taken_s = taken_s
        self._samples = [
            Sample(s.name.removeprefix(prefix), s.labels, s.value)
            for s in samples
            if s.name.startswith(prefix)
            and not s.name.endswith("_created")
            and math.isfinite(s.value)
        ]

    def find(
        self,
        name: str,
        labels: Mapping[str, str] = MappingProxyType({}),
        *,
        combine: Callable[[Iterable[float]], float] = sum,
    ) -> float | None:
        """The value of all samples of that name with these labels; None if there is none.

        Args:
            name: Without the prefix.
            labels: What has to be equal; other labels may be anything.
            combine: How several engines become one number: `sum`, `min`, `max`.
        """
        found = [
            s.value
            for s in self._samples
            if s.name == name and all(s.labels.get(k) == v for k, v in labels.items())
        ]
        return combine(found) if found else None

    def values_of(self, name: str, label: str) -> list[str]:
        """The values that a label of a metric has, in the order of the page."""
        found = (s.labels[label] for s in self._samples if s.name == name and label in s.labels)
        return list(dict.fromkeys(found))

    def grown(
        self,
        name: str,
        before: Reading | None,
        labels: Mapping[str, str] = MappingProxyType({}),
    ) -> float | None:
        """By how much a counter grew since `before`; all of it without one.

        A counter that is smaller than it was has been started anew, with its engine.
        """
        now = self.find(name, labels)
        was = None if before is None else before.find(name, labels)
        if now is None or was is None or now < was:
            return now
        return now - was
