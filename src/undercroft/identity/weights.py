"""Which weights a model name stands for, without loading them.

A folder is read, boundedly: small JSON and Python files whole, weight files by size, header and
samples. A model in the local hub cache is known by its commit. Otherwise there is only the name.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from json import JSONDecodeError, loads
from pathlib import Path
from typing import Literal

__all__ = ["Fingerprint", "local_folder", "weights_fingerprint"]

_EDGE_BYTES = 64 * 1024
_SAMPLE_BYTES = 4096
_SMALL_MODEL_BYTES = 64 * 1024**2
_MAX_SAMPLES = 4096
_MIN_SAMPLES_PER_FILE = 16
_MAX_HEADER_BYTES = 32 * 1024**2
_MAX_TEXT_BYTES = 16 * 1024**2
_MAX_REFERENCE_BYTES = 4096
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".npz")
_TEXTS = (".json", ".py")
_NO_INFLUENCE = re.compile(
    r"(tokenizer.*|special_tokens_map|added_tokens|vocab|merges|generation_config|chat_template"
    r"|trainer_state|training_args|README)\..*"
)
"""Files that change which tokens are asked for, not what is computed for a token."""

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Which weights.

    Args:
        kind: `model_id` the user says so; `files` content of a folder or file; `snapshot` commit
            in the hub cache; `name` nothing but the name is known; `once` nothing can be known,
            so it equals no other.
        value: Equal for equal weights.
        note: One line to warn with, or None.
    """

    kind: Literal["model_id", "files", "snapshot", "name", "once"]
    value: str
    note: str | None = None


