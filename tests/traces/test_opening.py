"""Which reader reads a file."""

import pytest
from trace_files import HEADER, write

from undercroft import plugins
from undercroft.errors import BadTrace, UnknownPlugin
from undercroft.traces import TraceBuilder, load

REQUEST = {"t": 0, "in": 16, "p": -1, "n": 1}


class Spaced:
    """A stranger's format."""

    name = "spaced"

    def matches(self, first_line):
        return first_line.partition(" ")[0].isdigit()

    def read(self, lines):
        builder = TraceBuilder(lines.path.name, 16)
        for line in lines:
            time, *keys = line.split()
            with lines.judged():
                builder.add(keys, time_ms=int(time))
        return builder.build()


@pytest.fixture
def spaced(monkeypatch):
    """Registered beside ours."""
    find, names = plugins.find, plugins.names
    monkeypatch.setattr(plugins, "names", lambda kind: (*names(kind), "spaced"))
    monkeypatch.setattr(
        plugins, "find", lambda kind, name: Spaced if name == "spaced" else find(kind, name)
    )


def test_our_readers_are_plug_ins():
    """As a stranger's are."""
    assert set(plugins.names("traces")) >= {"compact", "mooncake"}
    for name in plugins.names("traces"):
        assert plugins.find("traces", name)().name == name


@pytest.mark.usefixtures("spaced")
def test_a_strangers_format_is_found_by_its_first_line(tmp_path):
    """And its errors name the line."""
    path = write(tmp_path / "s.txt", ["", "0 a b", "7 a c"])
    assert list(load(path).iter_blocks()) == [[0, 1], [0, 2]]
    with pytest.raises(BadTrace, match=r"s.txt, line 2: invalid literal"):
        load(write(path, ["0 a b", "x a c"]))


@pytest.mark.parametrize("first", ["hello", "{}", "7", "null", "[" * 100_000, '{"format": 3}'])
def test_a_file_of_no_known_format_is_an_error(tmp_path, first):
    """It says which there are."""
    path = write(tmp_path / "x", [first, REQUEST])
    with pytest.raises(BadTrace, match=r"x, line 1: no format is known .* compact, mooncake"):
        load(path)


def test_a_format_can_be_named(tmp_path):
    """Then the first line has to be what that format wants."""
    path = write(tmp_path / "x", [HEADER, REQUEST])
    assert load(path, "compact").num_requests == 1
    with pytest.raises(BadTrace, match="line 1: 'hash_ids'"):
        load(path, "mooncake")
    with pytest.raises(UnknownPlugin, match="did you mean 'compact'"):
        load(path, "compacted")


def test_a_file_without_requests_is_no_trace(tmp_path):
    """An empty file has no format; a header alone no requests."""
    path = tmp_path / "x"
    path.write_bytes(b"")
    with pytest.raises(BadTrace, match="x, line 1: no format"):
        load(path)
    with pytest.raises(BadTrace, match="x, line 1: the file is empty"):
        load(path, "compact")
    with pytest.raises(BadTrace, match="x, line 1: the file has no requests"):
        load(write(path, [HEADER]))
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")
