"""The source keeps to its own rules: sizes, names, exports, paths, documentation.

Everything here reads files; nothing imports the library. Lists of exceptions may only shrink: an
exception that is not needed any more fails too.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "undercroft"

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
# "tiers/disk.py" -> lines; "tiers/disk.py:DiskTier.open" -> lines. Never add, never raise.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}

# Words that say nothing: not in the name of a class or a module.
BANNED_WORDS = {"manager", "handler", "spec", "context", "metadata", "utils", "util"}
# Names that follow the engine's own interface (`OffloadingSpec`, `LoadStoreSpec`), and only where
# we speak to that engine.
FORCED_NAMES = {
    "engines/vllm": {
        "ConnectedManager",
        "ConnectedSpec",
        "UndercroftManager",
        "UndercroftSpec",
        "SlotSpec",
        "manager",
        "spec",
        "transfer_spec",
    }
}
# Words of other systems for which we have one of our own: not in any identifier we define.
FOREIGN_NAMES = re.compile(r"(^|_)(ref_?cnt|perc|medium_id|block_hash_to)(_|$)")

FRAGMENT = re.compile(r"\d+\.(breaking|feature|bugfix|format|perf|doc|misc)(\.\d+)?\.md")
# Folders of somebody's machine, and places that only one machine's pip looks at.
MACHINE_PATHS = re.compile(r"(?<![\w.~/-])/(root|work|home|Users|opt/(wheels|pypi))/")
INDEX_HOSTS = re.compile(
    r"pypi\.org|pythonhosted\.org|download\.pytorch|--(extra-)?index-url|--find-links"
)
# What git leaves where a merge was not finished.
UNMERGED = re.compile(r"^(<{7}|>{7}) \S+$", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One module of the library."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Its path below the package."""
        return self.path.relative_to(SRC).as_posix()


@cache
def sources() -> tuple[Source, ...]:
    """Every module of the library, parsed."""
    found = []
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text()
        found.append(Source(path, text, ast.parse(text, str(path))))
    return tuple(found)


@cache
def tracked() -> tuple[Path, ...]:
    """Every file of the repository; those git would add too, so that nothing hides until then."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (ROOT / name for name in sorted(set(done.stdout.split("\0"))) if name)
    return tuple(path for path in paths if path.is_file())


@cache
def project() -> dict[str, object]:
    """The `[project]` table of pyproject.toml."""
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST, int]]:
    """Every function with its dotted name and its length in lines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node, (node.end_lineno or 0) - node.lineno + 1
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def too_long(found: dict[str, int], limit: int, allowed: dict[str, int]) -> list[str]:
    """What is over the limit and not excepted, and exceptions that are too generous."""
    wrong = [f"{k}: {n} lines > {limit}" for k, n in found.items() if n > allowed.get(k, limit)]
    wrong += [
        f"{key}: its exception says {lines}, it has {found.get(key, 0)}: tighten or remove"
        for key, lines in allowed.items()
        if found.get(key, 0) != lines or lines <= limit
    ]
    return wrong


# --- sizes ---


def test_files_fit_in_a_head() -> None:
    """No module is longer than the limit."""
    found = {source.name: len(source.text.splitlines()) for source in sources()}
    assert found, "no sources found"
    assert not too_long(found, MAX_FILE_LINES, LONG_FILES)


def test_functions_fit_on_a_screen() -> None:
    """No function is longer than the limit, its docstring included."""
    found = {
        f"{source.name}:{name}": lines
        for source in sources()
        for name, _, lines in functions(source.tree)
    }
    assert not too_long(found, MAX_FUNCTION_LINES, LONG_FUNCTIONS)


def test_the_limits_bite() -> None:
    """A file over the limit is named, and so is an exception that is no longer needed."""
    assert too_long({"a": 501, "b": 500}, 500, {}) == ["a: 501 lines > 500"]
    assert not too_long({"a": 501}, 500, {"a": 501})
    assert too_long({"a": 502}, 500, {"a": 501})[0] == "a: 502 lines > 500"
    assert "tighten or remove" in too_long({"a": 400}, 500, {"a": 501})[0]