def weights_fingerprint(
    model_name: str,
    *,
    model_id: str | None = None,
    revision: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Fingerprint:
    """Find out which weights `model_name` stands for.

    Args:
        model_name: As given to the engine: a folder, a file, or a hub name.
        model_id: What the user calls the weights; believed.
        revision: As given to the engine; None if unknown.
        environ: The process's environment, for the place of the hub cache.

    Returns:
        A value that differs when the weights differ. In folders above 64 MiB weight files are
        sampled (both ends, and 4 KiB in the middle of up to 4096 tensors): an edit that touches
        none of these and keeps all sizes goes unseen, so set `model_id` if you make such edits.

    Cost: one read of models up to 64 MiB, some 4,500 small reads above.
    """
    if model_id is not None:
        return Fingerprint("model_id", model_id)
    path = Path(model_name)
    try:
        commit = _commit_of_snapshot(path) if path.is_dir() else None
        if commit is not None:
            return _of_snapshot(path, commit)
        if path.is_dir():
            return _of_folder(path)
        if path.is_file():
            return Fingerprint("files", _digest_files([path], []))
        return _of_hub_name(model_name, revision, environ or {})
    except OSError as exc:
        return _once(f"the files of model {model_name} cannot be read ({exc})")


def local_folder(model_name: str, environ: Mapping[str, str]) -> Path | None:
    """Where the files of a model are: a folder itself, or the hub cache's main snapshot.

    Args:
        model_name: A folder, or a hub name.
        environ: The process's environment, for the place of the hub cache.
    """
    if Path(model_name).is_dir():
        return Path(model_name)
    if not _HUB_NAME.fullmatch(model_name):
        return None
    folder = _hub_cache(environ) / f"models--{model_name.replace('/', '--')}"
    commit = _resolve(folder, "main")
    return None if commit is None else folder / "snapshots" / commit


def _of_folder(folder: Path) -> Fingerprint:
    files = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    weights = [p for p in files if p.suffix in _WEIGHTS]
    texts = [p for p in files if p.suffix in _TEXTS and not _NO_INFLUENCE.fullmatch(p.name)]
    note = None
    if not weights:
        note = (
            f"no weight files are in {folder}: chunks of different weights in this folder cannot "
            f"be told apart; set model_id"
        )
    return Fingerprint("files", _digest_files(weights, texts), note)


def _digest_files(weights: list[Path], texts: list[Path]) -> str:
    sizes = [path.stat().st_size for path in weights]
    whole = sum(sizes) <= _SMALL_MODEL_BYTES
    samples = max(_MIN_SAMPLES_PER_FILE, _MAX_SAMPLES // max(1, len(weights)))
    digest = hashlib.sha256(b"undercroft weights 1")
    for path in texts:
        _add(digest, path.name, path.stat().st_size, [(0, _MAX_TEXT_BYTES)], path)
    for path, size in zip(weights, sizes, strict=True):
        ranges = [(0, size)] if whole else _ranges(path, size, samples)
        _add(digest, path.name, size, ranges, path)
    return digest.hexdigest()


def _add(
    digest: hashlib._Hash, name: str, size: int, ranges: Iterable[tuple[int, int]], path: Path
) -> None:
    digest.update(struct.pack("<QQ", len(name.encode()), size) + name.encode())
    with path.open("rb", buffering=0) as file:
        for start, length in ranges:
            file.seek(start)
            remaining = length
            while remaining > 0:
                data = file.read(min(remaining, 1024**2))
                if not data:
                    break
                digest.update(data)
                remaining -= len(data)


def _ranges(path: Path, size: int, samples: int) -> list[tuple[int, int]]:
    """What to read of a large file: both ends, its header, and a piece of each tensor."""
    header_bytes, middles = _tensors(path, size) if path.suffix == ".safetensors" else (0, [])
    if not middles:
        middles = [size * (n + 1) // (samples + 1) for n in range(samples)]
    step = -(-len(middles) // samples)
    pieces = [(max(0, middle - _SAMPLE_BYTES // 2), _SAMPLE_BYTES) for middle in middles[::step]]
    first = max(_EDGE_BYTES, min(header_bytes, _MAX_HEADER_BYTES))
    return [(0, first), *pieces, (max(0, size - _EDGE_BYTES), _EDGE_BYTES)]


def _tensors(path: Path, size: int) -> tuple[int, list[int]]:
    """Length of a safetensors header, and the middle of each tensor in the file, in order."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            return 0, []
        try:
            header = loads(file.read(length))
            offsets = [
                entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"
            ]
            start = 8 + length
            middles = (start + (int(a) + int(b)) // 2 for a, b in offsets)
            return start, sorted(min(max(0, middle), size) for middle in middles)
        except (
            JSONDecodeError,
            UnicodeDecodeError,
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ):
            return 8 + length, []


def _of_hub_name(name: str, revision: str | None, environ: Mapping[str, str]) -> Fingerprint:
    modelscope = environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")
    if modelscope or not _HUB_NAME.fullmatch(name):
        return _only_name(name, revision)
    folder = _hub_cache(environ) / f"models--{name.replace('/', '--')}"
    if not (folder / "snapshots").is_dir():
        return _only_name(name, revision)
    commit = _resolve(folder, revision or "main")
    if commit is None:
        return _only_name(name, revision)
    others = [p.name for p in (folder / "snapshots").iterdir() if p.name != commit]
    if revision is None and others:
        return _once(
            f"the hub cache has {len(others) + 1} snapshots of {name} and the engine does not say "
            f"which one it runs"
        )
    return _of_snapshot(folder / "snapshots" / commit, commit)


def _of_snapshot(folder: Path, commit: str) -> Fingerprint:
    """The commit, and what config.json says, which people edit in place."""
    config = folder / "config.json"
    if not config.is_file():
        return Fingerprint("snapshot", commit)
    digest = _digest_files([], [config])[:16]
    return Fingerprint("snapshot", f"{commit} config.json {digest}")


def _resolve(folder: Path, revision: str) -> str | None:
    """The commit that a branch, tag or commit names, if its snapshot is in the cache."""
    reference = folder / "refs" / revision
    commit = revision
    if not _COMMIT.fullmatch(revision):
        if not reference.is_file():
            return None
        with reference.open("rb") as file:
            commit = file.read(_MAX_REFERENCE_BYTES).decode("ascii", "replace").strip()
    known = _COMMIT.fullmatch(commit) and (folder / "snapshots" / commit).is_dir()
    return commit if known else None


def _hub_cache(environ: Mapping[str, str]) -> Path:
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ):
        if environ.get(variable):
            return Path(environ[variable]).expanduser() / below
    return Path("~/.cache/huggingface/hub").expanduser()


def _commit_of_snapshot(path: Path) -> str | None:
    """The commit if `path` is a snapshot folder of the hub cache: its files are named by hash."""
    whole = Path(os.path.realpath(path))
    in_cache = whole.parent.name == "snapshots" and whole.parent.parent.name.startswith("models--")
    return whole.name if in_cache and _COMMIT.fullmatch(whole.name) else None


def _only_name(name: str, revision: str | None) -> Fingerprint:
    value = name if revision is None else f"{name}@{revision}"
    return Fingerprint(
        "name",
        value,
        f"only the name of model {value} is known, not its weights: chunks stored under other "
        f"weights of that name would be used; set model_id and change it with the weights",
    )


def _once(reason: str) -> Fingerprint:
    return Fingerprint(
        "once",
        secrets.token_hex(16),
        f"{reason}: nothing stored earlier will be found, and nothing stored now will be found "
        f"later; set model_id to say which weights these are",
    )
