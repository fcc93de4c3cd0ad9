"""Every code block of every page does what it says; every name a page uses is there.

Python runs, page by page, as one reader would type it. JSON and TOML parse, and settings among them
are accepted. YAML is part of a manifest in examples/kubernetes, whose test looks at the rest.
PromQL parses. Of shell, the syntax is checked, and that each target, file, module and flag exists.
"""

import ast
import itertools
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engines.vllm.lab.prometheus import prometheus_path
from undercroft.cli.main import COMMANDS as COMMANDS_OF_OURS
from undercroft.cli.main import build_parser
from undercroft.settings import load

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "undercroft"
PAGES = sorted(p for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
LANGUAGES = {"python", "json", "toml", "yaml", "promql", "sh", "text", ""}
COMMANDS = {"cat", "cd", "curl", "df", "du", "export", "grep", "head", "install", "ls", "pip", "rm"}
COMMANDS |= {"source"}
"""Programs that a block may use and whose arguments are theirs alone."""
TO_BE_WRITTEN = {"tests/policies/test_newest.py", "tests/tiers/test_attic.py"}
"""Files of the plug-ins that the how-to pages are examples of."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        indent, language, body = found.groups()
        body = re.sub(f"^{indent}", "", body, flags=re.MULTILINE)
        yield Block(page, text.count("\n", 0, found.start()) + 1, language, body)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks(*languages: str) -> list[Any]:
    return [pytest.param(b, id=str(b)) for b in BLOCKS if b.language in languages]


def test_all_blocks_are_seen_and_say_what_they_are() -> None:
    """As many as there are fences, each in a language that is checked below, or plain text."""
    fences = sum(p.read_text().count("```") for p in PAGES)
    assert fences == 2 * len(BLOCKS)
    assert not [str(b) for b in BLOCKS if b.language not in LANGUAGES]
    assert len(blocks("python")) >= 5
    assert len(blocks("sh")) >= 5


# --- Python ---


class _Recorder:
    """Stands for `vllm.LLM`, which would load a model."""

    def __init__(self, **arguments: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs

        unknown = set(arguments) - set(EngineArgs.__dataclass_fields__)
        assert not unknown, f"vLLM has no {unknown}"
        load(arguments["kv_transfer_config"].kv_connector_extra_config)


@pytest.mark.parametrize(
    "page", sorted({b.page for b in BLOCKS if b.language == "python"}), ids=lambda p: p.name
)
def test_python_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python blocks of a page, in order, in one namespace."""
    found = [b for b in blocks_of(page) if b.language == "python"]
    if any("from vllm import LLM" in b.text for b in found):
        import vllm

        monkeypatch.setattr(vllm, "LLM", _Recorder)
    scope: dict[str, Any] = {"__name__": page.stem}
    for block in found:
        exec(compile("\n" * block.line + block.text, str(page), "exec"), scope)


# --- JSON, TOML ---


@pytest.mark.parametrize("block", blocks("json"))
def test_json_is_accepted(block: Block) -> None:
    """Settings, or what vLLM takes as `--kv-transfer-config`."""
    value = json.loads(block.text)
    load(value.get("kv_connector_extra_config", value))


@pytest.mark.parametrize("block", blocks("toml"))
def test_toml_is_accepted(block: Block) -> None:
    """Settings, or the entry points of a plug-in in a group that we read."""
    value = tomllib.loads(block.text)
    if "project" not in value:
        load(value)
        return
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(value["project"]["entry-points"]) <= set(ours)


# --- YAML ---


def is_part_of(part: object, whole: object) -> bool:
    """Whether all of `part` is in `whole`, in its place; lists may lack items."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            name in whole and is_part_of(value, whole[name]) for name, value in part.items()
        )
    if isinstance(part, list):
        return isinstance(whole, list) and all(
            any(is_part_of(item, other) for other in whole) for item in part
        )
    return part == whole


def everything_in(value: object) -> Iterator[object]:
    """`value` and all that is in it."""
    yield value
    for inner in value.values() if isinstance(value, dict) else value:  # type: ignore[attr-defined]
        if isinstance(inner, dict | list):
            yield from everything_in(inner)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_yaml_is_part_of_a_manifest(block: Block) -> None:
    """An excerpt: what it says is said by a file that people can use, and is checked there."""
    part = yaml.safe_load(block.text)
    assert isinstance(part, dict)
    manifests = (
        document
        for path in (ROOT / "examples" / "kubernetes").glob("*.yaml")
        for document in yaml.safe_load_all(path.read_text())
    )
    assert any(is_part_of(part, inner) for whole in manifests for inner in everything_in(whole))


def test_the_yaml_check_bites() -> None:
    """A value, a name or a place that is otherwise is seen."""
    whole = {"a": [{"b": 1, "c": [1, 2]}, {"d": 2}]}
    assert is_part_of({"a": [{"c": [2]}]}, whole)
    for wrong in ({"a": [{"b": 2}]}, {"a": [{"b": 1, "d": 2}]}, {"b": 1}, {"a": {"b": 1}}):
        assert not is_part_of(wrong, whole)


# --- PromQL ---


def queries() -> list[str]:
    """Every line of the blocks, and spans that call a function of Prometheus."""
    lines = [line for b in BLOCKS if b.language == "promql" for line in b.text.splitlines()]
    prose = [s for page in PAGES for s in spans(page) if re.match(r"\w+( by )?[ (].*vllm:", s)]
    return [query for query in [*lines, *prose] if query.strip()]


@pytest.mark.skipif(
    prometheus_path() is None, reason="promtool comes with Prometheus, which is no Python package"
)
def test_queries_parse(tmp_path: Path) -> None:
    """As Prometheus itself reads them; and the check can fail."""
    program = prometheus_path()
    assert program is not None
    tool = Path(program).with_name("promtool")
    found = queries()
    assert len(found) >= 5
    for texts, code in ((found, 0), (["sum(rate(x[1h])"], 1)):
        rules = [{"record": f"a:b{number}", "expr": text} for number, text in enumerate(texts)]
        file = tmp_path / "rules.json"
        file.write_text(json.dumps({"groups": [{"name": "docs", "rules": rules}]}))
        done = subprocess.run(
            [str(tool), "check", "rules", str(file)],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == code, done.stdout + done.stderr


# --- shell ---


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a block, as words; assignments before a command are left out."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="\n;|&()<>")
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    lexer.commenters = ""  # it would take the end of the line along
    words: list[str] = []
    in_comment = False
    for word in lexer:
        if word and set(word) <= set("\n;|&()"):
            if words:
                yield words
            words, in_comment = [], in_comment and "\n" not in word
        elif in_comment or word.startswith("#"):
            in_comment = True
        elif words or not re.match(r"\w+=", word):
            words.append(word)
    if words:
        yield words


@cache
def vllm_flags() -> frozenset[str]:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    return frozenset(flag for action in parser._actions for flag in action.option_strings)


def check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    rules = re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE)
    variables = re.findall(r"^([A-Z]+) \?=", makefile, re.MULTILINE)
    for word in arguments:
        if "=" in word:
            assert word.split("=")[0] in variables, word
        else:
            assert word in rules, f"no target {word}"


def check_vllm(arguments: list[str]) -> None:
    assert arguments[0] == "serve"
    for flag in (word for word in arguments if word.startswith("-")):
        assert flag in vllm_flags(), f"vllm serve has no {flag}"
    if "--kv-transfer-config" in arguments:
        config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
        expected = {"kv_connector", "kv_role", "kv_connector_extra_config"}
        if config["kv_connector"] == "UndercroftConnector":
            expected.add("kv_connector_module_path")
        assert set(config) == expected
        load(config["kv_connector_extra_config"])


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        assert arguments[1] in ("pytest", "undercroft"), arguments
        return
    if arguments[0] == "-c":
        compile(arguments[1], "-c", "exec")
        return
    program = (ROOT / arguments[0]).read_text()
    for flag in (word for word in arguments[1:] if word.startswith("-")):
        assert f'"{flag}"' in program, f"{arguments[0]} has no {flag}"


def check_pytest(arguments: list[str]) -> None:
    for word in arguments:
        assert word.startswith("-") or (ROOT / word.split("::")[0]).exists(), word


def check_undercroft(arguments: list[str]) -> None:
    """The command's own parser takes the words; what it leaves over is vLLM's, or a script's."""
    assert arguments[0] in COMMANDS_OF_OURS, f"undercroft has no {arguments[0]}"
    if len(arguments) == 1:
        return  # named, not typed
    args, rest = build_parser(arguments[:1]).parse_known_args(arguments)
    if arguments[0] in ("serve", "doctor"):
        for flag in (word for word in rest if word.startswith("-")):
            assert flag in vllm_flags(), f"neither undercroft nor vllm serve has {flag}"
    else:
        assert args.takes_rest or not rest, f"undercroft {arguments[0]} has no {rest}"


def check_kubectl(arguments: list[str]) -> None:
    """Files that it reads are there; what it runs in a container is a command of ours."""
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    flags = {"-f", "--from-file"}
    for name, value in itertools.pairwise(words):
        assert name not in flags or (ROOT / value).exists(), value
    for word in words:
        flag, _, value = word.partition("=")
        assert flag not in flags or not value or (ROOT / value).exists(), value
    if words is not arguments:
        program, *rest = arguments[len(words) + 1 :]
        CHECKS[program](rest)


CHECKS = {
    "kubectl": check_kubectl,
    "docker": check_kubectl,
    "undercroft": check_undercroft,
    "make": check_make,
    "vllm": check_vllm,
    "python": check_python,
    "pytest": check_pytest,
}


@pytest.mark.parametrize("block", blocks("sh"))
def test_shell_names_what_exists(block: Block) -> None:
    """Bash can parse it; targets, files and flags are there; other programs are well known ones."""
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, timeout=100)
    found = list(commands(block.text))
    assert found
    for program, *arguments in found:
        if program in CHECKS:
            CHECKS[program](arguments)
        else:
            assert program in COMMANDS, f"{program} is in none of the lists"


