"""`undercroft explain`: why a prompt, or one chunk, was missed."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from undercroft.cli.output import Exit, Output, Subparsers, add_command, output_for
from undercroft.cli.store import (
    add_path,
    catalog_of,
    find_chunks,
    find_namespace,
    has_prefix,
    say,
    short_id,
    when_text,
    words,
)
from undercroft.errors import ConfigError, KvError, TierUnavailable
from undercroft.identity import weights_fingerprint
from undercroft.keys import ChunkKey, Namespace, first_difference
from undercroft.tiers.disk.fate import Fate, FateKind, Fates
from undercroft.tiers.disk.history import Incident
from undercroft.tiers.disk.stored import Store, StoredNamespace

__all__ = ["add_parser", "run"]

_MAX_GENERAL = 5
_REASONS = {
    "capacity": "to make room for other chunks",
    "not_admitted": "the level's admission did not want it",
    "queue_full": "too many chunks waited to be written",
    "evicted_before_its_turn": "host memory needed the room before the disk took it",
    "write_budget": "the day's write_budget was spent",
    "backpressure": "it is larger than all that may wait to be written",
    "unavailable": "the level failed, or was left alone after failures",
    "full": "the level was full",
    "before_reset": "its request was under way when the cache was reset",
    "copy_failed": "it could not be copied out of the engine",
    "corrupt": "its checksum, length or key was not what was stored",
    "vanished": "the index had it, the medium did not",
    "timeout": "the medium did not answer in time",
    "closed": "the level was closed meanwhile",
    "formattoonew": "stored by a later version",
    "deadline": "it did not come up in time",
    "not_restored": "it did not fit into host memory for that request",
    "read_failed": "it could not be read",
    "evicted_again": "it came up, and was evicted before it was used",
    "too_slow": "computing it was predicted to be quicker than reading it",
    "given_up": "its segment made room for another key space, chunk size or capacity",
    "load_failed": "it could not be copied into the engine",
}


@dataclass(frozen=True, slots=True)
class _Asked:
    """The prompt, as far as it decides keys; and the model that is meant."""

    tokens: Sequence[int]
    model: str | None
    cache_salt: str | None
    adapter: tuple[str, str] | None


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    parser = add_command(
        subparsers,
        "explain",
        "say why a prompt, or a chunk, was not found on disk",
        description="Says which chunks of a prompt a store has, and of the others what became of "
        "them: evicted, refused, dropped, void, stored under another namespace and in which "
        "field that differs, or never seen. Prompts need vLLM to be installed.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--key", metavar="KEY", help="a chunk's key in hex")
    what.add_argument("--prompt", metavar="FILE", help="the prompt's text; needs --model")
    what.add_argument("--tokens", metavar="FILE", help="token ids: JSON, or separated by spaces")
    parser.add_argument("--model", metavar="MODEL", help="the model, as the engine names it")
    parser.add_argument(
        "--namespace",
        metavar="DIGITS",
        help="the engine's key space, as it logs it at start; the first digits",
    )
    parser.add_argument("--cache-salt", metavar="TEXT", help="as sent with the request")
    parser.add_argument("--lora", metavar="NAME=PATH", help="the request's LoRA adapter")
    add_path(parser)


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    asked = None if args.key else _asked(args)
    catalog, output = catalog_of(args), output_for(args)
    store = catalog.look()
    fates = Fates(catalog, store)
    if asked is None:
        with output.progress("reading the indexes"):
            matches = find_chunks(catalog, store, args.key, args.namespace)
        key = matches[0][1].key if matches else _whole_key(args.key)
        return _explain_key(output, store, fates, key, args)
    return _explain_prompt(output, store, fates, asked, args)


def _whole_key(text: str) -> bytes:
    if not has_prefix(text) or len(text) % 2:
        raise ConfigError(f"{text!r} is not a key: an even number of hex digits")
    return bytes.fromhex(text)


def _asked(args: argparse.Namespace) -> _Asked:
    adapter = None
    if args.lora:
        name, equals, path = args.lora.partition("=")
        if not equals:
            raise ConfigError(f"--lora is {args.lora!r}, but must be NAME=PATH")
        adapter = (name, path)
    try:
        text = Path(args.prompt or args.tokens).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompt cannot be read: {error}") from error
    if args.tokens:
        return _Asked(_numbers(text), args.model, args.cache_salt, adapter)
    if not args.model:
        raise ConfigError("a text needs --model, for its tokenizer; or give --tokens")
    _need_vllm()
    from undercroft.engines.vllm.prompt_keys import tokens_of  # noqa: PLC0415 - loads vLLM

    return _Asked(tokens_of(args.model, text), args.model, args.cache_salt, adapter)


def _numbers(text: str) -> list[int]:
    try:
        found = json.loads(text) if "[" in text else re.split(r"[\s,]+", text.strip())
        if isinstance(found, dict):
            found = found["prompt_token_ids"]
        return [int(number) for number in found]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"--tokens must be token ids, JSON or separated by spaces: {error}"
        ) from error


def _need_vllm() -> None:
    if find_spec("vllm") is None:
        raise TierUnavailable(
            "the keys of a prompt are computed by vLLM, which is not installed here: "
            "pip install 'undercroft[vllm]', or ask about a --key"
        )
    # It logs as it is imported, to where our answer goes.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


# --- which namespace ------------------------------------------------------------------------------


def _is_of(namespace: StoredNamespace, model: str | None) -> bool:
    if model is None:
        return True
    return Path(namespace.model_name).name == Path(model).name


def _choose(output: Output, store: Store, args: argparse.Namespace) -> StoredNamespace | None:
    """The namespace the engine in question uses: as named, else in use, else the latest used."""
    if args.namespace:
        return find_namespace(store, args.namespace)
    found = [n for n in store.namespaces if _is_of(n, args.model)]
    if not found:
        models = words(sorted({n.model_name or "?" for n in store.namespaces}), "none")
        say(
            output,
            f"no engine of {args.model or 'any model'} has opened this store; there are: {models}. "
            "An engine makes its key space when it starts, before it stores anything: start it "
            "with this path, and ask again while it runs. If it does run, it did not get at the "
            "disk: see its log, or `undercroft doctor` with the engine's options",
        )
        return None
    chosen = max(found, key=lambda n: (n.is_in_use, n.modified_s))
    if len(found) > 1:
        why = "in use" if chosen.is_in_use else "last stored to"
        say(
            output,
            f"{len(found)} namespaces could be meant; taken is the one {why}. The engine logs its "
            "own at start as `key space`: name it with --namespace",
        )
    return chosen


def _differs(here: StoredNamespace | None, there: StoredNamespace, model: str | None) -> str:
    """The first field; where there is nothing to compare with, what is known of the weights."""
    if here is None:
        return _weights_differ(there, model)
    if here.manifest is None or there.manifest is None:
        return "a manifest cannot be read"
    found = first_difference(Namespace(here.manifest), Namespace(there.manifest))
    return found or "nothing"


def _weights_differ(there: StoredNamespace, model: str | None) -> str:
    stored = (there.manifest or {}).get("model")
    if model is None or not isinstance(stored, Mapping):
        return "what is not known"
    found = weights_fingerprint(model, environ=os.environ)
    if stored.get("weights") == {"kind": found.kind, "value": found.value}:
        return f"the model's name at most: {there.model_name} has the same weights"
    return f"model.name, model.weights: {model} here, {there.model_name} there"


# --- one key --------------------------------------------------------------------------------------


def _explain_key(
    output: Output, store: Store, fates: Fates, key: bytes, args: argparse.Namespace
) -> int:
    chosen = _choose(output, store, args)
    fate = None
    if chosen is not None:
        fate = fates.of(chosen, key)
        _head(output, chosen)
        say(output, f"chunk {key.hex()}: {_text(fate, fates, chosen)}")
    others = [
        (n.namespace_id, _differs(chosen, n, args.model))
        for n in store.namespaces
        if n is not chosen and fates.has(n, key)
    ]
    for other, differs in others:
        say(output, f"it is stored in namespace {short_id(other)}, which differs in {differs}")
    elsewhere = [{"namespace": other, "differs": differs} for other, differs in others]
    if chosen is None or fate is None:
        output.data({"key": key.hex(), "namespace": None, "elsewhere": elsewhere})
        return Exit.PROBLEM
    _general(output, fates, chosen)
    output.data(
        {
            "key": key.hex(),
            "namespace": chosen.namespace_id,
            **_fate_document(fate),
            "elsewhere": elsewhere,
            **_general_document(fates, chosen),
        }
    )
    return Exit.FINE if fate.kind is FateKind.STORED else Exit.PROBLEM


# --- a prompt -------------------------------------------------------------------------------------


def _explain_prompt(
    output: Output, store: Store, fates: Fates, asked: _Asked, args: argparse.Namespace
) -> int:
    chosen = _choose(output, store, args)
    if chosen is None:
        elsewhere = _elsewhere(output, store, fates, asked, None)
        output.data({"tokens": len(asked.tokens), "namespace": None, "elsewhere": elsewhere})
        return Exit.PROBLEM
    keys = _keys(asked, chosen)
    _head(output, chosen)
    say(output, f"the prompt has {len(asked.tokens)} tokens")
    groups = [
        _explain_group(output, fates, chosen, group, found) for group, found in sorted(keys.items())
    ]
    is_whole = all(group["missed_chunks"] == 0 for group in groups)
    elsewhere = [] if is_whole else _elsewhere(output, store, fates, asked, chosen)
    _general(output, fates, chosen)
    output.data(
        {
            "tokens": len(asked.tokens),
            "namespace": chosen.namespace_id,
            "model": chosen.model_name,
            "in_use": chosen.is_in_use,
            "groups": groups,
            "elsewhere": elsewhere,
            **_general_document(fates, chosen),
        }
    )
    return Exit.FINE if is_whole else Exit.PROBLEM


def _keys(asked: _Asked, namespace: StoredNamespace) -> Mapping[int, Sequence[ChunkKey]]:
    if namespace.manifest is None:
        raise ConfigError(f"namespace {short_id(namespace.namespace_id)}: {namespace.problem}")
    _need_vllm()
    from undercroft.engines.vllm.prompt_keys import Prompt, keys_of  # noqa: PLC0415 - loads vLLM

    prompt = Prompt(asked.tokens, asked.cache_salt, asked.adapter)
    return keys_of(prompt, namespace.manifest, os.environ)


def _tokens_per_chunk(namespace: StoredNamespace, group_id: int) -> int:
    manifest = namespace.manifest or {}
    group = next(g for g in manifest["groups"] if int(g["group_id"]) == group_id)
    return int(group["tokens_per_block"]) * int(manifest["cache"]["blocks_per_chunk"])


def _explain_group(
    output: Output,
    fates: Fates,
    namespace: StoredNamespace,
    group_id: int,
    keys: Sequence[ChunkKey],
) -> dict[str, object]:
    step = _tokens_per_chunk(namespace, group_id)
    found: list[tuple[int, Fate]] = []
    with output.progress("reading chunks", len(keys)) as progress:
        for index, key in enumerate(keys):
            found.append((index, fates.of(namespace, key)))
            progress.step()
    say(output, f"group {group_id}: {len(keys)} chunks of {step} tokens")
    for text, run_of in groupby(found, key=lambda one: _text(one[1], fates, namespace)):
        indexes = [index for index, _ in run_of]
        first, last = indexes[0], indexes[-1]
        name = f"chunk {first}" if first == last else f"chunks {first} to {last}"
        say(output, f"  {name} (tokens {first * step} to {(last + 1) * step - 1}): {text}")
    missed = [(index, fate) for index, fate in found if fate.kind is not FateKind.STORED]
    prefix = missed[0][0] if missed else len(keys)
    if missed:
        say(
            output,
            f"  a prefix of {prefix * step} tokens is there; the first miss is chunk {prefix}, "
            f"{missed[0][1].key.hex()}",
        )
    return {
        "group": group_id,
        "tokens_per_chunk": step,
        "prefix_tokens": prefix * step,
        "missed_chunks": len(missed),
        "chunks": [_fate_document(fate) for _, fate in found],
    }


def _elsewhere(
    output: Output, store: Store, fates: Fates, asked: _Asked, chosen: StoredNamespace | None
) -> list[dict[str, object]]:
    """Other namespaces that have chunks of this prompt, under keys of their own."""
    documents: list[dict[str, object]] = []
    for other in store.namespaces:
        if other is chosen:
            continue
        try:
            keys = [key for group in _keys(asked, other).values() for key in group]
        except KvError:
            continue
        num = sum(fates.has(other, key) for key in keys)
        if num:
            differs = _differs(chosen, other, asked.model)
            say(
                output,
                f"namespace {short_id(other.namespace_id)} has {num} of its {len(keys)} chunks of "
                f"this prompt, and differs in {differs}",
            )
            documents.append(
                {
                    "namespace": other.namespace_id,
                    "chunks": num,
                    "of": len(keys),
                    "differs": differs,
                }
            )
    return documents


# --- words ----------------------------------------------------------------------------------------


def _head(output: Output, namespace: StoredNamespace) -> None:
    use = "in use" if namespace.is_in_use else "not in use"
    say(
        output,
        f"namespace {short_id(namespace.namespace_id)}, {namespace.model_name or '?'}, "
        f"{namespace.dtype or '?'}, {use}",
    )
    if namespace.problem:
        say(output, namespace.problem)


def _text(fate: Fate, fates: Fates, namespace: StoredNamespace) -> str:
    late = ""
    if fate.missed:
        reason = _REASONS.get(fate.missed.reason, fate.missed.reason)
        where = fate.missed.level
        late = f"; missed at {where} {when_text(fate.missed.unix_s)}: {reason}"
    if fate.incident:
        reason = _REASONS.get(fate.incident.reason, fate.incident.reason)
        where = fate.incident.level
        return f"{fate.kind.value} at {where} {when_text(fate.incident.unix_s)}: {reason}{late}"
    if fate.kind is FateKind.NO_TRACE:
        since = fates.since_s(namespace)
        known = f"lost more than {when_text(since)}" if since else "lost, for there is no history"
        return f"no trace: never stored here, or {known}, or removed while no engine ran{late}"
    return f"{fate.kind.value}{': ' if fate.detail else ''}{fate.detail}{late}"


def _general(output: Output, fates: Fates, namespace: StoredNamespace) -> None:
    general = [i for i in fates.general(namespace) if i.event != "opened"]
    for incident in general[-_MAX_GENERAL:]:
        say(output, f"{when_text(incident.unix_s)}: {_general_text(incident)}")


def _general_text(incident: Incident) -> str:
    if incident.event == "reset":
        return "the cache was reset"
    if incident.event == "up":
        return f"{incident.level} worked again"
    return f"{incident.level} was left alone after failures ({incident.reason})"


def _general_document(fates: Fates, namespace: StoredNamespace) -> dict[str, object]:
    return {
        "history_since_unix_s": fates.since_s(namespace),
        "incidents": [_incident_document(i) for i in fates.general(namespace)],
    }


def _incident_document(incident: Incident | None) -> dict[str, object] | None:
    if incident is None:
        return None
    return {
        "unix_s": incident.unix_s,
        "event": incident.event,
        "reason": incident.reason,
        "level": incident.level,
    }


def _fate_document(fate: Fate) -> dict[str, object]:
    return {
        "key": fate.key.hex(),
        "fate": fate.kind.value,
        "detail": fate.detail,
        "lost": _incident_document(fate.incident),
        "missed": _incident_document(fate.missed),
    }
