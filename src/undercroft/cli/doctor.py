"""`undercroft doctor`: what would go wrong, in seconds, before a model is loaded."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from undercroft.cli.check_disk import check_disk
from undercroft.cli.check_engine import check_engine, check_model, check_names, look_at
from undercroft.cli.findings import Finding, Severity, error, fine, note, show, warning, worst
from undercroft.cli.flags import Asked, add_settings_flags, asked_for
from undercroft.cli.output import Exit, Output, Subparsers, add_command, output_for
from undercroft.clock import SystemClock
from undercroft.engines.assemble import check_plugins
from undercroft.errors import ConfigError
from undercroft.hierarchy.rendezvous import sweep_dead_regions
from undercroft.settings import (
    Settings,
    TierSettings,
    check_host_bytes,
    format_bytes,
    host_limits,
)
from undercroft.settings.schema import FAULTY

__all__ = ["add_parser", "examine", "run"]

_SHM = Path("/dev/shm")  # noqa: S108 - where host memory is shared
_LOG = logging.getLogger("undercroft")

_DESCRIPTION = """\
Looks at everything that a start would need, in seconds and without loading a model: vLLM, its
platform and the options you give it; shared memory and the memory limits above it; the disk, by
writing chunks and reading them back; what chunks are filed under; how much fits.

Give it what you would give to `undercroft serve`, or the --kv-transfer-config you have. Without
anything, it looks at vLLM and the machine. Exit code 1: something will not work; 2: the settings
themselves are wrong."""


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    parser = add_command(
        subparsers,
        "doctor",
        "find out what would go wrong, before a model is loaded",
        description=_DESCRIPTION,
        takes_rest=True,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as given to vLLM")
    add_settings_flags(parser)


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    output = output_for(args)
    findings = examine(asked_for(args), output)
    output.data({"worst": worst(findings).word, "findings": [f.as_json() for f in findings]})
    show(output, findings)
    if any(f.check == "settings" and f.severity is Severity.ERROR for f in findings):
        return Exit.USAGE
    return Exit.PROBLEM if worst(findings) is Severity.ERROR else Exit.FINE


def examine(asked: Asked, output: Output, *, stop_early: bool = False) -> list[Finding]:
    """Look at everything. Nothing is changed; what dead engines left in /dev/shm is removed.

    Args:
        asked: What would be started.
        output: For progress.
        stop_early: Do not look at vLLM, which takes seconds, once there is an error.
    """
    settings, findings = _settings(asked)
    with output.progress("looking at disks"), _quiet():
        for tier in settings.tiers if settings is not None else ():
            findings.extend(_tier(tier))
    findings.extend(_memory(settings))
    if stop_early and worst(findings) is Severity.ERROR:
        return findings
    # After the disks, whose speed it would spoil. With wrong settings vLLM's own options are looked
    # at alone, so that one error is told once.
    with output.progress("looking at vLLM, which takes some seconds"):
        words = asked.vllm_words(with_transfer=settings is not None) if asked.model else []
        seen = look_at(words)
    findings.extend(check_engine(seen))
    if settings is not None and (num_replicas := int(seen.get("replicas", 1))) > 1:
        findings.extend(_memory(settings, num_replicas))
    if asked.model is not None:
        findings.extend(check_model(asked, settings, seen))
    findings.extend(check_names(asked, settings, seen))
    return findings


def _settings(asked: Asked) -> tuple[Settings | None, list[Finding]]:
    if asked.model is None and not asked.extra:
        try:
            asked.settings()
        except ConfigError:
            said = "none are given: say --host 32GiB --disk /nvme/kv:1TiB to have them looked at"
            return None, [note("settings", said)]
    try:
        settings = asked.settings()
        check_plugins(settings)
    except ConfigError as exc:
        return None, [error("settings", exc)]
    tiers = "".join(
        f", {t.name} {format_bytes(t.capacity_bytes) if t.capacity_bytes else 'without a capacity'}"
        for t in settings.tiers
    )
    found = [fine("settings", f"host {format_bytes(settings.host_bytes)}{tiers}")]
    found += [note("settings", line) for line in settings.notes]
    return settings, found


def _tier(tier: TierSettings) -> Iterator[Finding]:
    if tier.faults is not None:
        said = f"tier {tier.name} will go wrong on purpose, as {tier.faults} says (type {FAULTY})"
        yield warning("tiers", f"{said}: never run it so for users")
    if tier.type == "disk":
        yield from check_disk(tier, SystemClock())
    elif tier.type != "memory":
        yield note("tiers", f"tier {tier.name} is of an installed type, {tier.type}: not tried")


def _memory(settings: Settings | None, num_replicas: int = 1) -> Iterator[Finding]:
    # As an engine does at its start: what a killed one left would count as used.
    sweep_dead_regions(_SHM, keep=Path())
    limits = host_limits()
    bound = limits.tightest
    if bound is None:
        yield note("memory", "nothing here says how much memory can be had")
        return
    facts = {
        "available_bytes": bound.available_bytes,
        "bounded_by": bound.source,
        "bounds": {b.source: b.available_bytes for b in limits.bounds},
    }
    can = (
        f"{format_bytes(bound.available_bytes)} can be had, bounded by {bound.source} "
        f"({bound.detail})"
    )
    if settings is None:
        yield note("memory", can, **facts)
        return
    try:
        check_host_bytes(settings.host_bytes * num_replicas, limits)
    except ConfigError as exc:
        each = f"{num_replicas} replicas of {format_bytes(settings.host_bytes)} each: "
        yield error("memory", f"{each if num_replicas > 1 else ''}{exc}", **facts)
        return
    yield fine("memory", can, **facts)


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines of ours meanwhile: what they say is found and told here."""
    before = _LOG.level
    _LOG.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _LOG.setLevel(before)
