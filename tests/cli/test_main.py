"""The frame of the command: exit codes, errors, what goes where, what is imported."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import pytest

from tests.cli.rig import ROOT, environment, undercroft
from undercroft.cli import main as main_module
from undercroft.cli.main import COMMANDS, INTERRUPTED, OWN_FAULT, main
from undercroft.cli.output import CommandFailed, Exit, add_command
from undercroft.errors import (
    Bug,
    ConfigError,
    CorruptChunk,
    FormatTooNew,
    TierTimeout,
    TierUnavailable,
    UnknownPlugin,
)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., int]], None]:
    """Makes a function the subcommand `try`."""

    def install(run: Callable[..., int]) -> None:
        module = ModuleType("undercroft.cli.attempt")
        module.add_parser = lambda subparsers: add_command(subparsers, "attempt", "for tests")  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "undercroft.cli.attempt", module)
        monkeypatch.setattr(main_module, "COMMANDS", ("attempt",))

    return install


def raising(error: BaseException) -> Callable[..., int]:
    def run(_args: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (UnknownPlugin("x"), 2),
        (TierUnavailable("x"), 3),
        (TierTimeout("x"), 3),
        (CorruptChunk("x"), 1),
        (FormatTooNew("x"), 1),
        (PermissionError(13, "denied", "/there"), 3),
        (CommandFailed("x", Exit.USAGE), 2),
        (CommandFailed("x", Exit.UNREACHABLE), 3),
    ],
)
def test_an_error_is_one_line_and_the_right_code(
    command: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
) -> None:
    """Each kind of error ends in its exit code and one line, never a traceback."""
    command(raising(error))
    assert main(["attempt"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {error}\n"


def test_an_error_is_json_with_json(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--json` standard output is one JSON value, an error included."""
    command(raising(ConfigError("host is\nmissing")))
    assert main(["attempt", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": {"type": "ConfigError", "message": "host is missing"}}
    assert err == "error: host is missing\n"


@pytest.mark.parametrize("error", [Bug("slots overlap"), ZeroDivisionError("mean of nothing")])
def test_our_own_faults_show_a_traceback(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    """A broken invariant is neither hidden nor taken for a finding."""
    command(raising(error))
    assert main(["attempt"]) == OWN_FAULT
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert str(error) in err
    assert "please report" in err


def test_an_interrupt_is_quiet(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends a command without a traceback."""
    command(raising(KeyboardInterrupt()))
    assert main(["attempt"]) == INTERRUPTED
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["config", "--no-such-flag"]])
def test_wrong_usage_is_exit_code_2(words: list[str]) -> None:
    """No command, an unknown one, an unknown flag."""
    done = undercroft(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage:" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_command_explains_itself() -> None:
    """`--help` of the whole names each command, whose own `--help` and module are there."""
    whole = undercroft("--help")
    assert whole.returncode == 0
    for name in COMMANDS:
        assert f"\n    {name} " in whole.stdout, name
        module = import_module(f"undercroft.cli.{name}")
        assert callable(module.run)
    done = undercroft(COMMANDS[0], "--help")
    assert done.returncode == 0
    assert "--no-color" in done.stdout


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)])
def test_help_fits_the_terminal(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line is wider than 80 columns there, but for commands, to be copied whole."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    lines = capsys.readouterr().out.splitlines()
    wide = [line for line in lines if len(line) > 80 and not line.startswith("  undercroft ")]
    assert len(lines) > 5
    assert wide == []


def test_no_command_lists_them() -> None:
    """`undercroft` alone says what there is, on standard error."""
    done = undercroft()
    assert (done.returncode, done.stdout) == (2, "")
    assert "\n    doctor " in done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    """`undercroft ... | head -1` prints no traceback."""
    line = (
        "import sys, types\n"
        "from undercroft.cli import main as m, output as o\n"
        "module = types.ModuleType('undercroft.cli.attempt')\n"
        "module.add_parser = lambda s: o.add_command(s, 'attempt', 'x')\n"
        "def run(args):\n"
        "    out = o.output_for(args)\n"
        "    for n in range(200_000): out.say(str(n))\n"
        "    return 1\n"
        "module.run = run\n"
        "sys.modules['undercroft.cli.attempt'] = module\n"
        "m.COMMANDS = ('attempt',)\n"
        "sys.exit(m.main(['attempt']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", line],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_no_engine_is_imported() -> None:
    """The commands start where no engine is installed, and start fast."""
    modules = ", ".join(f"undercroft.cli.{name}" for name in ("main", "output", *COMMANDS))
    line = (
        f"import sys, {modules}\n"
        "heavy = {'torch', 'vllm', 'transformers', 'zmq', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", line], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_is_installed_under_its_name() -> None:
    """pyproject.toml names the function that `python -m undercroft` calls."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["undercroft"].partition(":")
    assert getattr(import_module(module), function) is main
    done = undercroft("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "undercroft")


def test_wrong_usage_is_json_with_json() -> None:
    """As every other error; the usage is on standard error as ever."""
    done = undercroft("ls", "--json", "--no-such-flag")
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert json.loads(done.stdout) == {
        "error": {"type": "ConfigError", "message": "unrecognized arguments: --no-such-flag"}
    }


def test_a_fault_of_our_own_is_json_with_json(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The program that reads it gets one value, whatever happens."""
    command(raising(ZeroDivisionError("mean of nothing")))
    assert main(["attempt", "--json"]) == OWN_FAULT
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "ZeroDivisionError"


@pytest.mark.parametrize("redirection", [">/dev/full", ">&-", ">&- 2>&-", "2>&-"])
@pytest.mark.parametrize("more", ["", "--json"])
def test_output_that_cannot_be_written_is_no_fault(redirection: str, more: str) -> None:
    """A full disk is an error in one line; a closed stream was meant so."""
    command = f'"$0" -m undercroft config --set host=1GiB {more} {redirection}'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == (3 if "full" in redirection else 0)
