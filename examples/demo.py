"""Ask a question about a long text four times: cold, then with its KV cache in three places.

`make demo` runs this. It starts stock vLLM twice on the CPU with SmolLM2-135M, shows the time to
first token of each case, whether the answers are the same, and draws a chart.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import chart, model

HERE = Path(__file__).resolve().parent
TEXT = HERE / "data" / "alice.txt"
QUESTION = "What did the label on the little bottle say?"
TEXT_TOKENS = 7000
WARM_UP_TOKENS = 400
MAX_TOKENS = 32
DTYPE = "float32"  # in bfloat16 rounding makes vLLM's own prefix cache change long answers
TARGET_RATIO = 0.10
CASES = {
    "cold": ("cold", "nothing cached: the prompt is computed"),
    "own": ("engine's own cache", "vLLM's prefix cache, for comparison"),
    "host": ("host memory", "after reset_prefix_cache"),
    "disk": ("disk, after a restart", "a new vLLM process"),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one case gave."""

    ttft_s: float
    total_s: float
    tokens: list[int]
    text: str
    reused_tokens: int
    prompt_tokens: int


class Progress:
    """Lines with the time since the start."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def say(self, line: str) -> None:
        """Print one line at once."""
        print(f"[{time.perf_counter() - self._started:5.1f} s] {line}", flush=True)


def prompts(folder: Path) -> tuple[list[int], list[int]]:
    """The long prompt (instruction, text, question) and an unrelated short one to warm up with."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    excerpt = tokenizer.decode(text[:TEXT_TOKENS])
    asked = [
        {"role": "system", "content": "You answer questions about the text you are given."},
        {"role": "user", "content": f"{excerpt}\n\nQuestion: {QUESTION}"},
    ]
    rendered = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    long_prompt: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
    return long_prompt, text[-WARM_UP_TOKENS:]


def run_engine(
    request: dict[str, Any], folder: Path, number: int, progress: Progress
) -> dict[str, Answer]:
    """Run one engine process to its end; its log stays in `folder` when it fails."""
    asked = folder / f"request-{number}.json"
    asked.write_text(json.dumps(request), encoding="utf-8")
    log_path = folder / f"engine-{number}.log"
    environment = {
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    answers: dict[str, Answer] = {}
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "demo.engine", str(asked)],
            cwd=HERE,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                show(json.loads(line), answers, progress)
            code = process.wait()
        finally:
            process.kill()  # of no effect once it has ended
    if code or len(answers) < len(request["cases"]):
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-25:])
        raise SystemExit(f"{tail}\n\nthe engine process ended early (exit status {code})")
    return answers


def show(event: dict[str, Any], answers: dict[str, Answer], progress: Progress) -> None:
    """Tell what the engine process reported, and keep its answers."""
    kind = event.pop("event")
    if kind == "ready":
        progress.say(f"  ready and warmed up after {event['seconds']:.1f} s")
    elif kind == "stored":
        progress.say(
            f"  its KV cache is on disk: the folder takes {event['disk_bytes'] / 1e6:.0f} MB"
        )
    elif kind == "answer":
        case = event.pop("case")
        answers[case] = answer = Answer(**event)
        progress.say(
            f"  {CASES[case][0]}: first token after {answer.ttft_s:.3f} s, "
            f"{answer.reused_tokens} of {answer.prompt_tokens} prompt tokens reused"
        )


def table(answers: dict[str, Answer]) -> str:
    """The result as aligned text."""
    cold_s = answers["cold"].ttft_s
    lines = [f"{'KV cache from':<24}{'first token':>13}{'of cold':>10}{'reused':>16}   answer"]
    for case, answer in answers.items():
        same = "" if case == "cold" else same_as_cold(answer, answers["cold"])
        reused = f"{answer.reused_tokens}/{answer.prompt_tokens}"
        lines.append(
            f"{CASES[case][0]:<24}{answer.ttft_s:>11.3f} s{answer.ttft_s / cold_s:>9.3f}x"
            f"{reused:>16}   {same}".rstrip()
        )
    return "\n".join(lines)


def same_as_cold(answer: Answer, cold: Answer) -> str:
    """Whether two answers are the same, token for token."""
    return "identical" if answer.tokens == cold.tokens else "DIFFERENT"


def this_machine() -> str:
    """This machine, in a few words, for the chart's foot."""
    return f"vLLM {vllm_version()} on the CPU, {os.cpu_count()} cores, {platform.machine()}"


def vllm_version() -> str:
    """The installed vLLM's version, whichever distribution brought it."""
    from importlib import metadata

    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise SystemExit("vLLM is not installed here; `make demo` installs it")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=HERE.parent / ".cache" / "demo")
    parser.add_argument("--chart", type=Path, default=HERE.parent / "demo.png")
    parser.add_argument("--random-model", action="store_true", help="do not try to download")
    return parser.parse_args()


def main() -> int:
    """Run the demo; 0 when the answers agree and the restart meets its target."""
    arguments = parse()
    progress = Progress()
    progress.say("getting the model")
    chosen = model.get(arguments.cache, progress.say, random_only=arguments.random_model)
    long_prompt, warm_up = prompts(chosen.path)
    progress.say(f"model: {chosen.name}; prompt: {len(long_prompt)} tokens of {TEXT.name}")
    with tempfile.TemporaryDirectory(prefix="undercroft-demo-", dir=arguments.cache) as name:
        folder = Path(name)
        disk = folder / "kv"
        request = {
            "model": str(chosen.path),
            "prompt": long_prompt,
            "warm_up": warm_up,
            "dtype": DTYPE,
            "max_tokens": MAX_TOKENS,
            "disk": str(disk),
            "offload": {
                "spec_name": "UndercroftSpec",
                "spec_module_path": "undercroft.engines.vllm",
                "host": "512MiB",
                "tiers": [{"type": "disk", "path": str(disk), "capacity": "1GiB"}],
            },
        }
        progress.say("starting vLLM (first process)")
        answers = run_engine({**request, "cases": ["cold", "own", "host"]}, folder, 1, progress)
        progress.say("vLLM stopped; starting it again (second process, empty memory, same disk)")
        answers |= run_engine({**request, "cases": ["disk"]}, folder, 2, progress)
    return report(answers, chosen, arguments.chart)


def report(answers: dict[str, Answer], chosen: model.DemoModel, target: Path) -> int:
    """Print the result, draw the chart, and say whether the demo held its promises."""
    cold = answers["cold"]
    print(f"\n{table(answers)}\n")
    print(f"Question: {QUESTION}")
    for case, answer in answers.items():
        print(f"  {CASES[case][0]:<24}{answer.text.strip()!r}")
    if not chosen.is_real:
        print("  (random weights: the answers mean nothing, but they must still be identical)")
    chart.draw(
        [(*CASES[case], answer.ttft_s) for case, answer in answers.items()],
        title=f"First token of a {cold.prompt_tokens:,}-token prompt",
        note=f"{chosen.name}; {this_machine()}",
        target=target,
    )
    ratio = answers["disk"].ttft_s / cold.ttft_s
    identical = all(answer.tokens == cold.tokens for answer in answers.values())
    print(f"\nAnswers identical: {'yes' if identical else 'NO'}")
    print(f"After a restart the first token came in {ratio:.3f}x of the cold time.")
    print(f"Chart: {target}")
    return 0 if identical and ratio <= TARGET_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
