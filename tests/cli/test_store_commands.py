"""Each command about a store says what is there, as text and as JSON, and how it ended."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.vllm.lab import damage
from tests.tiers.disk.stores import CAPACITY, OTHER, age, fill, held, look
from tests.tiers.disk.support import NAMESPACE, content, disk, du, files, key, put
from undercroft.cli.store import model_text
from undercroft.keys import Namespace

from .rig import environment
from .store_rig import run

DAY_S = 86400.0
Capsys = pytest.CaptureFixture[str]
NAMED = Namespace({"model": {"name": "org/small", "dtype": "float32"}, "groups": []})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two namespaces, twelve chunks and three."""
    fill(tmp_path, range(12), namespace=NAMED)
    fill(tmp_path, range(100, 103), namespace=OTHER)
    return tmp_path


# --- ls -------------------------------------------------------------------------------------------


def test_ls_lists_namespaces(store: Path, capsys: Capsys) -> None:
    """Model, type, chunks, bytes; which are in use; damage; strangers' files."""
    (store / "undercroft-v1" / "mine.txt").write_bytes(b"x")
    ran = run(capsys, "ls", "--path", store)
    assert ran.code == 0
    row = next(line for line in ran.text.splitlines() if line.startswith(NAMED.id[:12]))
    assert "org/small" in row
    assert "float32" in row
    assert " 12 " in row
    assert "mine.txt" in ran.text
    document = run(capsys, "ls", "--path", store, "--json").document
    found = {n["id"]: n for n in document["namespaces"]}
    assert [found[n.id]["chunks"] for n in (NAMED, OTHER)] == [12, 3]
    assert found[OTHER.id]["manifest"] == OTHER.manifest
    assert document["bytes"] == du(store)
    assert [n["in_use"] for n in document["namespaces"]] == [False, False]
    with held(store, 0, 1) as pid:
        found = {
            n["id"]: n for n in run(capsys, "ls", "--path", store, "--json").document["namespaces"]
        }
        assert [found[n.id]["in_use"] for n in (NAMED, OTHER, NAMESPACE)] == [False, False, True]
        assert found[NAMESPACE.id]["pids"] in ([pid], [])


@pytest.mark.parametrize("command", ["ls", "du"])
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/data/models/teams/search/production/meta-llama/Llama-3.1-8B-Instruct", "Llama-"),
        ("/hub/models--org--small/snapshots/0123456789abcdef0123456789abcdef01234567", "org/small"),
    ],
)
def test_lines_fit_a_terminal(
    command: str, name: str, shown: str, tmp_path: Path, capsys: Capsys
) -> None:
    """A path as the model's name is shortened to what tells models apart; in JSON it is whole."""
    named = Namespace({"model": {"name": name, "dtype": "bfloat16"}, "groups": []})
    fill(tmp_path, range(12), namespace=named)
    lines = run(capsys, command, "--path", tmp_path).text.splitlines()
    assert max(map(len, lines[:2])) < 80
    assert shown in next(line for line in lines if line.startswith(named.id[:12]))
    document = run(capsys, command, "--path", tmp_path, "--json").document
    assert document["namespaces"][0]["model"] == name


@pytest.mark.parametrize("width", range(12, 60))
def test_a_models_name_is_as_short_as_asked(width: int) -> None:
    """Whatever the name; the end of a path is kept for as long as possible."""
    for name in ("/a/b/" + "x" * 50 + "-7B", "short", "/models/Llama-3.1-8B", "y" * 70):
        text = model_text(name, width)
        assert len(text) <= width
        assert text == name or text.endswith(name[-3:])
    assert model_text("/srv/models/Llama-3.1-8B", 16) == ".../Llama-3.1-8B"


def test_ls_lists_chunks(store: Path, capsys: Capsys) -> None:
    """The latest first, as many as asked for, void ones only when asked for."""
    tier = disk(store, namespace=OTHER, capacity_bytes=CAPACITY)
    tier.raise_epoch()
    put(tier, 200, 300)
    tier.close()
    document = run(capsys, "ls", NAMED.id[:6], "--path", store, "--limit", 5, "--json").document
    assert document["chunks"] == 12
    assert [c["key"] for c in document["listed"]] == [key(n).hex() for n in range(11, 6, -1)]
    document = run(capsys, "ls", OTHER.id, "--path", store, "--json").document
    assert [(c["key"], c["bytes"]) for c in document["listed"]] == [(key(200).hex(), 300)]
    document = run(capsys, "ls", OTHER.id, "--path", store, "--void", "--json").document
    assert [c["current"] for c in document["listed"]] == [True, False, False]
    text = run(capsys, "ls", NAMED.id[:6], "--path", store, "--limit", 5).text
    assert key(11).hex() in text
    assert "7 more" in text


