"""Tiny random-weight models whose greedy output depends on every KV block.

A default initialisation (std 0.02) gives near-uniform logits: such a model repeats one token
whatever its KV cache holds, and every test passes. Here weights have unit-variance logits and
sharpened attention; the zeroed-load control in the tests proves that a lost block shows.

Made once, in a process of its own (`python -m tests.engines.vllm.lab.models`), kept in a cache
folder whose name carries `VERSION`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VERSION = 1
NAMES = ("llama", "llama_other", "gemma3")
_VOCABULARY = 512
_BOS, _EOS, _PAD = 256, 257, 258
_ROOT = Path(__file__).resolve().parents[4]
_COMMON: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "bos_token_id": _BOS,
    "eos_token_id": _EOS,
    "pad_token_id": _PAD,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 16384,
}


def cache_root() -> Path:
    """Where made models live: `$UNDERCROFT_LAB_CACHE`, else `.cache` of this checkout."""
    base = os.environ.get("UNDERCROFT_LAB_CACHE")
    return (Path(base) if base else _ROOT / ".cache") / f"lab-models-v{VERSION}"


def model_path(name: str) -> Path:
    """The folder of a tiny model, made on first use (a few seconds, in a child process).

    A path, which has a slash in it, is given back as it is.
    """
    if "/" in name:
        return Path(name)
    if name not in NAMES:
        raise ValueError(f"no tiny model {name!r}; there are {', '.join(NAMES)}")
    folder = cache_root() / name
    if not (folder / "config.json").exists():
        subprocess.run(
            [sys.executable, "-m", "tests.engines.vllm.lab.models", name],
            cwd=_ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=300,
        )
    return folder


def _tokenizer() -> Any:
    """One token per byte, and special tokens; nothing is downloaded."""
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {"<s>": _BOS, "</s>": _EOS, "<pad>": _PAD}
    vocabulary |= {f"<x{index}>": index for index in range(_PAD + 1, _VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return fast


def _sharpen(model: Any, seed: int) -> None:
    """Unit-variance activations; q and k twice that, so that attention picks single tokens."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
        if "q_proj" in name or "k_proj" in name:
            scale *= 2.0
        parameter.data = noise * scale


def _llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **_COMMON))
    _sharpen(model, seed)
    return model


def _gemma3(seed: int) -> Any:
    """Three KV groups: layers 0 and 3 slide, 1 and 4 slide, 2 and 5 attend to everything."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            num_hidden_layers=6,
            sliding_window=64,
            sliding_window_pattern=3,
            query_pre_attn_scalar=32,
            **_COMMON,
        )
    )
    _sharpen(model, seed)
    # Tied embeddings times sqrt(hidden) would make the model repeat its last token whatever the
    # KV holds: shrink the embedding, enlarge the final norm.
    model.model.embed_tokens.weight.data.mul_(0.04)
    model.model.norm.weight.data.fill_(20.0)
    return model


_MAKERS = {
    "llama": lambda: _llama(seed=0),
    "llama_other": lambda: _llama(seed=1),
    "gemma3": lambda: _gemma3(seed=0),
}


def _make(name: str) -> None:
    import torch

    torch.manual_seed(0)
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    _MAKERS[name]().to(torch.float32).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    try:
        folder.rename(root / name)
    except OSError:
        shutil.rmtree(folder)  # another process was first
        if not (root / name / "config.json").exists():
            raise


if __name__ == "__main__":
    for wanted in sys.argv[1:] or NAMES:
        _make(wanted)
