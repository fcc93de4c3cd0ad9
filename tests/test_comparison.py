"""The comparison with peers: every cell has a source, every source says of which version it is."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "explanation" / "comparison.md").read_text()
SYSTEMS = ["Undercroft", "vLLM", "LMCache", "Mooncake", "SGLang", "Dynamo", "FlexKV"]
STAMP = re.compile(r"\b\d+\.\d+\.\d+\b|\bat ([0-9a-f]{7})\b|\bof 20\d\d-\d\d-\d\d\b")
PINNED = re.compile(r"/(?:blob|tree)/(v\d+\.\d+\.\d+|[0-9a-f]{40})/")


def tables(text: str) -> list[list[list[str]]]:
    found = re.findall(r"^\| \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    return [[r.strip("| ").split(" | ") for r in t.splitlines() if "---" not in r] for t in found]


def problems(text: str) -> list[str]:
    """What is wrong with the page, a line each."""
    defined = dict(re.findall(r"^\[\^([\w-]+)\]: (.*)$", text, re.MULTILINE))
    wrong = [f"{n} is defined twice" for n in defined if text.count(f"\n[^{n}]: ") > 1]
    used = re.findall(r"\[\^([\w-]+)\](?!:)", text)
    wrong += [f"{n} is not defined" for n in used if n not in defined]
    wrong += [f"nothing needs {n}" for n in defined if n not in used]
    for columns, *rows in tables(text):
        if [r[0].strip("*").split(" ")[0].removesuffix("'s") for r in rows] != SYSTEMS:
            wrong.append(f"other rows in the table of {columns}")
        for name, *cells in rows:
            if len(cells) != len(columns):
                wrong.append(f"{name}: other columns than {columns}")
            wrong += [f"no source: {name}: {c}" for c in cells if not re.search(r"\[\^", c)]
            others = r"\[\^(?!u-)" if name == "**Undercroft**" else r"\[\^u-(?!stock-)"
            wrong += [f"{name} is described by others: {c}" for c in cells if re.search(others, c)]
    return wrong + [w for item in defined.items() for w in wrong_source(*item)]


def wrong_source(name: str, text: str) -> list[str]:
    links = re.findall(r"\]\(([^)]+)\)", text)
    if name.startswith("u-"):
        ours = [u for u in links if "://" not in u] + re.findall(r"`tests/[\w/]+\.py", text)
        return [] if ours else [f"{name} names nothing in this repository"]
    stamp = STAMP.search(re.sub(r"\(http[^)]*\)|`[^`]*`", "", text))
    if not links or not stamp:
        return [f"{name} says no version, commit or date, or has no link"]
    wrong = [f"{name} is no https link" for u in links if not u.startswith("https://")]
    for url in (u for u in links if "github.com/" in u and "/pull/" not in u):
        pin = PINNED.search(url)
        if pin is None or (stamp[1] or f"v{stamp[0]}") != pin[1][: 7 if stamp[1] else None]:
            wrong.append(f"{name}: the link is not of {stamp[0]}")
    return wrong


def test_every_cell_has_a_source() -> None:
    """Defined, used, pinned to a version; the same systems in each of the tables."""
    assert problems(PAGE) == []
    assert len(tables(PAGE)) == 5


def test_measured_cases_exist() -> None:
    """Each case the page names is one of the benchmarks'."""
    sources = "".join(p.read_text() for p in (ROOT / "bench" / "cases").glob("*.py"))
    named = " ".join(re.findall(r"`python bench/run\.py ([\w ]+)`", PAGE)).split()
    assert len(named) >= 12, "the page's table is read wrongly"
    assert [name for name in named if f'"{name}"' not in sources] == []


def test_the_checks_bite() -> None:
    """Taken away, misspelt, not pinned, of another version, of another system: each is noticed."""
    for old, new in (
        ("[^v-fs] |", " |"),
        ("[^l-hybrid] |", "[^l-hybird] |"),
        ("[^u-kill]: `tests", "[^u-kill]: `text"),
        ("vLLM 0.32.0, [`fs/io.py`]", "vLLM, [`fs/io.py`]"),
        ("blob/v0.32.0/vllm/v1/kv_offload/tiering/fs/io.py", "blob/main/vllm/fs/io.py"),
        ("LMCache at 152841f", "LMCache at 0123456"),
        ("| layers of one shape", "| any[^k-guide] | layers of one shape"),
        ("pure Python[^u-deps]", "pure Python[^v-fs]"),
        ("| Dynamo KVBM |", "| KVBM |"),
    ):
        assert PAGE.count(old), old
        assert problems(PAGE.replace(old, new, 1)), new