@pytest.mark.parametrize("command", ["ls", "du", "verify", "gc"])
def test_a_store_that_is_not_there_is_code_3(tmp_path: Path, capsys: Capsys, command: str) -> None:
    """A wrong path is told as such."""
    ran = run(capsys, command, "--path", tmp_path / "no")
    assert ran.code == 3
    assert "no store at" in ran.errors


def test_the_path_comes_from_the_settings(
    store: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --path, the one disk tier of the environment's settings; with none or two: code 2."""
    monkeypatch.delenv("UNDERCROFT_CONFIG", raising=False)
    ran = run(capsys, "ls")
    assert ran.code == 2
    assert "which store?" in ran.errors
    monkeypatch.setenv("UNDERCROFT_HOST", "1GiB")
    ran = run(capsys, "ls")
    assert ran.code == 2
    assert "--path" in ran.errors
    tiers = f'[{{"type": "disk", "path": "{store}", "capacity": "1MiB"}}]'
    monkeypatch.setenv("UNDERCROFT_TIERS", tiers)
    document = run(capsys, "du", "--json").document
    assert (document["bytes"], document["capacity_bytes"]) == (du(store), 1 << 20)


# --- du -------------------------------------------------------------------------------------------


def test_du_adds_up_to_what_du_says(store: Path, capsys: Capsys) -> None:
    """By namespace, model and age; the total is that of the `du` program."""
    (store / "undercroft-v1" / "mine").mkdir()
    (store / "undercroft-v1" / "mine" / "film").write_bytes(b"x" * 12345)
    for path in (*files(store, ".slab"), *files(store, ".index")):
        if OTHER.id in str(path):
            os.utime(path, (0, 0))
    document = run(capsys, "du", "--path", store, "--json").document
    said = subprocess.run(
        ["du", "-s", "--block-size=1", str(store / "undercroft-v1")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert document["bytes"] == document["disk_bytes"] == int(said.stdout.split()[0])
    parts = [n["bytes"] for n in document["namespaces"]]
    assert sum(parts) + document["shared_bytes"] + document["foreign_bytes"] == document["bytes"]
    assert document["foreign_bytes"] >= 12345
    assert document["models"]["org/small"] == document["models"]["m"]
    assert document["ages"]["longer ago"] > 0
    text = run(capsys, "du", "--path", store, "--capacity", "4MiB").text
    assert f"{document['bytes']} bytes" in text
    assert "of 4 MiB" in text
    assert "longer ago" in text


# --- inspect --------------------------------------------------------------------------------------


def test_inspect_shows_header_and_place(store: Path, capsys: Capsys) -> None:
    """A prefix is enough; header fields are read from the record itself."""
    document = run(capsys, "inspect", key(7).hex()[:10].upper(), "--path", store, "--json").document
    (place,) = document["places"]
    assert document["key"] == place["header_key"] == key(7).hex()
    assert (place["state"], place["header"], place["header_payload_bytes"]) == (
        "good",
        "good",
        4096,
    )
    with Path(place["slab"]).open("rb") as slab:
        slab.seek(place["offset"] + 4096)
        assert slab.read(4096) == content(key(7))
    text = run(capsys, "inspect", key(7).hex(), "--path", store).text
    assert "xxh3-64" in text


def test_inspect_says_what_is_bad(store: Path, capsys: Capsys) -> None:
    """A damaged payload, a damaged header: code 1, and the reason; an unknown key: code 1."""
    damage.flip_payloads(store)
    ran = run(capsys, "inspect", key(7).hex(), "--path", store, "--json")
    assert ran.code == 1
    assert "payload's checksum" in ran.document["places"][0]["state"]
    damage.flip_headers(store)
    (place,) = run(capsys, "inspect", key(7).hex(), "--path", store, "--json").document["places"]
    assert "checksum" in place["header"]
    assert run(capsys, "inspect", key(999).hex(), "--path", store).code == 1


@pytest.mark.parametrize(("text", "words"), [("xyz", "not the beginning"), ("", "not the beg")])
def test_inspect_refuses_what_is_no_key(store: Path, capsys: Capsys, text: str, words: str) -> None:
    """Not hex: code 2."""
    ran = run(capsys, "inspect", text, "--path", store)
    assert ran.code == 2
    assert words in ran.errors


def test_inspect_asks_for_more_digits(tmp_path: Path, capsys: Capsys) -> None:
    """When several keys begin so, they are named."""
    fill(tmp_path, range(40))
    first = next(a for a in "0123456789abcdef" if sum(key(n).hex()[0] == a for n in range(40)) > 1)
    ran = run(capsys, "inspect", first, "--path", tmp_path)
    assert ran.code == 2
    assert "more digits" in ran.errors


# --- verify ---------------------------------------------------------------------------------------


def test_verify_finds_and_mends(store: Path, capsys: Capsys) -> None:
    """Clean: 0. Damaged: 1, each fault named. Mended: 0. Clean again: 0."""
    assert run(capsys, "verify", "--path", store, "--capacity", CAPACITY).code == 0
    damage.flip_payloads(store)
    damage.flip_indexes(store)
    ran = run(capsys, "verify", "--path", store, "--json")
    assert ran.code == 1
    kinds = [finding["kind"] for finding in ran.document["findings"]]
    assert ran.document["faults"] == len(kinds) > 10
    assert {"record"} <= set(kinds) <= {"record", "entry"}
    ran = run(capsys, "verify", "--path", store, "--repair")
    assert ran.code == 0
    assert "[freed]" in ran.text
    assert "0 left" in ran.text
    document = run(capsys, "verify", "--path", store, "--json").document
    assert (document["faults"], document["findings"]) == (0, [])


def test_verify_leaves_what_is_in_use(tmp_path: Path, capsys: Capsys) -> None:
    """Damage under a running engine: code 1 with --repair too, and it says who has it."""
    with held(tmp_path, 0, 4):
        damage.flip_payloads(tmp_path)
        ran = run(capsys, "verify", "--path", tmp_path, "--repair")
        assert ran.code == 1
        assert "left: " in ran.text
        assert "has it open" in ran.text
    assert run(capsys, "verify", "--path", tmp_path, "--repair").code == 0


def test_verify_holds_the_store_against_the_capacity(store: Path, capsys: Capsys) -> None:
    """Over it: a fault that names both numbers."""
    ran = run(capsys, "verify", "--path", store, "--capacity", "8KiB")
    assert ran.code == 1
    assert f"{du(store)} bytes are used, 8192 are allowed" in ran.text


# --- rm -------------------------------------------------------------------------------------------


def test_rm_needs_a_yes(store: Path, capsys: Capsys) -> None:
    """Nobody to ask and no --yes: code 2, and nothing is gone; --dry-run needs none."""
    before = du(store)
    ran = run(capsys, "rm", NAMED.id[:8], "--path", store)
    assert ran.code == 2
    assert "--yes" in ran.errors
    assert run(capsys, "rm", NAMED.id[:8], "--path", store, "--dry-run").code == 0
    assert run(capsys, "rm", "--path", store).code == 2
    assert du(store) == before


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 1), ("", 1)])
def test_rm_asks_where_somebody_can_answer(
    store: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    """On a terminal: yes removes, anything else does not."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(capsys, "rm", OTHER.id, "--path", store).code == code
    assert len(look(store).namespaces) == 1 + code


def test_names_on_disk_cannot_move_the_cursor(store: Path, capsys: Capsys) -> None:
    """A stranger's file name with escape codes is shown without them."""
    (store / "undercroft-v1" / "x\x1b[2Jy").write_bytes(b"")
    for command in ("ls", "verify"):
        ran = run(capsys, command, "--path", store)
        assert "x?[2Jy" in ran.text
        assert "\x1b" not in ran.text


def test_rm_removes_namespaces_and_chunks(store: Path, capsys: Capsys) -> None:
    """A namespace goes whole, a chunk alone; the rest stays and is whole."""
    ran = run(capsys, "rm", OTHER.id[:8], key(3).hex(), "--path", store, "--yes", "--json")
    assert ran.code == 0
    assert [target["left"] for target in ran.document["targets"]] == ["", ""]
    (left,) = look(store).namespaces
    assert left.namespace_id == NAMED.id
    tier = disk(store, namespace=NAMED, capacity_bytes=CAPACITY)
    assert [tier.contains(key(n)) for n in (2, 3, 4)] == [True, False, True]
    tier.close()
    assert run(capsys, "verify", "--path", store).code == 0
    assert run(capsys, "rm", "--all", "--path", store, "--yes").code == 0
    assert look(store).namespaces == ()


def test_rm_by_age(store: Path, capsys: Capsys) -> None:
    """Segments not written for so long go; younger ones stay."""
    assert "nothing" in run(capsys, "rm", "--older-than", "30d", "--path", store, "--yes").text
    age(store, 31 * DAY_S)
    fill(store, range(500, 501))
    assert run(capsys, "rm", "--older-than", "30d", "--path", store, "--yes").code == 0
    assert [len(n.segments) for n in look(store).namespaces if n.segments] == [1]
    assert run(capsys, "rm", "--older-than", "soon", "--path", store).code == 2


def test_rm_refuses_what_an_engine_has_open(tmp_path: Path, capsys: Capsys) -> None:
    """Namespace and chunk alike: code 1, with the reason, and the engine keeps all of it."""
    with held(tmp_path, 0, 5):
        for what in (NAMESPACE.id, key(2).hex()):
            ran = run(capsys, "rm", what, "--path", tmp_path, "--yes")
            assert ran.code == 1
            assert "has it open" in ran.text
    tier = disk(tmp_path, capacity_bytes=CAPACITY)
    assert all(tier.contains(key(n)) for n in range(5))
    tier.close()


@pytest.mark.parametrize("what", ["zz", "ffffffffffff", "0" * 40])
def test_rm_of_what_is_not_there_is_code_2(store: Path, capsys: Capsys, what: str) -> None:
    """Neither a namespace nor a chunk."""
    assert run(capsys, "rm", what, "--path", store, "--yes").code == 2


# --- gc -------------------------------------------------------------------------------------------


def test_gc_says_and_does(store: Path, capsys: Capsys) -> None:
    """With --dry-run what would go, without it the same goes; exit codes; idempotent."""
    (files(store, "epoch")[0].parent / "manifest.json.tmp").write_bytes(b"x" * 5000)
    age(store / "undercroft-v1" / OTHER.id, 40 * DAY_S)
    words = ("gc", "--path", store, "--unused-for", "30", "--json")
    planned = run(capsys, *words, "--dry-run").document
    assert {waste["reason"] for waste in planned["waste"]} >= {"unused"}
    before = du(store)
    done = run(capsys, *words)
    assert done.code == 0
    assert du(store) == before - done.document["bytes"]
    assert [w["path"] for w in done.document["waste"]] == [w["path"] for w in planned["waste"]]
    assert run(capsys, *words).document["waste"] == []


def test_gc_to_a_capacity(store: Path, capsys: Capsys) -> None:
    """Down to it if that can be; code 1 if the rest is in use."""
    assert run(capsys, "gc", "--path", store, "--capacity", "64KiB").code == 0
    assert du(store) <= 64 << 10
    with held(store, 0, 40):
        ran = run(capsys, "gc", "--path", store, "--capacity", "64KiB")
        assert ran.code == 1
        assert "still over" in ran.text


@pytest.mark.parametrize(
    "harm", [*damage.LOSES_CHUNKS[:-1], damage.grow_files], ids=lambda h: h.__name__
)
@pytest.mark.parametrize("command", ["ls", "du", "gc", "verify", "inspect", "explain"])
def test_no_damage_stops_a_command(
    store: Path, capsys: Capsys, harm: damage.Callable[[Path], None], command: str
) -> None:
    """Whatever happened to a store, each command ends with a code of its own, without a fault."""
    harm(store)
    words = {"inspect": [key(3).hex()], "explain": ["--key", key(3).hex()], "gc": ["--dry-run"]}
    for extra in ([], ["--json"]):
        ran = run(capsys, command, *words.get(command, []), "--path", store, *extra)
        assert ran.code in (0, 1)
        assert ran.text


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
def test_names_that_no_encoding_has_are_shown_as_escapes(
    store: Path, encoding: str, command: str
) -> None:
    """Bytes that are no text, letters that the locale lacks: valid JSON, and readable lines."""
    (store / "undercroft-v1" / os.fsdecode(b"na\xc3\xafve\xff")).write_bytes(b"x")
    words = [sys.executable, "-m", "undercroft", command, "--path", str(store)]
    for extra in ([], ["--json"]):
        done = subprocess.run(
            [*words, *extra],
            env=environment(PYTHONIOENCODING=f"{encoding}:strict"),
            capture_output=True,
            check=False,
        )
        assert done.returncode in (0, 1), done.stderr
        if extra:
            assert json.loads(done.stdout)


def test_a_pipe_in_a_files_place_does_not_hang_a_command(store: Path, capsys: Capsys) -> None:
    """Nobody is at its other end."""
    for path in [*files(store, "epoch"), *files(store, "manifest.json"), *files(store, ".index")]:
        path.unlink()
        os.mkfifo(path)
    for command in ("ls", "verify", "gc"):
        assert run(capsys, command, "--path", store).code in (0, 1)


def test_a_manifest_too_deep_to_read_is_damaged(store: Path, capsys: Capsys) -> None:
    """Not a fault of ours."""
    for path in files(store, "manifest.json"):
        path.write_text("[" * 100_000)
    ran = run(capsys, "ls", "--path", store)
    assert ran.code in (0, 1)
    assert "the manifest is damaged" in ran.text
