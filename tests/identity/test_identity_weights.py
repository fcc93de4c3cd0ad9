"""Different weights never have equal fingerprints, and equal ones do, wherever they lie."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from undercroft.identity import weights_fingerprint

MIB = 1024**2
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


def safetensors(path: Path, num_tensors: int, tensor_bytes: int, fill: bytes = b"") -> int:
    """A real safetensors file, sparse but for `fill`; returns where its data starts."""
    header = json.dumps(
        {"__metadata__": {"format": "pt"}}
        | {
            f"layers.{n}.weight": {
                "dtype": "U8",
                "shape": [tensor_bytes],
                "data_offsets": [n * tensor_bytes, (n + 1) * tensor_bytes],
            }
            for n in range(num_tensors)
        }
    ).encode()
    start = 8 + len(header)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + fill)
        file.truncate(start + num_tensors * tensor_bytes)
    return start


def small_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"rope_theta": 10000}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    safetensors(folder / "model.safetensors", 4, 100_000, b"weights")
    return folder


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def _config(folder: Path) -> None:
    (folder / "config.json").write_text('{"rope_theta": 20000}')


def _weight(folder: Path) -> None:
    flip(folder / "model.safetensors", 234_567)


def _grow(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0")


def _add(folder: Path) -> None:
    (folder / "extra.bin").write_bytes(b"")


def _rename(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")


def _code(folder: Path) -> None:
    (folder / "modeling_x.py").write_text("x = 1")


def _quantization(folder: Path) -> None:
    (folder / "quantize_config.json").write_text('{"bits": 4}')


@pytest.mark.parametrize("change", [_config, _weight, _grow, _add, _rename, _code, _quantization])
def test_a_change_under_the_same_path_is_seen(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Configuration, weight bytes, sizes, files, code, quantization: in place, same path."""
    folder = small_model(tmp_path / "model")
    before = weights_fingerprint(str(folder))
    assert before.kind == "files"
    assert before.note is None
    assert weights_fingerprint(str(folder)) == before
    change(folder)
    assert weights_fingerprint(str(folder)).value != before.value


def test_any_byte_of_a_small_model_counts(tmp_path: Path) -> None:
    """Up to 64 MiB every byte is read."""
    folder = small_model(tmp_path / "model")
    size = (folder / "model.safetensors").stat().st_size
    seen = {weights_fingerprint(str(folder)).value}
    for offset in (0, 9, 70_000, 150_001, 399_999, size - 1):
        flip(folder / "model.safetensors", offset)
        seen.add(weights_fingerprint(str(folder)).value)
    assert len(seen) == 7


def test_what_does_not_change_the_cache_is_not_seen(tmp_path: Path) -> None:
    """Tokenizer, sampling defaults, notes and times of files: the same weights."""
    folder = small_model(tmp_path / "model")
    before = weights_fingerprint(str(folder))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "generation_config.json").write_text('{"temperature": 2}')
    (folder / "README.md").write_text("hello")
    (folder / ".hidden.json").write_text("{}")
    (folder / "config.json").touch()
    assert weights_fingerprint(str(folder)) == before


def test_a_copy_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    """Content counts, not the path: replicas on other machines share."""
    folder = small_model(tmp_path / "model")
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    assert weights_fingerprint(str(copy)) == weights_fingerprint(str(folder))


def test_a_link_replaced_in_place_is_another_model(tmp_path: Path) -> None:
    """`model -> v1` becomes `model -> v2` between two runs."""
    small_model(tmp_path / "v1")
    _weight(small_model(tmp_path / "v2"))
    link = tmp_path / "model"
    link.symlink_to("v1")
    first = weights_fingerprint(str(link))
    link.unlink()
    link.symlink_to("v2")
    assert weights_fingerprint(str(link)) != first


@pytest.mark.parametrize("tensor", [0, 17, 39])
def test_any_tensor_of_a_large_model_counts(tmp_path: Path, tensor: int) -> None:
    """Above 64 MiB a piece of each tensor is read, so that tuning one layer is seen."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file = folder / "model.safetensors"
    start = safetensors(file, 40, 2 * MIB)
    before = weights_fingerprint(str(folder))
    flip(file, start + tensor * 2 * MIB + MIB)
    assert weights_fingerprint(str(folder)) != before


def test_both_ends_of_a_large_file_count(tmp_path: Path) -> None:
    """And pieces in between, also in formats whose tensors we do not find."""
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / "model.gguf"
    with file.open("wb") as out:
        out.truncate(65 * MIB)
    seen = {weights_fingerprint(str(folder)).value}
    for offset in (3, 65 * MIB - 1):
        flip(file, offset)
        seen.add(weights_fingerprint(str(folder)).value)
    with file.open("r+b") as out:
        out.seek(32 * MIB)
        out.write(b"\x01" * 32768)
    seen.add(weights_fingerprint(str(folder)).value)
    assert len(seen) == 4
    assert weights_fingerprint(str(file)).kind == "files"


@pytest.mark.parametrize(
    "content", [b"", b"\x05", struct.pack("<Q", 10) + b"not json..", struct.pack("<Q", 2**60)]
)
def test_a_broken_header_is_still_content(tmp_path: Path, content: bytes) -> None:
    """Nothing in a weight file makes the fingerprint fail."""
    file = tmp_path / "model.safetensors"
    with file.open("wb") as out:
        out.write(content)
        out.truncate(70 * MIB)
    assert weights_fingerprint(str(tmp_path)).kind == "files"


def test_100_gb_are_read_in_bounds(tmp_path: Path) -> None:
    """20 files of 5 GB: some thousand small reads, not the payload."""
    for n in range(20):
        safetensors(tmp_path / f"model-{n:05}.safetensors", 36, 5 * 10**9 // 36)
    before = bytes_read()
    found = weights_fingerprint(str(tmp_path))
    assert found.kind == "files"
    assert bytes_read() - before < 200 * MIB


def bytes_read() -> int:
    """By system calls of this process, so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    """One line to warn with."""
    (tmp_path / "config.json").write_text("{}")
    found = weights_fingerprint(str(tmp_path))
    assert found.note is not None
    assert "no weight files" in found.note


