"""The Grafana dashboard on a real Prometheus that scrapes a real server with our offloading."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.lab.engine import prompt
from tests.engines.vllm.lab.prometheus import Prometheus, prometheus_path
from tests.engines.vllm.lab.server import Server
from undercroft.engines.vllm.metrics import PREFIX, metric_definitions

DASHBOARD = Path(__file__).parents[4] / "dashboards" / "undercroft.json"
VARIABLES = {"$__rate_interval": "10m", "$model_name": ".*", "$instance": ".*"}
NO_PROMETHEUS = (
    "there is no Prometheus server: it is no Python package, so `make test` fetches it with apt, "
    "where there is one"
)


def loaded() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return dashboard


def panels() -> list[dict[str, Any]]:
    return [panel for panel in loaded()["panels"] if panel["type"] != "row"]


def targets() -> Iterator[tuple[str, str, str]]:
    """Panel title, expression and legend of every query."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


def filled_in(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, f"a variable that nobody defines: {expression}"
    return expression


PROMPT_TOKENS = "vllm:prompt_tokens_total"

# --- what needs no server ---


def test_every_metric_is_shown_somewhere() -> None:
    """And nothing is asked for that we do not have: a misspelt name shows an empty panel."""
    text = " ".join(expression for _, expression, _ in targets())
    asked = set(re.findall(rf"{PREFIX}(\w+)", text))
    asked = {re.sub(r"_(total|bucket)$", "", name) for name in asked}
    assert asked == {name.removeprefix(PREFIX) for name in metric_definitions()}


def test_panels_have_what_grafana_wants() -> None:
    """Ids and places of their own, a title, the chosen Prometheus; variables that are defined."""
    dashboard = loaded()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        mine = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not mine & cells, f"{panel['title']} lies on another"
        cells |= mine
        assert panel["title"]
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    defined = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__rate_interval", "__all"}
    assert used == defined


# --- with a server ---


def server_value(server: Server, name: str) -> float:
    """What the server itself shows, over all labels."""
    return sum(v for k, v in server.metrics().items() if k.partition("{")[0] == name)


def work(server: Server) -> None:
    """Stores, loads from host memory, restores from disk, evictions, resets of vLLM's cache."""
    prompts = [prompt(650, seed=700 + number) for number in range(4)]  # 20 chunks each
    for each in prompts + prompts[-1:] + prompts:
        server.complete(each)
        server.reset()


@pytest.mark.timeout(400)
@pytest.mark.skipif(prometheus_path() is None, reason=NO_PROMETHEUS)
def test_every_query_gives_data(tmp_path: Path, served: Server) -> None:
    """Each one parses, finds series with the labels that its legend names, and numbers in them."""
    program = prometheus_path()
    assert program is not None
    served.complete(prompt(100, seed=1))  # now all counters are there
    with Prometheus(program, tmp_path, served.port) as base:
        base.await_value(PROMPT_TOKENS, server_value(served, PROMPT_TOKENS))
        work(served)
        base.await_value(PROMPT_TOKENS, server_value(served, PROMPT_TOKENS))
        wrong = []
        for title, expression, legend in targets():
            series = base.query(filled_in(expression))
            labels = set(re.findall(r"{{(\w+)}}", legend))
            if not series:
                wrong.append(f"{title}: no data: {expression}")
            if any(labels - set(each["metric"]) for each in series):
                wrong.append(f"{title}: {legend}: not in {series[0]['metric']}")
            if series and all(math.isnan(float(each["value"][1])) for each in series):
                wrong.append(f"{title}: only NaN: {expression}")
        assert not wrong, "\n".join(wrong)
        check_variables(base)
        check_numbers(base)


def check_variables(base: Prometheus) -> None:
    """What the drop-down lists offer."""
    offered = {}
    for variable in loaded()["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert asked
            offered[variable["name"]] = base.label_values(filled_in(asked[1]), asked[2])
    assert offered["model_name"] == ["tiny"]
    assert len(offered["instance"]) == 1


def check_numbers(base: Prometheus) -> None:
    """Not only some numbers: those of what was done."""

    def value(expression: str) -> float:
        (series,) = base.query(filled_in(expression))
        return float(series["value"][1])

    by_title = {title: expression for title, expression, _ in targets()}
    assert value(by_title["Switched on"]) == 1
    assert value(by_title["Levels usable"]) == 1
    assert 0.2 < value(by_title["Prompt tokens not computed"]) <= 1
    assert value(by_title["Prefill seconds saved, a second"]) > 0
    assert value(f'{PREFIX}hit_tokens_total{{level="disk"}}') > 0
    assert value(f'{PREFIX}hit_tokens_total{{level="host"}}') > 0
    found = value(f"sum({PREFIX}hit_tokens_total)")
    assert found == value("sum(vllm:external_prefix_cache_hits_total)")
    pace = value(f"{PREFIX}prefill_seconds_per_token")
    assert 0.2 < value(f"sum({PREFIX}saved_prefill_seconds_total)") / (found * pace) < 5
