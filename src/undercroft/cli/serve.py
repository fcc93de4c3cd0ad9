"""`undercroft serve`: `vllm serve` with a cache below it, after a look at what would go wrong."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from undercroft.cli.checkout import become
from undercroft.cli.doctor import examine
from undercroft.cli.findings import Finding, Severity, problems, show
from undercroft.cli.flags import add_settings_flags, asked_for
from undercroft.cli.output import CommandFailed, Exit, Output, Subparsers, add_command, output_for
from undercroft.engines.assemble import check_plugins

__all__ = ["add_parser", "run", "vllm_program"]

_DESCRIPTION = """\
Becomes `vllm serve MODEL` with all options it does not know itself, and a --kv-transfer-config that
names Undercroft and your settings. Before, it runs `undercroft doctor` on the same: errors stop it,
warnings are shown.

  undercroft serve MODEL --host 32GiB --disk /nvme/kv:1TiB --max-model-len 32768 --port 8001

--host with an address instead of a size is vLLM's own."""


def add_parser(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """See `main.Command`."""
    parser = add_command(
        subparsers,
        "serve",
        "start vLLM's server with a cache in host memory and on disk",
        description=_DESCRIPTION,
        takes_rest=True,
    )
    parser.add_argument("model", metavar="MODEL", help="as given to vLLM")
    add_settings_flags(parser)
    parser.add_argument(
        "--print", action="store_true", dest="only_print", help="print the command, and do no more"
    )
    parser.add_argument(
        "--no-doctor", action="store_true", help="do not look first at what would go wrong"
    )


def run(args: argparse.Namespace) -> int:
    """See `main.Command`."""
    output = output_for(args)
    asked = asked_for(args)
    check_plugins(asked.settings())
    command = [*vllm_program(), "serve", *asked.vllm_words()]
    if args.only_print:
        output.say(shlex.join(command))
        output.data({"command": command, "kv_transfer_config": asked.transfer_config()})
        return Exit.FINE
    if not args.no_doctor:
        _tell(output, examine(asked, output, stop_early=True))
    return become(command)


def _tell(output: Output, findings: Sequence[Finding]) -> None:
    """Problems on standard error, where vLLM's own log follows.

    Raises:
        CommandFailed: It cannot work.
    """
    show(dataclasses.replace(output, stdout=output.stderr, is_json=False), problems(findings))
    num_errors = sum(f.severity is Severity.ERROR for f in findings)
    if num_errors:
        raise CommandFailed(
            f"vLLM is not started: doctor found {num_errors} "
            f"{'error' if num_errors == 1 else 'errors'}, see above (--no-doctor starts it anyway)",
            Exit.PROBLEM,
        )
    output.stderr.write("undercroft: nothing is in the way, starting vLLM\n")


def vllm_program() -> list[str]:
    """The words that start vLLM of this Python environment."""
    beside = Path(sys.executable).with_name("vllm")
    if os.access(beside, os.X_OK):
        return [str(beside)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]