def test_model_id_is_believed(tmp_path: Path) -> None:
    """It stands for the weights, whatever lies in the folder."""
    folder = small_model(tmp_path / "model")
    found = weights_fingerprint(str(folder), model_id="prod-7")
    assert (found.kind, found.value, found.note) == ("model_id", "prod-7", None)


def hub(cache: Path, *commits: str, main: str) -> dict[str, str]:
    folder = cache / "models--org--name"
    for commit in commits:
        (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(main + "\n")
    return {"HF_HUB_CACHE": str(cache)}


def test_a_hub_model_is_known_by_its_commit(tmp_path: Path) -> None:
    """Another commit, another fingerprint; all the usual places of the cache are found."""
    hub(tmp_path / "hub", COMMIT, main=COMMIT)
    for environ in (
        {"HF_HUB_CACHE": str(tmp_path / "hub")},
        {"HUGGINGFACE_HUB_CACHE": str(tmp_path / "hub")},
        {"HF_HOME": str(tmp_path)},
    ):
        found = weights_fingerprint("org/name", environ=environ)
        assert (found.kind, found.value, found.note) == ("snapshot", COMMIT, None)
    (tmp_path / "home/.cache/huggingface").mkdir(parents=True)
    (tmp_path / "home/.cache/huggingface/hub").symlink_to(tmp_path / "hub")
    home = {"HOME": str(tmp_path / "home")}
    assert weights_fingerprint("org/name", environ=home).value == COMMIT
    other = hub(tmp_path / "hub2", OTHER, main=OTHER)
    assert weights_fingerprint("org/name", environ=other).value == OTHER


def test_a_snapshot_folder_is_the_same_as_its_name(tmp_path: Path) -> None:
    """Offline, engines put the snapshot's folder in place of the name."""
    environ = hub(tmp_path, COMMIT, main=COMMIT)
    folder = tmp_path / "models--org--name" / "snapshots" / COMMIT
    (folder / "config.json").write_text('{"rope_theta": 1}')
    by_name = weights_fingerprint("org/name", environ=environ)
    assert weights_fingerprint(str(folder)) == by_name
    (folder / "config.json").write_text('{"rope_theta": 2}')
    edited = weights_fingerprint("org/name", environ=environ)
    assert edited != by_name
    assert edited.value.startswith(COMMIT)


def test_a_revision_is_resolved(tmp_path: Path) -> None:
    """Branches by their reference, commits by themselves; an unknown one is named."""
    environ = hub(tmp_path, COMMIT, OTHER, main=COMMIT)
    (tmp_path / "models--org--name/refs/next").write_text(OTHER)
    for revision, commit in (("main", COMMIT), ("next", OTHER), (OTHER, OTHER)):
        found = weights_fingerprint("org/name", revision=revision, environ=environ)
        assert (found.kind, found.value) == ("snapshot", commit)
    found = weights_fingerprint("org/name", revision="gone", environ=environ)
    assert (found.kind, found.value) == ("name", "org/name@gone")


def test_several_snapshots_and_no_revision_share_nothing(tmp_path: Path) -> None:
    """The engine may run any of them: rather a miss than another's bytes."""
    environ = hub(tmp_path, COMMIT, OTHER, main=COMMIT)
    first, second = (weights_fingerprint("org/name", environ=environ) for _ in range(2))
    assert first.kind == "once"
    assert first.value != second.value
    assert first.note is not None
    assert "2 snapshots of org/name" in first.note
    assert "model_id" in first.note


@pytest.mark.parametrize(
    ("name", "environ"),
    [
        ("org/unknown", {}),
        ("s3://bucket/model", {}),
        ("org/name", {"VLLM_USE_MODELSCOPE": "True"}),
    ],
)
def test_otherwise_the_name_with_one_warning(
    tmp_path: Path, name: str, environ: dict[str, str]
) -> None:
    """One line that says what may go wrong and what to set."""
    cache = hub(tmp_path, COMMIT, main=COMMIT)
    found = weights_fingerprint(name, environ=cache | environ)
    assert (found.kind, found.value) == ("name", name)
    assert found.note is not None
    assert "model_id" in found.note
    assert "\n" not in found.note


def test_a_reference_to_a_missing_snapshot_is_no_commit(tmp_path: Path) -> None:
    """Half a download is only a name."""
    environ = hub(tmp_path, OTHER, main=COMMIT)
    assert weights_fingerprint("org/name", environ=environ).kind == "name"


def test_unreadable_files_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O error is a miss later, not a failure now."""
    folder = small_model(tmp_path / "model")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(Path, "open", refuse)
    found = weights_fingerprint(str(folder))
    assert found.kind == "once"
    assert found.note is not None
