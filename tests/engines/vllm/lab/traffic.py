"""What several people ask a server at once: documents with common beginnings, chats."""

import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.engines.vllm.lab.engine import prompt
from tests.engines.vllm.lab.server import Server


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, and what a server without offloading answers."""

    prompt: list[int]
    answer: list[int]


Talk = list[Turn]
"""Requests that follow one another."""


def record(server: Server, seed: int, *, chats: int, turns: int, documents: int) -> list[Talk]:
    """Let `server` say what is right, one request after another.

    A chat's turn is all that was said before, answers included, and something new; a document is
    asked once, and shares its beginning with others. Prompts end before, at and after the edge of
    a block.
    """
    rng = random.Random(seed)
    talks = []
    systems = [prompt(64 * rng.randrange(1, 5), seed=seed + n) for n in range(3)]
    for _ in range(chats):
        said, talk = list(rng.choice(systems)), []
        for _ in range(turns):
            said = said + [rng.randrange(256) for _ in range(rng.randrange(20, 130))]
            talk.append(Turn(said, server.complete(said)["tokens"]))
            said = said + talk[-1].answer
        talks.append(talk)
    bases = [prompt(700, seed=seed + 10 + n) for n in range(4)]
    for _ in range(documents):
        kept = rng.randrange(1, 20) * 32
        tail = rng.choice([1, 31, 32, 33, rng.randrange(1, 200)])
        asked = rng.choice(bases)[:kept] + [rng.randrange(256) for _ in range(tail)]
        talks.append([Turn(asked, server.complete(asked)["tokens"])])
    return talks


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of a replay."""

    num_requests: int
    num_wrong: int
    cached_tokens: int
    slowest_first_s: float


def replay(server: Server, talks: Sequence[Talk], seed: int, *, clients: int) -> Heard:
    """Ask all of it again, streamed, so many at a time; every request has to succeed."""
    order = random.Random(seed).sample(list(talks), len(talks))

    def have(talk: Talk) -> list[tuple[bool, int, float]]:
        heard = []
        for turn in talk:
            said = server.complete(turn.prompt)
            right = said["tokens"] == turn.answer
            heard.append((right, said["cached_tokens"], said["first_s"]))
        return heard

    with ThreadPoolExecutor(clients) as pool:
        heard = [each for talk in pool.map(have, order) for each in talk]
    return Heard(
        len(heard),
        sum(not right for right, _, _ in heard),
        sum(cached for _, cached, _ in heard),
        max(first_s for _, _, first_s in heard),
    )


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Seconds to the first token of prompts that nobody sent before, alone on each server."""

    ours_s: float
    plain_s: float
    ratio: float
    """The median of the pairs'."""


def first_tokens(ours: Server, plain: Server, count: int, seed: int) -> FirstTokens:
    """Ask both servers in turn; who is first alternates."""
    taken: dict[Server, list[float]] = {ours: [], plain: []}
    for number in range(count):
        asked = prompt(400, seed=1_000_000 + 1000 * seed + number)
        for server in (ours, plain) if number % 2 else (plain, ours):
            taken[server].append(server.complete(asked, max_tokens=1)["first_s"])
    ours_s, plain_s = (statistics.median(taken[server]) for server in (ours, plain))
    pairs = zip(taken[ours], taken[plain], strict=True)
    return FirstTokens(ours_s, plain_s, statistics.median(one / other for one, other in pairs))
