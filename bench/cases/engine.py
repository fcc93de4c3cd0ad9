"""A whole engine with host memory and disk under it, beside the same engine without.

Stock vLLM on the CPU, SmolLM2-135M in float32 (random weights of its shape where it can't be had),
all cores, three engines alive for the whole run, each a process of its own. `on` and `off` have the
same small cache of their own, which forgets: `off` has nothing else, `on` has ours, in the
configuration as users write it. `ample` has a cache of its own in which all of it stays: what no
offloading can beat, the ceiling. Stock's own offloading is not among the sides: its worker refuses
to run on a CPU.

    chat         10 clients, 5 turns each, what was said and answered before is sent again
    documents    readers ask short questions, in mixed order, about some long documents
    cold         prompts that nobody has sent before: nothing to gain, storing them costs

The small cache holds the four requests that the engine runs at once, and not the other six.
Smaller, it would be a bound of its own: fewer run at once, with a hit or without.

Clients are a closed loop: each waits for its whole answer, thinks, and asks again; more of them
than the engine runs at once, so that the time to first token contains a queue, as it does for
users. Prompts are new in every round, the same for both engines, and no cache is ever emptied:
from the second or third round on host memory and disk are full, and storing evicts. The
control asks prompts of its own.

Every answer of `on` must be that of `off`, token for token. Only where two tokens are equally
likely but for rounding, which depends on what else is in the batch, either may come; what follows
in that conversation is then not compared.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from harness import AGAIN, Goal, Options, Row, Side

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from tests.engines.vllm.lab.engine import (  # noqa: E402
    BLOCK_TOKENS,
    OFFLOADER,
    Engine,
    Nursery,
)
from tests.engines.vllm.lab.models import model_path  # noqa: E402

from demo import model as demo_model  # noqa: E402

TEXT = ROOT / "examples" / "data" / "alice.txt"
WORKLOADS = ("cold", "chat", "documents")
TIE_NATS = 0.01
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the workloads, in tokens if nothing else is said, and of the caches."""

    num_clients: int = 10
    num_turns: int = 5
    first_turn: int = 600
    next_turn: int = 30
    num_documents: int = 8
    document: int = 1400
    num_questions: int = 4
    question: int = 30
    num_unique: int = 16
    unique: int = 400
    answer: int = 8
    think_s: float = 0.5
    """At most; drawn evenly."""
    num_running: int = 4
    engine_cache: int = 4096
    ample_cache: int = 32000
    host: str = "256MiB"
    disk: str = "1GiB"


QUICK = Sizes(
    num_clients=8,
    num_turns=3,
    num_documents=3,
    document=1500,
    num_questions=3,
    num_unique=4,
    think_s=0.05,
    engine_cache=1760,
    host="12MiB",
    disk="96MiB",
)
"""For the tests' tiny model, which stores 4 KiB a token."""

Turn = tuple[float, list[int]]


class Texts:
    """Prompts out of a book; each begins with tokens of its own, so that no two share a block."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        text = TEXT.read_text(encoding="utf-8")
        self._tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids

    def piece(self, num_tokens: int, dice: random.Random) -> list[int]:
        mark = dice.choices(self._tokens, k=8)
        start = dice.randrange(len(self._tokens) - num_tokens)
        return mark + self._tokens[start : start + num_tokens - len(mark)]

    def clients(self, workload: str, sizes: Sizes, seed: str) -> list[list[Turn]]:
        """What everybody asks."""
        dice = random.Random(f"{workload} {seed}")

        def think_s() -> float:
            return dice.uniform(0.0, sizes.think_s)

        if workload == "chat":
            lengths = [sizes.first_turn] + [sizes.next_turn] * (sizes.num_turns - 1)
            return [
                [(think_s(), self.piece(n, dice)) for n in lengths]
                for _ in range(sizes.num_clients)
            ]
        if workload == "cold":
            asked = [self.piece(sizes.unique, dice) for _ in range(sizes.num_unique)]
        else:
            documents = [self.piece(sizes.document, dice) for _ in range(sizes.num_documents)]
            asked = [
                document + self.piece(sizes.question, dice)
                for document in documents
                for _ in range(sizes.num_questions)
            ]
            dice.shuffle(asked)
        num_clients = min(sizes.num_clients, len(asked))
        return [[(think_s(), text) for text in asked[i::num_clients]] for i in range(num_clients)]


class Contender:
    """One engine, and what it was asked so far."""

    def __init__(self, engine: Engine, texts: Texts, sizes: Sizes, answers: Answers) -> None:
        self._engine = engine
        self._texts = texts
        self._sizes = sizes
        self._answers = answers
        self._num_rounds: dict[str, int] = {}

    def warm(self) -> None:
        """First steps are slower, of any engine."""
        self._converse("cold", "warm")
        self._engine.settle(timeout_s=60)

    def run(self, kind: str) -> dict[str, float]:
        """All workloads once; `kind` is `on`, `off`, `ample`, or the control."""
        number = self._num_rounds.get(kind, 0)
        self._num_rounds[kind] = number + 1
        seed = f"{number}{AGAIN if AGAIN in kind else ''}"
        costs: dict[str, float] = {}
        for workload in WORKLOADS:
            told = self._converse(workload, seed)
            self._answers.take(f"{workload}, round {seed}", told["answers"])
            costs |= {f"{workload} {name}": cost for name, cost in _costs(told).items()}
        self._engine.settle(timeout_s=60)  # its writes are not for the next one to bear
        if "on" in kind and not costs["documents loaded"]:
            raise SystemExit("the engine was asked the same again, and ours loaded nothing")
        return costs

    def _converse(self, workload: str, seed: str) -> dict[str, Any]:
        told: dict[str, Any] = self._engine.inside(
            "clients:converse",
            clients=self._texts.clients(workload, self._sizes, seed),
            grows=workload == "chat",
            max_tokens=self._sizes.answer,
            timeout_s=TIMEOUT_S,
        )
        return told


class Answers:
    """Of all engines: they must be the same."""

    def __init__(self) -> None:
        self._first: dict[str, list[list[dict[str, Any]]]] = {}

    def take(self, where: str, given: list[list[dict[str, Any]]]) -> None:
        """Compare with who was asked the same first; keep them if nobody was."""
        other = self._first.setdefault(where, given)
        for client, (mine, theirs) in enumerate(zip(given, other, strict=True)):
            for turn, (one, two) in enumerate(zip(mine, theirs, strict=True)):
                if one["tokens"] == two["tokens"]:
                    continue
                if not is_tie(one, two):
                    raise SystemExit(
                        f"answers differ: {where}, client {client}, turn {turn}: "
                        f"{one['tokens']} and {two['tokens']}"
                    )
                break


def is_tie(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Whether two answers part where both tokens were as likely, and agree until there."""
    for token, other, logprob, other_logprob in zip(
        one["tokens"], two["tokens"], one["logprobs"], two["logprobs"], strict=True
    ):
        if abs(logprob - other_logprob) > TIE_NATS:
            return False
        if token != other:
            return True
    return True