# --- exports ---


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import, also under `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from top_level(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from top_level(node.body + node.orelse + node.finalbody)
            for handler in node.handlers:
                yield from top_level(handler.body)


def bound_names(node: ast.stmt) -> set[str]:
    """Names a statement defines, imports aside."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    names = (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
    return {name for name in names if not name.startswith("_")}


@dataclass(frozen=True)
class Exports:
    """What a module says it exports, what it defines, and what it imports from our others."""

    declared: list[str] | None
    defined: set[str]
    imported: set[str]
    lazy: bool

    def wrong(self, *, package: bool) -> str | None:
        """What is wrong with `__all__`, if anything."""
        if self.declared is None:
            return f"no __all__ for {sorted(self.defined)}" if self.defined else None
        declared = set(self.declared)
        if self.declared != sorted(declared, key=export_order):
            return f"__all__ is not sorted: {sorted(declared, key=export_order)}"
        if missing := self.defined - declared:
            return f"public, but not in __all__: {sorted(missing)}"
        extra = declared - self.defined - self.imported
        if extra and not (package and self.lazy):
            return f"in __all__, but not defined here: {sorted(extra)}"
        return None


def export_order(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Constants, then classes, then the rest, as ruff's RUF022 has it; numbers by value."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    parts = re.findall(r"\d+|\D+", name)
    return kind, [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def exports(tree: ast.Module) -> Exports:
    declared: list[str] | None = None
    defined: set[str] = set()
    imported: set[str] = set()
    lazy = False
    for node in top_level(tree.body):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("undercroft."):
            imported |= {(alias.asname or alias.name) for alias in node.names}
        lazy |= isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
        defined |= {name for name in bound_names(node) if not name.startswith("_")}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            declared = ast.literal_eval(node.value)  # type: ignore[attr-defined]
    return Exports(declared, defined, imported, lazy)


def test_exports_are_the_public_names() -> None:
    """`__all__` is sorted, lists all that a module defines, and else only what is ours."""
    wrong = {}
    for source in sources():
        package = source.path.name == "__init__.py"
        if problem := exports(source.tree).wrong(package=package):
            wrong[source.name] = problem
    assert not wrong


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("__all__ = ['f']\ndef f(): ...\ndef _g(): ...\n", None),
        ("def f(): ...\n", "no __all__"),
        ("__all__ = ['f']\ndef f(): ...\nx = 1\n", "not in __all__: ['x']"),
        ("__all__ = ['f', 'g']\ndef f(): ...\n", "not defined here: ['g']"),
        ("__all__ = ['f', 'A']\ndef f(): ...\nclass A: ...\n", "not sorted: ['A', 'f']"),
        ("from numpy import g\n__all__ = ['g']\n", "not defined here: ['g']"),
        ("from undercroft.keys import g\n__all__ = ['g']\n", None),
    ],
)
def test_wrong_exports_are_seen(text: str, problem: str | None) -> None:
    """The check above notices each way in which `__all__` can be wrong."""
    found = exports(ast.parse(text)).wrong(package=False)
    assert (problem in found) if problem and found else found == problem


# --- words, asserts ---


def words(name: str) -> set[str]:
    """The words of a CamelCase or snake_case name, in small letters."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def test_names_say_something() -> None:
    """No class and no module is called by a word that says nothing."""
    wrong = []
    for source in sources():
        forced = {
            n for place, ns in FORCED_NAMES.items() if source.name.startswith(place) for n in ns
        }
        classes = {n.name for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef)}
        modules = set(source.path.relative_to(SRC).with_suffix("").parts)
        named = (classes | modules) - forced
        wrong += [f"{source.name}: {n}" for n in sorted(named) if words(n) & BANNED_WORDS]
    assert not wrong
    assert words("CacheManager") & BANNED_WORDS
    assert words("kv_utils") & BANNED_WORDS
    assert not words("Special") & BANNED_WORDS


def test_identifiers_use_our_words() -> None:
    """Names we define do not use another system's word for a thing we have a word for."""
    wrong = []
    for source in sources():
        for node in ast.walk(source.tree):
            name = None
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            if name and FOREIGN_NAMES.search(name):
                wrong.append(f"{source.name}:{getattr(node, 'lineno', 0)}: {name}")
    assert not wrong


def test_no_asserts_in_the_library() -> None:
    """`python -O` strips asserts, so invariants raise `Bug`; only `testing` may assert."""
    wrong = [
        f"{source.name}:{node.lineno}"
        for source in sources()
        if not source.name.startswith("testing/")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assert)
    ]
    assert not wrong


def test_exemptions_say_why() -> None:
    """A `noqa` and a `type: ignore` in the library each name a rule and give a reason."""
    why = re.compile(r"noqa: [A-Z]+\d+(, ?[A-Z]+\d+)* - \w|type: ignore\[[\w, -]+\] # \w")
    wrong = [
        f"{source.name}:{number}: {line.strip()}"
        for source in sources()
        for number, line in enumerate(source.text.splitlines(), 1)
        if re.search(r"# (noqa|type: ignore)", line) and not why.search(line)
    ]
    assert not wrong
    assert why.search("x = 1  # noqa: S101 - a reason")
    assert not why.search("x = 1  # noqa: S101")
    assert not why.search("x = 1  # type: ignore[misc]")


# --- plug-ins, errors, docs ---


def test_every_plug_in_has_tests() -> None:
    """Each plug-in that pyproject.toml declares exists and has a test file of its own."""
    missing = []
    groups = project()["entry-points"]
    assert isinstance(groups, dict)
    for group, points in groups.items():
        for name, target in points.items():
            module = target.partition(":")[0].removeprefix("undercroft.").replace(".", "/")
            if not ((SRC / f"{module}.py").is_file() or (SRC / module / "__init__.py").is_file()):
                missing.append(f"{group} {name}: no module {target}")
            room, _, stem = module.rpartition("/")
            if not (
                list((ROOT / "tests" / room).glob(f"test_{stem}*.py"))
                or list((ROOT / "tests" / room / stem).glob("test_*.py"))
            ):
                missing.append(f"{group} {name}: no tests/{room}/test_{stem}*.py")
    assert not missing


def test_every_error_is_documented() -> None:
    """docs/reference/errors.md has one heading per error class, and no other."""
    tree = next(source.tree for source in sources() if source.name == "errors.py")
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    documented = re.findall(r"^## `(\w+)`$", text, flags=re.MULTILINE)
    assert documented == defined


def test_links_lead_somewhere() -> None:
    """Relative links in Markdown files point to files, and to headings, that exist."""
    broken = []
    for path in tracked():
        if path.suffix != ".md":
            continue
        prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            target, _, heading = link.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            there = (path.parent / target) if target else path
            if not there.exists() or (heading and heading not in anchors(there)):
                broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert not broken


def anchors(path: Path) -> set[str]:
    """The heading anchors of a Markdown file, made as code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def test_the_commands_in_the_docs_name_what_exists() -> None:
    """Each `--kv-transfer-config` in the docs is JSON whose class is in the module it names."""
    num_seen = 0
    for path in tracked():
        if path.suffix != ".md":
            continue
        for raw in re.findall(r"--kv-transfer-config '(\{.*?\})'", path.read_text(), re.DOTALL):
            config = json.loads(raw)
            extra = config["kv_connector_extra_config"]
            for name, where in (
                (extra.get("spec_name"), extra.get("spec_module_path")),
                (config["kv_connector"], config.get("kv_connector_module_path")),
            ):
                if name is None or where is None:
                    continue  # vLLM's own
                num_seen += 1
                module = where.replace(".", "/").removeprefix("undercroft/")
                text = "".join(p.read_text() for p in modules(module))
                assert f'"{name}"' in text, f"{path.name}: no {name}"
    assert num_seen >= 1


def modules(name: str) -> list[Path]:
    file = SRC / f"{name}.py"
    return [file] if file.is_file() else [SRC / name / "__init__.py"]


def test_change_fragments_are_named_by_number_and_kind() -> None:
    """changes/ holds `<issue>.<kind>.md` and its README, as CONTRIBUTING says."""
    names = [path.name for path in (ROOT / "changes").iterdir()]
    assert not [n for n in names if n != "README.md" and not FRAGMENT.fullmatch(n)]


# --- nothing of one machine ---


def test_nothing_of_one_machine() -> None:
    """No tracked text names a folder of somebody's machine or a package index."""
    wrong = []
    for path in tracked():
        if path == Path(__file__).resolve():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for pattern in (MACHINE_PATHS, INDEX_HOSTS, UNMERGED):
            wrong += [f"{path.relative_to(ROOT)}: {m[0]}" for m in pattern.finditer(text)]
    assert not wrong


def test_the_path_pattern_bites() -> None:
    """It finds a home folder, and leaves ordinary paths and words alone."""
    assert MACHINE_PATHS.search("in " + "/root/.cache")
    assert MACHINE_PATHS.search('"' + "/home/someone/x")
    assert not MACHINE_PATHS.search("src/undercroft/work/x, /nvme/kv, https://a.example/work/x")
    assert INDEX_HOSTS.search("https://pypi.org/simple")
    assert UNMERGED.search("all:\n" + "<" * 7 + " HEAD\n")
