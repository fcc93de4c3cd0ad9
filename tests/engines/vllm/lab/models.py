"""Tiny random-weight models whose greedy output depends on every KV block.

A default initialisation (std 0.02) gives near-uniform logits: such a model repeats one token
whatever its KV cache holds, and every test passes. Here weights have unit-variance logits and
sharpened attention; the zeroed-load control in the tests proves that a lost block shows.

Made once, in a process of its own (`python -m tests.engines.vllm.lab.models`), kept in a cache
folder whose name carries `VERSION`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VERSION = 1
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
_LEFT_AS_MADE = ("conv", "A_log")
"""Parts of recurrent layers whose own initialisation is the one that works."""
_LOOKED_UP_BY = ("q_proj", "k_proj", "q_a_proj", "q_b_proj", "kv_a_proj")


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
    if name not in _MAKERS:
        raise ValueError(f"no tiny model {name!r}; there are {', '.join(_MAKERS)}")
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
        if parameter.dim() < 2 or any(part in name for part in _LEFT_AS_MADE):
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
        if any(part in name for part in _LOOKED_UP_BY):
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
    _untie(model, model.model.norm)
    return model


def _untie(model: Any, last_norm: Any) -> None:
    """Tied embeddings make a model repeat its last token whatever the KV holds.

    Gemma's times sqrt(hidden) even more so: shrink the embedding, enlarge the final norm.
    """
    model.model.embed_tokens.weight.data.mul_(0.04)
    last_norm.weight.data.fill_(20.0)


def _sharpened(config: str, model: str, **more: Any) -> Any:
    """A model of `transformers` by the names of its classes."""
    import transformers

    made = getattr(transformers, model)(getattr(transformers, config)(**{**_COMMON, **more}))
    _sharpen(made, seed=0)
    return made


def _mistral_swa() -> Any:
    """One KV group, and it slides."""
    return _sharpened("MistralConfig", "MistralForCausalLM", num_hidden_layers=4, sliding_window=64)


def _gptoss() -> Any:
    """Two KV groups: every other layer slides; experts, attention sinks."""
    return _sharpened(
        "GptOssConfig",
        "GptOssForCausalLM",
        num_hidden_layers=4,
        intermediate_size=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
    )


def _qwen3_next() -> Any:
    """Four KV groups: three layers of gated delta rule, each a group, and one of attention."""
    return _sharpened(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        num_hidden_layers=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        mlp_only_layers=[],
        decoder_sparse_step=1,
    )


def _granite_hybrid() -> Any:
    """Two KV groups: Mamba 2 state and attention, every other layer."""
    return _sharpened(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "attention"],
        intermediate_size=128,
        shared_intermediate_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_chunk_size=64,
        embedding_multiplier=1.0,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        attention_multiplier=0.17,
        position_embedding_type="rope",
    )


def _nemotron_h() -> Any:
    """Two KV groups: Mamba 2 state and attention, with layers that keep nothing."""
    return _sharpened(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        num_hidden_layers=6,
        layers_block_type=["mamba", "attention", "mlp"] * 2,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=1,
        chunk_size=64,
    )


def _lfm2() -> Any:
    """Two KV groups: the state of short convolutions, a few hundred bytes, and attention."""
    model = _sharpened(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        num_hidden_layers=4,
        layer_types=["conv", "full_attention"] * 2,
        block_ff_dim=256,
        block_auto_adjust_ff_dim=False,
        conv_L_cache=3,
    )
    _untie(model, model.model.embedding_norm)
    return model


def _deepseek_v2() -> Any:
    """One KV group of latents (MLA)."""
    return _sharpened(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        num_hidden_layers=3,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        head_dim=64,
        moe_intermediate_size=64,
        first_k_dense_replace=3,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    )


class _Eagle:
    """A drafter of one layer for the tiny Llama; its drafts are mostly wrong."""

    def __init__(self) -> None:
        self._llama = _sharpened("LlamaConfig", "LlamaForCausalLM", num_hidden_layers=1)

    def to(self, _dtype: Any) -> "_Eagle":
        return self

    def save_pretrained(self, folder: Path) -> None:
        import torch
        from safetensors.torch import save_file

        self._llama.config.save_pretrained(folder)
        weights = {
            name.removeprefix("model."): value
            for name, value in self._llama.state_dict().items()
            if name not in ("model.norm.weight", "lm_head.weight")
            and "layers.0.input_layernorm" not in name
        }
        hidden = _COMMON["hidden_size"]
        weights["fc.weight"] = torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5
        save_file(weights, folder / "model.safetensors")
        config = folder / "config.json"
        changed = json.loads(config.read_text()) | {"architectures": ["LlamaForCausalLM"]}
        config.write_text(json.dumps(changed))


_MAKERS = {
    "llama": lambda: _llama(seed=0),
    "llama_other": lambda: _llama(seed=1),
    "gemma3": lambda: _gemma3(seed=0),
    "mistral_swa": _mistral_swa,
    "gptoss": _gptoss,
    "qwen3_next": _qwen3_next,
    "granite_hybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "lfm2": _lfm2,
    "deepseek_v2": _deepseek_v2,
    "llama_eagle": _Eagle,
}
_ADDED_TO_CONFIG: dict[str, dict[str, Any]] = {
    # vLLM 0.32 reads these of Lfm2; transformers 5 does not write them any more.
    "lfm2": {
        "conv_dim": 128,
        "block_dim": 128,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "block_norm_eps": 1e-5,
        "conv_bias": False,
    }
}


def _make(name: str) -> None:
    import torch

    torch.manual_seed(0)
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    _MAKERS[name]().to(torch.float32).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    if name in _ADDED_TO_CONFIG:
        config = folder / "config.json"
        config.write_text(json.dumps(_ADDED_TO_CONFIG[name] | json.loads(config.read_text())))
    try:
        folder.rename(root / name)
    except OSError:
        shutil.rmtree(folder)  # another process was first
        if not (root / name / "config.json").exists():
            raise


if __name__ == "__main__":
    for wanted in sys.argv[1:] or _MAKERS:
        _make(wanted)