def _costs(told: dict[str, Any]) -> dict[str, float]:
    answers = [answer for client in told["answers"] for answer in client]
    waits = sorted(answer["first_token_s"] for answer in answers)
    prompt_tokens = sum(answer["prompt_tokens"] for answer in answers)
    return {
        "p50": statistics.median(waits),
        "p99": waits[-1 - len(waits) // 100],
        "token": told["wall_s"] / sum(len(answer["tokens"]) for answer in answers),
        "cached": sum(answer["cached_tokens"] for answer in answers) / prompt_tokens,
        "loaded": sum(answer["external_tokens"] for answer in answers) / prompt_tokens,
    }


class EngineCase:
    """The case."""

    name = "engine"
    about = "a whole engine whose own cache is too small, with ours and without"
    rounds = 6

    def rows(self, options: Options) -> Sequence[Row]:
        """Goals: 1 / 0.35 for the first token, no loss anywhere."""
        del options
        rows = []
        for workload in WORKLOADS:
            is_cold = workload == "cold"
            for what, cost, amount, unit, least in (
                ("first token, median", "p50", 0.0, "s", 0.97 if is_cold else 1 / 0.35),
                ("first token, p99", "p99", 0.0, "s", 0.97),
                ("answers, tokens a second", "token", 1.0, "tok/s", 0.97 if is_cold else 1.3),
            ):
                where = f"{workload} {cost}"
                rows.append(
                    Row(
                        f"{workload}: {what}",
                        ("on", where),
                        ("off", where),
                        ("ample", where),
                        amount=amount,
                        unit=unit,
                        goals=[Goal(round(least, 2))],
                    )
                )
        for side in ("on", "off", "ample"):
            rows += [
                Row(
                    f"{workload}: prompt tokens not computed, {side}",
                    (side, f"{workload} cached"),
                    unit="%",
                    scale=100,
                )
                for workload in WORKLOADS[1:]
            ]
        return rows

    @contextlib.contextmanager
    def sides(self, options: Options) -> Iterator[Mapping[str, Side]]:
        sizes = QUICK if options.quick else Sizes()
        model = model_path("llama") if options.quick else _smollm2()
        texts, answers = Texts(model), Answers()
        threads = 1 if options.quick else len(os.sched_getaffinity(0))
        with tempfile.TemporaryDirectory(dir=options.path, prefix="undercroft-bench-") as name:
            folder = Path(name)
            with Nursery(folder, OMP_NUM_THREADS=str(threads)) as nursery:
                disk = {"type": "disk", "path": str(folder / "kv"), "capacity": sizes.disk}
                offload = {**OFFLOADER, "host": sizes.host, "tiers": [disk]}
                on, off, ample = (
                    Contender(_engine(nursery, model, sizes, cache, how), texts, sizes, answers)
                    for cache, how in (
                        (sizes.engine_cache, offload),
                        (sizes.engine_cache, None),
                        (sizes.ample_cache, None),
                    )
                )
                for contender in (on, off, ample):
                    contender.warm()
                yield {
                    "on": partial(on.run, "on"),
                    "off": partial(off.run, "off"),
                    "ample": partial(ample.run, "ample"),
                    "on" + AGAIN: partial(on.run, "on" + AGAIN),
                }


def _smollm2() -> Path:
    return demo_model.get(ROOT / ".cache" / "demo", lambda line: print(f"  {line}")).path


def _engine(
    nursery: Nursery, model: Path, sizes: Sizes, cache: int, offload: dict[str, Any] | None
) -> Engine:
    return nursery.engine(
        str(model),
        offload,
        max_model_len=sizes.engine_cache - BLOCK_TOKENS,  # one block is never given out
        max_num_batched_tokens=2048,
        max_num_seqs=sizes.num_running,
        num_gpu_blocks_override=cache // BLOCK_TOKENS,
    )
