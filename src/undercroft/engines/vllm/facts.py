"""What decides KV bytes that vLLM's offloading configuration does not say.

Only a rank knows it: some of it is decided while the model is built, such as the attention backend
and the type of KV elements. Rank 0 leaves it at the beginning of the host region, where the
scheduler reads it before it hands out slots. Which fields count is in `judged`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import secrets
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
import transformers
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from undercroft.engines.told import MAX_TOLD_BYTES, pack, unpack
from undercroft.engines.vllm.judged import ENGINE, ENVIRONMENT, SEALED, Room
from undercroft.errors import ConfigError
from undercroft.hierarchy.region_control import MAX_RANKS, NONCE_BYTES
from undercroft.identity import weights_fingerprint

__all__ = ["leave_facts", "model_facts", "take_facts"]

_LOG = logging.getLogger(__name__)

_OFFSET = NONCE_BYTES * (MAX_RANKS + 1)
"""Behind the nonces by which the region proves itself."""
_MAGIC = b"UCFACTS1"
_HEADER_BYTES = len(_MAGIC) + 4
_NOT_ABOUT_BYTES = {
    "transformers_version",
    "_name_or_path",
    "torch_dtype",
    "id2label",
    "label2id",
    "max_model_len",
}
"""Of a model's own configuration. The type that counts is the engine's; the length is written there
by vLLM for one model, see `_depends_on_context`."""
_MAX_SHOWN = 48
_SWITCHES = {"parallel_drafting", "use_heterogeneous_vocab", "disable_eagle_block_drop"}
_CONTEXT_ROPES = ("longrope", "dynamic", '"su"')
_QUANTISERS = {"quantization_config", "compression_config"}
"""Of a model's own configuration; scales of theirs are "dynamic", too."""
_NO_DEFAULT = object()


# --- values ---------------------------------------------------------------------------------------


def _short(value: object) -> object:
    """`value` if it is short enough to read, else its digest; the same for equal values."""
    text = json.dumps(value, sort_keys=True)
    if len(text) <= _MAX_SHOWN:
        return value
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _plain(value: object) -> object:
    """`value` as short JSON data; what cannot be equal in two processes equals nothing."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return _short([_plain(one) for one in value])
    if isinstance(value, set | frozenset):
        return _short(sorted((_plain(one) for one in value), key=repr))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name, None)) for f in dataclasses.fields(value)}
    if isinstance(value, transformers.PretrainedConfig):
        return _plain(value.to_dict())
    return _leaf(value)


def _leaf(value: object) -> object:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bool | int | None):
        return value
    name = getattr(value, "__qualname__", None)
    if name is not None:  # a class or a function
        return f"{getattr(value, '__module__', '')}.{name}"
    compute_hash = getattr(value, "compute_hash", None)
    if callable(compute_hash):  # vLLM's way for objects of plug-ins
        return str(compute_hash())
    return _short(str(value).removeprefix("torch."))


def _sealed(value: object) -> object:
    """A digest of what may hold credentials; manifests are readable."""
    text = json.dumps(_plain(value), sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _veiled(value: object) -> object:
    """`value` if it cannot be a credential, else its digest: nobody knows what it is for."""
    return value if isinstance(value, bool | int | float | None) else _sealed(value)


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, Mapping | list | tuple | set) and not value)


# --- fields ---------------------------------------------------------------------------------------


def _of_room(room: Room, source: object, path: str, unjudged: dict[str, Any]) -> dict[str, Any]:
    """The facts of one of vLLM's objects and of those in it; what is not judged goes aside."""
    facts: dict[str, Any] = {}
    for name in room.takes:
        value = getattr(source, name, None)
        if not _is_empty(value):
            facts[name] = _sealed(value) if name in SEALED else _plain(value)
    for name, inner in room.rooms.items():
        value = getattr(source, name, None)
        found = None if value is None else _of_room(inner, value, f"{path}{name}.", unjudged)
        if found:
            facts[name.removesuffix("_config")] = found
    unjudged |= {f"{path}{name}": value for name, value in _unjudged(room, source)}
    return facts


def _unjudged(room: Room, source: object) -> Iterator[tuple[str, object]]:
    """Fields that a later vLLM added, unless they are as that vLLM has them by default."""
    if not dataclasses.is_dataclass(source):
        return
    for field in dataclasses.fields(source):
        if field.name in room.names:
            continue
        value = _plain(getattr(source, field.name, None))
        if value != _default(field):
            yield field.name, _veiled(value)


def _default(field: dataclasses.Field[Any]) -> object:
    # vLLM's classes are pydantic's, which keeps the default in a description of the field.
    described = field.default
    factory: object = field.default_factory
    if factory is dataclasses.MISSING:
        factory = getattr(described, "default_factory", None)
    if not callable(factory):
        return _plain(getattr(described, "default", described))
    try:
        return _plain(factory())
    except Exception:  # noqa: BLE001 - pydantic's may want the other fields; or whatever else
        return _NO_DEFAULT


# --- by hand --------------------------------------------------------------------------------------


