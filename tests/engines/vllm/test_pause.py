"""What of vLLM's calls tells a sleep from a reset by hand, and what the setting for it refuses."""

from types import FunctionType

import pytest
from rig import running
from vllm.v1.engine import core

from undercroft.engines.vllm import spec
from undercroft.engines.vllm.pause import is_pause
from undercroft.errors import ConfigError


def called_from(name, module):
    """What `is_pause` says to a function of that name in that module."""
    code = compile("is_pause()", "there", "eval").replace(co_name=name)
    return FunctionType(code, {"is_pause": is_pause, "__name__": module})()


@pytest.mark.parametrize(
    ("name", "module", "expected"),
    [
        ("_reset_caches", "vllm.v1.engine.core", True),
        ("_reset_caches", "elsewhere", False),
        ("reset_prefix_cache", "vllm.v1.engine.core", False),
    ],
)
def test_only_the_engines_own_way_is_a_pause(name, module, expected):
    """Any other caller has everything dropped."""
    assert called_from(name, module) is expected
    assert not is_pause()


def test_this_vllm_has_that_way():
    """If it goes, sleep drops everything whatever was set: then the setting has to go, too."""
    assert callable(core.EngineCore._reset_caches)


def test_weights_that_stay_and_weights_that_are_replaced_exclude_each_other(monkeypatch):
    """One of the two was not meant: refused at start, in one line."""
    monkeypatch.setattr(spec, "model_facts", lambda *_: {"weight_transfer": "x"})
    with (
        pytest.raises(ConfigError, match=r"keep_across_sleep .* leave one of them out"),
        running({"host": "4MiB", "keep_across_sleep": True}),
    ):
        pass
    with running({"host": "4MiB"}):
        pass