def test_shell_checks_bite() -> None:
    """A wrong target, flag, file or setting is seen; comments, quotes and pipes are understood."""
    assert list(commands("A=1 x 'b c' # d\ny | z\\\n 1\n")) == [["x", "b c"], ["y"], ["z", "1"]]
    for wrong in (
        lambda: check_make(["demoo"]),
        lambda: check_vllm(["serve", "M", "--no-such-flag"]),
        lambda: check_python(["bench/run.py", "--no-such-flag"]),
        lambda: check_pytest(["tests/no_such.py"]),
        lambda: check_undercroft(["lss"]),
        lambda: check_undercroft(["ls", "--no-such-flag"]),
        lambda: check_undercroft(["serve", "M", "--no-such-flag"]),
        lambda: check_kubectl(["apply", "-f", "no-such.yaml"]),
        lambda: check_kubectl(["create", "--from-file=no-such.json"]),
        lambda: check_kubectl(["exec", "pod", "--", "undercroft", "lss"]),
    ):
        with pytest.raises((AssertionError, OSError)):
            wrong()


# --- names in prose ---


def spans(page: Path) -> list[str]:
    """The `code spans` of a page, fenced blocks left out."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def test_commands_in_prose_exist() -> None:
    """`make ...`, `python ...`, `pytest ...` and `tests/...` in running text."""
    num_seen = 0
    for page in PAGES:
        for span in spans(page):
            program, _, rest = span.partition(" ")
            if program in CHECKS and program != "vllm" and rest and "…" not in rest:
                CHECKS[program]([w for w in shlex.split(rest) if w != "..."])
                num_seen += 1
            path, _, name = span.partition("::")
            if re.fullmatch(r"(src|tests|bench|docs|examples|scripts)/[\w/.]+\w", path) and (
                path not in TO_BE_WRITTEN
            ):
                assert (ROOT / path).exists(), f"{page.name}: {span}"
                defined = (ROOT / path).read_text() if name else ""
                assert not name or f"def {name}(" in defined, f"{page.name}: {span}"
                num_seen += 1
    assert num_seen >= 5


@cache
def messages() -> str:
    """All texts of the library, one a line; what is filled in later reads `…`."""
    found = []
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d+)?[a-z]", "…", node.value))
    return "\n".join(found)


def test_messages_in_the_docs_are_ours() -> None:
    """A span with `…` quotes a log line or an error; every part of it is in the library's texts."""
    num_seen = 0
    for page in PAGES:
        for span in spans(page):
            if "…" not in span:
                continue
            num_seen += 1
            for part in span.split("…"):
                words = part.strip(" ':,;.\"()")
                assert words in messages(), f"{page.name}: nothing says {words!r}"
    assert num_seen >= 5


def test_metrics_in_the_docs_are_ours() -> None:
    """Each `vllm:undercroft_...` is a metric, with or without its `_total`."""
    reference = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    names = set(re.findall(r"^\| `(\w+)` \| (?:counter|gauge|histogram)", reference, re.MULTILINE))
    for page in PAGES:
        for name in re.findall(r"vllm:undercroft_(\w+)", page.read_text()):
            short = re.sub(r"_(total|sum|count|bucket)$", "", name)
            assert short in names, f"{page.name}: {name}"


def test_every_page_is_in_the_index() -> None:
    """docs/README.md leads to each page, or to the folder of design notes."""
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / t).resolve() for t in re.findall(r"\]\(([^)#]+)", index.read_text())}
    assert {p for p in PAGES if p.is_relative_to(ROOT / "docs")} - {index} <= linked
