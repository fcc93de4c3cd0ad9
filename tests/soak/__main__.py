"""`make soak MINUTES=30`: real engines under faults, aborts, resets and kills, and a report.

Two engines share a disk that holds half of what is asked; the host memory of each holds a tenth.
Of each one's calls of the disk tier one in a hundred fails, one in a hundred is wrong by a bit, and
a few come too late; two rounds of three have something worse, too. One engine lives through: its
memory, descriptors and threads must not grow. The other is killed (`kill -9`) while it works and
started again, all the time; every other time a process moves its chunks, which has no faults of
files but may be killed, too. Every answer must be, token for token, that of an engine without
offloading.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path

from tests.engines.vllm.lab.engine import Nursery
from tests.soak.ledger import Ledger, report, verdict
from tests.soak.lives import Setting, guarded, resident, victim
from tests.soak.prompts import made_prompts, working_set_bytes
from tests.soak.vitals import Watch, now_s
from tests.soak.weather import RARE, Weather

_MAX_TOKENS = 4
_HOST_PART, _DISK_PART = 10, 2
_KERNELS = "8"
"""Without a bound vLLM's kernels on a CPU keep up to 1,024 compiled shapes, some 0.3 MB each: an
engine without a connector grows by 250 MB in 800 requests. What is ours would not be seen."""
_EVERY_KIND_MINUTES = 10
"""From this long on, every kind of fault must have come; rare ones always."""


def main(words: list[str] | None = None) -> int:
    """Run it; 1 if anything was not as promised."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=300, help="different prompts")
    parser.add_argument("--json", type=Path, help="write everything here, too")
    parser.add_argument(
        "--lies", action="store_true", help="let a tier lie, to see that the verdict is bad then"
    )
    args = parser.parse_args(words)
    ledger = Ledger()
    folder = Path(tempfile.mkdtemp(prefix="uc-soak-"))  # short: a unix socket lies in it
    try:
        capacity = _run(folder, args, ledger)
        log = (folder / "engines.log").read_text(errors="replace")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    needed = {f"{who}: {kind}" for who in ("resident", "victim") for kind in RARE}
    if args.minutes >= _EVERY_KIND_MINUTES:
        needed |= {f"resident: {kind}" for kind in Weather(folder, folder, 0).kinds}
    if "Traceback" in log:
        at = log.index("Traceback")
        ledger.fail(f"an engine printed: {log[max(0, at - 300) : at + 1500]}")
    bad = verdict(ledger, capacity, needed)
    print(report(ledger, capacity, bad), flush=True)
    if args.json:
        _write(args.json, ledger, bad)
    return 1 if bad else 0


def _run(folder: Path, args: argparse.Namespace, ledger: Ledger) -> int:
    prompts = made_prompts(args.prompts, args.seed)
    in_all = working_set_bytes(prompts)
    with Nursery(folder, ONEDNN_PRIMITIVE_CACHE_CAPACITY=_KERNELS) as nursery:
        plain = nursery.engine("llama", None, max_model_len=1024, max_num_batched_tokens=1024)
        expected = [output.tokens for output in plain.generate(prompts, max_tokens=_MAX_TOKENS)]
        plain.close()
        setting = Setting(
            folder=folder / "kv",
            prompts=prompts,
            expected=expected,
            host_bytes=in_all // _HOST_PART,
            disk_bytes=in_all // _DISK_PART,
            ends_s=now_s() + 60 * args.minutes,
            seed=args.seed,
            lies=args.lies,
        )
        setting.folder.mkdir()
        print(
            f"{len(prompts)} prompts of {in_all / 1e6:.0f} MB; host memory "
            f"{setting.host_bytes / 1e6:.0f} MB each, disk {setting.disk_bytes / 1e6:.0f} MB, "
            f"{args.minutes:g} minutes, seed {args.seed}",
            flush=True,
        )
        quiet = threading.Lock()
        lives = [
            lambda: resident(nursery, setting, ledger, quiet),
            lambda: victim(nursery, setting, ledger, quiet),
        ]
        with Watch(setting.folder) as watch:
            threads = [threading.Thread(target=guarded(life, ledger)) for life in lives]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        ledger.most_disk_bytes = watch.most_bytes
    return setting.disk_bytes


def _write(path: Path, ledger: Ledger, bad: list[str]) -> None:
    told = {
        "counts": dict(ledger.counts),
        "faults": dict(ledger.faults),
        "totals": dict(ledger.totals),
        "accounts": ledger.accounts,
        "most_disk_bytes": ledger.most_disk_bytes,
        "samples": [asdict(sample) for sample in ledger.samples],
        "bad": bad,
    }
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
