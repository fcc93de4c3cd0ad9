"""Write docs/reference/models.md from docs/reference/models.json, what real engines gave.

`python scripts/models_page.py` writes it; with `--check` it only compares, and fails if unlike.
"""

import json
import sys
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
RESULTS, PAGE = REFERENCE / "models.json", REFERENCE / "models.md"
COMMON = (
    "host memory",
    "disk, after a restart",
    "2 blocks a chunk",
    "3 blocks a chunk",
    "chunked prefill",
)
HEAD = """# Models and set-ups

<!-- Written by scripts/models_page.py from models.json; edit those. -->

What a real vLLM 0.32 gave, on a CPU, with tiny models of each shape. **Served** means: answers from
loaded chunks are those of computed ones, token for token and with log-probabilities within 0.001,
and as many tokens are found as in the engine's own prefix cache, in whole chunks. As a control,
what was loaded is overwritten by zeros: the tokens of at least one answer then change, and of each
answer the tokens, or a log-probability by over 0.03. Where less was compared, the page says so.
**Refused** means: the engine does not start, and says why. **Failed** means: the case's test
did not pass when it was run last. The cases are in
`tests/engines/vllm/lab/cases.py`; `make models` runs them all and writes this page anew.

"""
NOTES = """
Where vLLM's own answers after a hit in its prefix cache differ from those without, loaded chunks
have to give one of the two ("own cache"): LFM2, and latents. Mamba 2 models run on a CPU only
with a change to vLLM that the tests make (`tests/engines/vllm/lab/patches.py`); without, it ends
any prompt in an IndexError as soon as its prefix cache is on, whatever the connector. The n-gram
proposer runs without its compiler there, and Qwen3-Next takes drafts by stand-ins for two kernels
that vLLM has for GPUs only. vLLM hands out recurrent state at the last whole block of
a prompt (and where chunked prefill stops); with `blocks_per_chunk` above 1 it can be stored only if
a chunk ends there too, so keep 1 for hybrid models. Not run: MTP drafters, models with images (only
their keys are checked), Mamba 1 (broken in vLLM 0.32 on CPUs), other kernels than the CPU's.

Drafters with weights of their own: EAGLE-3 completes its configuration on the last pipeline stage
only, so engines of other `pipeline_parallel_size` find nothing of each other's; with stages, vLLM
0.32 does not start with the first EAGLE at all (`Duplicate layer name`), whatever the connector.
vLLM certifies pages by the target's KV heads: a drafter with another number of them makes all pages
of its engine direct, whatever `canonical_layout` says, and one line at start says so.
"""
ROOM = """
## Tokens held in equal bytes

vLLM's own offloading takes a slot of the size of a whole block, all groups together, for every
chunk of whatever group. Here a chunk takes the bytes of its own group, up to the next 4 KiB, and of
recurrent state one block for each chunk. Ratios above 1 need groups of different sizes. The last
column counts the chunks that the run left in host memory: sliding windows and state keep few.

| Shape | Set-up | Bytes of a chunk, by group | Slot of vLLM's own | One chunk of each group | As held in this run |
|---|---|---|---|---|---|
"""  # noqa: E501 - a table


def page(cases: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    return HEAD + "".join(_matrix(cases)) + NOTES + "".join(_others(cases)) + _room(cases)


def _by_shape(cases: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    shapes: dict[str, list[dict[str, Any]]] = {}
    for case in cases.values():
        shapes.setdefault(case["shape"], []).append(case)
    return dict(sorted(shapes.items()))


def _matrix(cases: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"| Shape | Groups | {' | '.join(COMMON)} |\n", "|---" * (len(COMMON) + 2) + "|\n"]
    for shape, found in _by_shape(cases).items():
        cells = {case["feature"]: _cell(case) for case in found}
        if COMMON[0] not in cells or COMMON[2] not in cells:
            continue
        groups = next((case["groups"] for case in found if "groups" in case), [])
        kinds = [group["kind"] for group in groups]
        named = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        row = " | ".join(cells.get(feature, "-") for feature in COMMON)
        lines.append(f"| {shape} | {named or '-'} | {row} |\n")
    return lines


def _cell(case: dict[str, Any]) -> str:
    own = case.get("compared_with") == "own cache"
    outcome = "**failed**" if case["outcome"] == "failed" else case["outcome"]
    return outcome + (" (own cache)" if own else "") + _fewer(case)


def _fewer(case: dict[str, Any]) -> str:
    return f", fewer hits: {case['why_fewer']}" if "why_fewer" in case else ""


def _others(cases: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["\n## More set-ups\n\n", "| Shape | Set-up | | |\n", "|---|---|---|---|\n"]
    for shape, found in _by_shape(cases).items():
        for case in sorted(found, key=lambda case: str(case["feature"])):
            if case["feature"] in COMMON and "real" not in shape:
                continue
            said = case.get("why") or f"compared with {case['compared_with']}{_fewer(case)}"
            lines.append(f"| {shape} | {case['feature']} | **{case['outcome']}** | {said} |\n")
    return lines


def _room(cases: dict[str, dict[str, Any]]) -> str:
    rows = [
        _room_row(shape, case)
        for shape, found in _by_shape(cases).items()
        for feature in COMMON
        for case in found
        if case["feature"] == feature and "groups" in case
    ]
    return ROOM + "".join(rows)


def _room_row(shape: str, case: dict[str, Any]) -> str:
    groups, stock = case["groups"], case["stock_slot_bytes"]
    one_each = stock * len(groups) / sum(group["slot_bytes"] for group in groups)
    held = sum(group["chunks"] for group in groups)
    ours = sum(group["chunks"] * group["slot_bytes"] for group in groups)
    sizes = ", ".join(f"{group['chunk_bytes']:,}" for group in groups)
    return (
        f"| {shape} | {case['feature']} | {sizes} | {stock:,} | {one_each:.2f} x "
        f"| {held * stock / ours:.2f} x |\n"
    )


def main() -> int:
    """Write the page, or compare."""
    text = page(json.loads(RESULTS.read_text()))
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text() == text
        if not same:
            print(f"{PAGE.name} is not what {RESULTS.name} says: run scripts/models_page.py")
        return int(not same)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
