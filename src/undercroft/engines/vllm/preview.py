"""What a vLLM started with these options would be, found out without loading weights.

`python -m undercroft.engines.vllm.preview [MODEL [VLLM OPTIONS]]`, in a process of its own because
importing vLLM takes seconds and sets up logging. The last line of its output is a JSON object; what
vLLM prints before that line is of no matter. The options are judged by vLLM's own parser, and the
settings by the code that an engine runs: our spec is made, from an offloading configuration that
vLLM makes, for a KV cache that is foreseen from the model's `config.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.version import __version__ as vllm_version

from undercroft.config import from_engine
from undercroft.engines.accelerator.torch_device import DEVICE_TYPES
from undercroft.engines.vllm import UndercroftSpec
from undercroft.engines.vllm.hosts import check_one_host
from undercroft.engines.vllm.unserved import check_attention
from undercroft.engines.vllm.version import doubt
from undercroft.errors import ConfigError, KvError
from undercroft.layout.pages import HeadsPage, heads_page
from undercroft.layout.topology import Topology

__all__ = ["SERVED_DEVICES", "main", "preview"]

SERVED_DEVICES = ("cpu", *DEVICE_TYPES)
"""Names of the platforms whose KV cache this version moves."""


class _Parser(FlexibleArgumentParser):  # type: ignore[misc] # untyped here
    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vLLM does not take these options: {message}")


def preview(words: Sequence[str]) -> dict[str, Any]:
    """Everything that can be known, as JSON values.

    Args:
        words: What would follow `vllm serve`; without a model only the installation is looked at.

    Returns:
        `version`, `doubt` (one line to warn with, or None), `device`, `device_served`; with a model
        also `refused` (one line, or None), and what is known of the model: `dtype`, `block_tokens`,
        `hash_algorithm`, `prefix_caching`, `revision`, `max_model_tokens`, `replicas`,
        `shutdown_timeout_s`, and `chunk` (`bytes`, `tokens`) or `unforeseen`, a line that says why
        not.
    """
    found: dict[str, Any] = {
        "version": vllm_version,
        "doubt": doubt(vllm_version),
        "device": current_platform.device_type,
        "device_served": current_platform.device_type in SERVED_DEVICES,
    }
    if not words:
        return found
    found["refused"] = None
    try:
        config = _config(words)
        found.update(_model(config))
        _foresee(config, found)
    except KvError as error:
        found["refused"] = str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - vLLM's own checks raise anything
        found["refused"] = f"vLLM refuses these options: {' '.join(str(error).split())[:1000]}"
    return found


def _config(words: Sequence[str]) -> VllmConfig:
    args = make_arg_parser(_Parser()).parse_args(list(words))
    if getattr(args, "model_tag", None):
        args.model = args.model_tag
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


def _model(config: VllmConfig) -> dict[str, Any]:
    cache, model = config.cache_config, config.model_config
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "block_tokens": cache.block_size,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "revision": model.revision,
        "max_model_tokens": model.max_model_len,
        "replicas": config.parallel_config.data_parallel_size,
        "shutdown_timeout_s": config.shutdown_timeout,
    }


def _foresee(config: VllmConfig, found: dict[str, Any]) -> None:
    """Make our spec as an engine would, and note what a chunk would be."""
    model = config.model_config
    if model.is_hybrid or model.is_attention_free or model.is_encoder_decoder:
        found["unforeseen"] = "its layers keep other state than keys and values of tokens"
    if config.kv_transfer_config is None:
        return
    if config.cache_config.kv_cache_layout is None:  # the engine decides it when it starts
        config.cache_config.kv_cache_layout = OffloadingConnector.get_required_kvcache_layout(
            config
        )
    offloading = build_offloading_config(config, _cache_config(config))
    UndercroftSpec(offloading)
    check_attention(config)
    check_one_host(from_engine(offloading).config, config)
    if "unforeseen" not in found:
        blocks = offloading.cache.blocks_per_chunk
        found["chunk"] = {
            "bytes": _bytes_per_block(config, offloading) * blocks,
            "tokens": offloading.groups[0].tokens_per_block * blocks,
        }


def _bytes_per_block(config: VllmConfig, offloading: OffloadingConfig) -> int:
    """What is stored of a block, all ranks together: of canonical pages each byte once."""
    parallel = offloading.parallel
    worker_bytes: int = offloading.worker_kv_bytes_per_block
    topology = Topology(parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    is_asked = offloading.canonical_layout or parallel.is_parallelism_agnostic
    model = config.model_config
    num_heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    page = heads_page(HeadsPage(num_heads, 1, 1), topology, 0)
    # With several stages, what ranks have alike is certified of latents only, from the tensors.
    sees = config.kv_transfer_config.kv_connector == "UndercroftConnector"
    is_whole = topology.pp_size == 1 or page.num_writers == 1 or (model.use_mla and sees)
    if is_asked and page.is_portable and is_whole:
        return worker_bytes * page.stored_bytes // page.local_bytes * topology.pp_size
    return worker_bytes * (1 if offloading.replicated_layout else topology.world_size)


def _cache_config(config: VllmConfig) -> KVCacheConfig:
    """One group of all layers, as for plain attention.

    Models with several groups store the same bytes a token, spread over several chunks.
    """
    cache, model = config.cache_config, config.model_config
    kind = MLAAttentionSpec if model.use_mla else FullAttentionSpec
    spec = kind(
        block_size=cache.block_size,
        num_kv_heads=1 if model.use_mla else model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=kv_cache_dtype_str_to_dtype(cache.cache_dtype, model),
    )
    names = [f"layer.{n}" for n in range(max(1, model.get_num_layers(config.parallel_config)))]
    return KVCacheConfig(
        num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )


def main() -> None:
    """Print what `preview` finds as the last line."""
    found = preview(sys.argv[1:])
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