def _hf_config(model: object) -> dict[str, Any]:
    """A model's own configuration, after vLLM has applied all overrides."""
    whole = getattr(model, "hf_config", None)
    text = getattr(model, "hf_text_config", None)
    facts: dict[str, Any] = {}
    for name, config in (("hf_config", whole), ("hf_text_config", text)):
        if config is not None and (name == "hf_config" or config is not whole):
            found = _plain(config.to_dict())
            facts[name] = _without_origin(found) if isinstance(found, dict) else found
    return facts


def _without_origin(found: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_origin(value) if isinstance(value, dict) else value
        for name, value in found.items()
        if name not in _NOT_ABOUT_BYTES
    }


def _model(model: object) -> dict[str, Any]:
    facts = _hf_config(model)
    own = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    if own is not None and _depends_on_context(own.to_dict()):
        facts["max_model_len"] = getattr(model, "max_model_len", None)
    asks = getattr(model, "using_transformers_backend", None)
    if asks is not None and asks():
        facts["transformers"] = transformers.__version__
    return facts


def _depends_on_context(hf_config: Mapping[str, Any]) -> bool:
    """Whether vLLM computes other bytes under another `--max-model-len`.

    LongRoPE takes its long factors for all positions if that exceeds the original length; Llama 4
    turns on a temperature of its attention; dynamic NTK scales its base.
    """
    told = {name: value for name, value in hf_config.items() if name not in _QUANTISERS}
    rope = json.dumps(told, default=str).lower()
    is_scaled = any(word in rope for word in _CONTEXT_ROPES)
    return is_scaled or str(hf_config.get("model_type")).startswith("llama4")


def _dummy(load: object, model: object) -> dict[str, Any]:
    if getattr(load, "load_format", None) != "dummy":
        return {}
    return {"dummy_weights": {"seed": getattr(model, "seed", None)}}


