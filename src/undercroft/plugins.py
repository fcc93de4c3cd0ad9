"""Find plug-ins by kind and name, ours and a stranger's alike, through entry points.

Kinds and their entry-point groups: `tiers` -> `undercroft.tiers`, `policies` ->
`undercroft.policies`, `admission` -> `undercroft.admission`, `traces`, `engines`.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from undercroft.errors import UnknownPlugin

__all__ = ["find", "names"]


def names(kind: str) -> tuple[str, ...]:
    """Names of the installed plug-ins of `kind`, sorted."""
    return tuple(sorted({point.name for point in entry_points(group=f"undercroft.{kind}")}))


def find(kind: str, name: str) -> Any:  # noqa: ANN401 - the kind decides what it is
    """The object that plug-in `name` of `kind` names: a class or factory.

    Raises:
        UnknownPlugin: None of that name is installed; the message lists those that are.
    """
    for point in entry_points(group=f"undercroft.{kind}", name=name):
        return point.load()
    known = names(kind)
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownPlugin(
        f"no {kind} plug-in is called {name!r}: {hint}installed are {', '.join(known) or 'none'}"
    )
