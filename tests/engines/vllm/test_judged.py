"""Every field of the installed vLLM's configuration is judged, and each judgement takes effect."""

import copy
import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm.config
import vllm.envs
from shapes import SMALL_LLAMA

from undercroft.engines.vllm import preview
from undercroft.engines.vllm.facts import model_facts
from undercroft.engines.vllm.judged import ENGINE, ENVIRONMENT, SEALED

ROOT = Path(__file__).parents[3]
LEFT_WHOLE = ROOT / "tests" / "data" / "vllm_0_32_fields.json"
PAGE = ROOT / "docs" / "reference" / "identity.md"


def walk(room=ENGINE, path=()):
    """Every room with the fields that lead to it."""
    yield path, room
    for name, inner in room.rooms.items():
        yield from walk(inner, (*path, name))


ROOMS = {".".join((*path, room.class_name)): (path, room) for path, room in walk()}


def fields(class_name):
    return {field.name for field in dataclasses.fields(getattr(vllm.config, class_name))}


@pytest.mark.parametrize("name", ROOMS)
def test_every_field_is_judged_once(name):
    """A new vLLM's fields must be judged, and those it dropped taken off the list."""
    _, room = ROOMS[name]
    assert fields(room.class_name) == room.names
    lists = (room.takes, room.by_hand, room.leaves, room.rooms)
    assert sum(map(len, lists)) == len(room.names)


def test_classes_that_are_left_out_whole_have_the_fields_they_had():
    """They were judged by what they are for: a new field may be about something else.

    After judging what is new, write the file anew: `WRITE=1 pytest` this test.
    """
    judged = {room.class_name for _, room in ROOMS.values()}
    found = {
        name: sorted(fields(name))
        for name in dir(vllm.config)
        if dataclasses.is_dataclass(getattr(vllm.config, name)) and name not in judged
    }
    if os.environ.get("WRITE"):
        LEFT_WHOLE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    assert found == json.loads(LEFT_WHOLE.read_text())


def test_the_environment_variables_are_vllm_s():
    """None is misspelt, or gone."""
    assert set(ENVIRONMENT) <= set(vllm.envs.environment_variables)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A configuration that vLLM made, with something in every room."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SMALL_LLAMA))
    config = preview._config([str(folder)])
    engine = SimpleNamespace(
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    )
    engine.speculative_config = SimpleNamespace(
        method="eagle", draft_model_config=copy.copy(config.model_config), draft_load_config=None
    )
    engine.lora_config = vllm.config.LoRAConfig()
    for model in (engine.model_config, engine.speculative_config.draft_model_config):
        model.multimodal_config = vllm.config.MultiModalConfig()
    engine.speculative_config.draft_model_config.seed = 9
    engine.speculative_config.draft_model_config.dtype = "another"
    return engine


def changed(engine, path, field):
    """A copy in which one field of one room is another."""
    other = outer = copy.copy(engine)
    for name in path:
        inner = copy.copy(getattr(outer, name))
        object.__setattr__(outer, name, inner)
        outer = inner
    object.__setattr__(outer, field, "changed")
    return other


def leaves_of(facts, path=()):
    """Dotted names and values of all facts."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from leaves_of(value, (*path, name))
        else:
            yield ".".join((*path, name)), json.dumps(value)


def differing(one, other):
    return {name for name, _ in set(leaves_of(one)) ^ set(leaves_of(other))}


@pytest.mark.parametrize("name", ROOMS)
def test_each_field_that_is_taken_changes_the_facts_under_its_own_name(name, real):
    """So `explain` names it, with both values."""
    path, room = ROOMS[name]
    plain = model_facts(real, {})
    prefix = [part.removesuffix("_config") for part in path]
    wrong = {}
    for field in room.takes:
        fact = ".".join([*prefix, field])
        found = differing(plain, model_facts(changed(real, path, field), {}))
        if not found or any(one != fact and not one.startswith(f"{fact}.") for one in found):
            wrong[field] = found
    assert wrong == {}


@pytest.mark.parametrize("name", ROOMS)
def test_each_field_that_is_left_changes_nothing(name, real):
    """Sizes, places, ports, logging, batching, sampling: the cache stays warm."""
    path, room = ROOMS[name]
    plain = model_facts(real, {})
    wrong = [field for field in room.leaves if model_facts(changed(real, path, field), {}) != plain]
    assert wrong == []


def rows(reasons, verdict):
    """Table rows: fields with one reason share a row."""
    shared = {}
    for name, why in reasons.items():
        shared.setdefault(why, []).append(f"`{name}`")
    return [f"| {', '.join(names)} | {verdict} | {why} |" for why, names in shared.items()]


def tables():
    """The part of the page that shows the judgements."""
    lines = []
    seen = set()
    for path, room in walk():
        if room.class_name in seen:
            continue
        seen.add(room.class_name)
        where = ".".join(path) or "the whole"
        lines += [f"### `{room.class_name}` ({where})", ""]
        lines += ["| field | in | why |", "|---|---|---|"]
        lines += rows(room.takes, "yes")
        lines += rows(room.by_hand, "in part")
        lines += rows(room.leaves, "no")
        lines += rows({name: f"see `{inner.class_name}`" for name, inner in room.rooms.items()}, "")
        lines += [""]
    lines += ["### Environment variables", "", "| variable | in | why |", "|---|---|---|"]
    lines += rows(ENVIRONMENT, "if set")
    return "\n".join(lines)


def test_the_page_shows_the_judgements():
    """docs/reference/identity.md; `WRITE=1 pytest` this test writes them anew."""
    text = PAGE.read_text()
    head, mark, _ = text.partition("<!-- the rest of this page is tests/engines/vllm/test_judged")
    line = mark + ".py's tables() -->\n\n"
    if os.environ.get("WRITE"):
        PAGE.write_text(head + line + tables() + "\n")
    assert PAGE.read_text() == head + line + tables() + "\n"
    assert all(f"`{name}`" in head for name in SEALED)