def _drafter(config: VllmConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    """More about a drafter that has weights of its own."""
    speculative = config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None or getattr(draft, "model", None) == config.model_config.model:
        return {} if draft is None else _dummy(_draft_load(config), draft)
    found = weights_fingerprint(
        draft.model, revision=getattr(draft, "revision", None), environ=environ
    )
    if found.note:
        _LOG.warning("drafter: %s", found.note)
    weights = {"weights": {"kind": found.kind, "value": found.value}}
    return weights | _dummy(_draft_load(config), draft)


def _draft_load(config: VllmConfig) -> object:
    return getattr(config.speculative_config, "draft_load_config", None) or config.load_config


def _layers(config: VllmConfig) -> dict[str, Any]:
    """What the layers of this rank have chosen, once they are built."""
    compilation = getattr(config, "compilation_config", None)
    layers = getattr(compilation, "static_forward_context", None) or {}
    found: dict[str, set[str]] = {"backend": set(), "kv_cache_dtype": set(), "isa": set()}
    for layer in layers.values():
        backend = _backend(layer)
        if backend is None:
            continue
        found["backend"].add(backend)
        for name in ("kv_cache_dtype", "isa"):
            value = getattr(layer, name, None)
            if value is not None:
                found[name].add(str(value).removeprefix("torch."))
    return {name: " ".join(sorted(values)) for name, values in found.items() if values}


def _backend(layer: object) -> str | None:
    backend = getattr(layer, "attn_backend", None)
    if backend is None and hasattr(layer, "get_attn_backend"):
        backend = layer.get_attn_backend()
    if backend is None:
        return None
    try:
        return str(backend.get_name())
    except (AttributeError, NotImplementedError):
        return f"{backend.__module__}.{backend.__qualname__}"


def _device(layers: Mapping[str, Any]) -> dict[str, Any]:
    """The platform, and what of it decides precision or the order of elements in a page."""
    facts: dict[str, Any] = {"type": str(current_platform.device_type)}
    capability = current_platform.get_device_capability()
    if capability is not None:
        facts["capability"] = capability.as_version_str()
    if current_platform.is_cpu():
        facts["architecture"] = current_platform.get_cpu_architecture().name
        if "isa" not in layers:
            facts["amx"] = bool(torch.cpu._is_amx_tile_supported())  # noqa: SLF001 - as vLLM asks
    return facts


# --- all of it ------------------------------------------------------------------------------------


def model_facts(config: VllmConfig | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """JSON values that are equal for engines that compute equal KV bytes.

    Args:
        config: The engine's whole configuration as a rank has it after the model was built. None
            where the engine does not tell: then the facts equal no others.
        environ: The process's environment.

    Returns:
        Facts that equal no others, too, if the configuration cannot be read: no oddity of an engine
        keeps it from starting.

    Cost: where there is a drafter, that of `weights_fingerprint`.
    """
    if config is None:
        _LOG.warning(
            "this engine does not tell its configuration to its ranks: nothing stored earlier will "
            "be found, and nothing stored now will be found later"
        )
        return {"unknown": secrets.token_hex(16)}
    try:
        return _facts(config, environ)
    except Exception:  # noqa: BLE001 - an engine that starts without its cache is better than none
        _LOG.exception(
            "this engine's configuration cannot be read, please report this: nothing stored "
            "earlier will be found, and nothing stored now will be found later"
        )
        return {"unknown": secrets.token_hex(16)}


def _facts(config: VllmConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    unjudged: dict[str, Any] = {}
    facts = _of_room(ENGINE, config, "", unjudged)
    model = config.model_config
    facts["model"] = facts.get("model", {}) | _model(model)
    _tidy_speculative(facts, config, environ)
    _tidy_lora(facts, config)
    _tell_of_other_stages(facts, config)
    layers = _layers(config)
    facts["layers"] = layers
    facts["device"] = _device(layers)
    facts["runner"] = "v2" if getattr(config, "use_v2_model_runner", False) else "v1"
    facts |= _dummy(getattr(config, "load_config", None), model)
    if getattr(config, "weight_transfer_config", None) is not None:
        _LOG.warning(
            "weights may be replaced while this engine runs (weight_transfer_config): what it "
            "stores is found by no other engine, nor after a restart"
        )
        facts["weight_transfer"] = secrets.token_hex(16)
    facts["environment"] = {name: environ[name] for name in ENVIRONMENT if name in environ}
    if unjudged:
        facts["unjudged"] = unjudged
        _LOG.warning(
            "this vLLM has settings that are not known here, and they are not at their defaults: "
            "%s; engines that differ in them share nothing",
            ", ".join(sorted(unjudged)),
        )
    return {name: value for name, value in facts.items() if value != {}}


def _tidy_speculative(
    facts: dict[str, Any], config: VllmConfig, environ: Mapping[str, str]
) -> None:
    found = facts.get("speculative")
    if found is None:
        return
    # So that the method is the first difference to an engine without.
    off = (name for name, value in found.items() if value is False and name in _SWITCHES)
    speculative = {name: found[name] for name in found.keys() - off}
    facts["speculative"] = speculative
    draft = getattr(config.speculative_config, "draft_model_config", None)
    if draft is not None:
        own = speculative.get("draft_model", {}) | _model(draft)
        if own == facts["model"]:  # of methods without a drafter it is the model's
            speculative.pop("draft_model", None)
        else:
            speculative["draft_model"] = own
    speculative |= _drafter(config, environ)


def _tidy_lora(facts: dict[str, Any], config: VllmConfig) -> None:
    """An engine that may have adapters shares what it computes without."""
    lora = getattr(config, "lora_config", None)
    found: dict[str, Any] = facts.get("lora", {})
    dtype = getattr(lora, "lora_dtype", None)
    if dtype not in (None, "auto", config.model_config.dtype):
        found = found | {"lora_dtype": _plain(dtype)}
    if getattr(lora, "enable_tower_connector_lora", False):
        found = found | {"enable_tower_connector_lora": True}
    facts["lora"] = found


def _tell_of_other_stages(facts: dict[str, Any], config: VllmConfig) -> None:
    """Rank 0 has the layers of one pipeline stage: of the others there is what was asked for."""
    asked = getattr(getattr(config, "attention_config", None), "backend_per_kind", None)
    num_stages = getattr(getattr(config, "parallel_config", None), "pipeline_parallel_size", 1)
    if asked and num_stages != 1:
        facts["attention"] = facts.get("attention", {}) | {"backend_per_kind": _plain(asked)}


# --- from a rank to the scheduler -----------------------------------------------------------------


def leave_facts(buffer: memoryview, facts: Mapping[str, Any]) -> None:
    """A rank's side: write this engine's facts into the region, before the scheduler joins.

    Raises:
        ConfigError: The region is too small for them.
    """
    packed = pack(facts)
    end = _OFFSET + _HEADER_BYTES + len(packed)
    if end > len(buffer):
        raise ConfigError(
            f"host is {len(buffer)} bytes, but {end} bytes are needed at least; raise host"
        )
    header = _MAGIC + len(packed).to_bytes(4, "little")
    buffer[_OFFSET:end] = header + packed


def take_facts(buffer: memoryview) -> Mapping[str, Any]:
    """The scheduler's side: read the facts and wipe them.

    Raises:
        ConfigError: No rank left any, or they cannot be read: the ranks run another version of
            this library.
    """
    header = bytes(buffer[_OFFSET : _OFFSET + _HEADER_BYTES])
    if not header.startswith(_MAGIC):
        raise ConfigError(
            "the ranks left no facts: they run another version of undercroft; install the same"
        )
    start = _OFFSET + _HEADER_BYTES
    end = start + int.from_bytes(header[len(_MAGIC) :], "little")
    try:
        facts = unpack(bytes(buffer[start : min(end, start + MAX_TOLD_BYTES)]))
    except ValueError as error:
        raise ConfigError(
            f"the ranks left facts that cannot be read ({error}): they run another version of "
            "undercroft; install the same"
        ) from error
    end = min(end, len(buffer))
    buffer[_OFFSET:end] = bytes(end - _OFFSET)
    return facts
