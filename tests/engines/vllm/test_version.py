"""Another vLLM than those we are written for: one line, whichever way it shows."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm.version import __version__

from undercroft.engines.vllm.version import doubt, explain
from undercroft.errors import ConfigError


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.1rc2.dev3", "0.32", "dev"])
def test_known_versions_are_not_doubted(version):
    """Builds and candidates of a version we serve count as that version."""
    assert doubt(version) is None


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "0.3.2", "0.320.0"])
def test_other_versions_get_a_line_with_both(version):
    """The line has the versions we serve and the one that is here."""
    line = doubt(version)
    assert line is not None
    assert "0.32 and 0.33" in line
    assert version in line


def test_the_installed_version_is_served():
    """What the tests run on is what users are promised."""
    assert doubt(__version__) is None


def test_a_name_that_vllm_lacks_is_explained():
    """A too old or too new vLLM fails at import, and says what is here and what is needed."""
    error = ImportError("cannot import name 'X' from 'vllm.v1.y'", name="vllm.v1.y")
    told = explain(error)
    assert isinstance(told, ConfigError)
    assert "0.32 and 0.33" in str(told)
    assert __version__ in str(told)
    assert "cannot import name 'X'" in str(told)
    assert "\n" not in str(told)


def test_other_import_errors_stay_as_they_are():
    """A missing xxhash is not vLLM's fault."""
    error = ImportError("No module named 'xxhash'", name="xxhash")
    assert explain(error) is error


HIDING = """
import sys

class Hiding:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hiding())
import undercroft.engines.vllm
"""


HIDDEN = {"vllm": "no vLLM is installed", "vllm.config": "lacks something it needs"}


def importing(hidden):
    """In a process where that is not there."""
    return subprocess.run(
        [sys.executable, "-c", HIDING, hidden],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.fixture(scope="module")
def imported():
    """All of them side by side: each takes a core some seconds."""
    with ThreadPoolExecutor(len(HIDDEN)) as pool:
        return dict(zip(HIDDEN, pool.map(importing, HIDDEN), strict=True))


@pytest.mark.parametrize("hidden", HIDDEN)
def test_importing_the_adapter_says_so(hidden, imported):
    """Where vLLM, or what we need of it, is not there."""
    done, words = imported[hidden], HIDDEN[hidden]
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("undercroft.errors.ConfigError: ")
    assert words in last
