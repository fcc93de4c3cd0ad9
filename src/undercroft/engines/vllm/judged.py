"""Every field of vLLM's configuration, judged: does it decide KV bytes, or which key names them?

A field that is not here is one that a later vLLM added: `facts` then takes it in where it is not at
its default, so that what this version does not know keeps chunks apart instead of mixing them.
docs/reference/identity.md shows these tables, and a test compares them with the installed vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ENGINE", "ENVIRONMENT", "SEALED", "Room"]


def _each(reasons: Mapping[str, str]) -> Mapping[str, str]:
    """The reason of each field, where keys name several fields separated by spaces."""
    return {name: reason for names, reason in reasons.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class Room:
    """One of vLLM's configuration objects.

    Args:
        class_name: Its class in `vllm.config`.
        takes: Fields whose values are facts, and why.
        by_hand: Fields that are facts in some cases, or in another form: `facts` has the code.
        leaves: Fields that are no facts, and why.
        rooms: Objects in it, by the field that holds them.
    """

    class_name: str
    takes: Mapping[str, str] = field(default_factory=dict)
    by_hand: Mapping[str, str] = field(default_factory=dict)
    leaves: Mapping[str, str] = field(default_factory=dict)
    rooms: Mapping[str, Room] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """All fields that are judged."""
        return frozenset((*self.takes, *self.by_hand, *self.leaves, *self.rooms))


_ROUNDING = "how the same values are computed: they differ in rounding at most"
_PLACES = "where and when things run, not what is computed"
_TOKENS = "decides which tokens are asked for; tokens are in the key"
_SAMPLING = "decides which tokens are sampled; tokens are in the key"
_WATCHING = "what is logged, measured or sent"
_SIZES = "how much there is room for"
_BATCHING = "which requests are computed together, and when"

_MULTIMODAL = Room(
    "MultiModalConfig",
    takes=_each(
        {
            "mm_processor_kwargs media_io_kwargs": "how media become embeddings; requests may name "
            "media by ids of their own, and then only the id is in the key",
            "mm_hasher_algorithm": "makes the part of the key that names media",
            "mm_device_do_normalize mm_encoder_attn_dtype mm_encoder_fp8_scale_path": "precision "
            "of the embeddings",
            "video_pruning_rate video_pruning_method": "which embeddings of a video are left out",
            "language_model_only": "which code path computes the language model",
            "allow_missing_mm_embeddings": "whether embeddings may be made up",
        }
    ),
    leaves=_each(
        {
            "limit_per_prompt enable_mm_embeds interleave_mm_strings": "which prompts are taken",
            "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
            "skip_mm_profiling mm_ipc_gpu_memory_gb": _SIZES,
            "mm_encoder_only": "an engine that has no KV cache",
            "mm_encoder_tp_mode mm_encoder_attn_backend": _ROUNDING,
            "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin": "where scales are "
            "written to for a later start",
            "mm_tensor_ipc": _PLACES,
        }
    ),
)

_MODEL = Room(
    "ModelConfig",
    takes=_each(
        {
            "dtype": "type of weights and activations",
            "quantization quantization_config": "method, and what it is told",
            "model_weights revision code_revision": "which weights and which code of a model name",
            "trust_remote_code model_impl model_class_overrides": "whose code computes the model",
            "runner convert": "whether it generates or pools; some poolers attend both ways",
            "disable_sliding_window": "what a token attends to",
            "word_embeddings_untied_by_checkpoint": "which weights embed tokens",
        }
    ),
    by_hand=_each(
        {
            "model": "manifest fields model.name and model.weights",
            "hf_config hf_text_config": "after all overrides: rope, sliding window, softcap, ...; "
            "without the version that wrote it and the path it came from",
            "max_model_len": "where it decides bytes: LongRoPE takes its long factors beyond the "
            "original length, Llama 4 its temperature, dynamic NTK its base",
            "seed": "with dummy weights, which are drawn from it",
        }
    ),
    leaves=_each(
        {
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init": _TOKENS,
            "hf_config_path config_format hf_overrides": "hf_config is what came of it",
            "hf_token served_model_name allowed_local_media_path allowed_media_domains "
            "renderer_num_workers": _PLACES,
            "is_submodel_config spec_target_max_model_len": "marks of a drafter's configuration",
            "allow_deprecated_quantization": "whether to refuse",
            "enforce_eager disable_cascade_attn": _ROUNDING,
            "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel logits_processors "
            "generation_config override_generation_config": _SAMPLING,
            "enable_trace_replay": _WATCHING,
            "enable_prompt_embeds": "embeddings that come with a request are in the key",
            "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
            "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator": _PLACES,
            "io_processor_plugin pooler_config": "what happens before and after the model",
        }
    ),
    rooms={"multimodal_config": _MULTIMODAL},
)

_CACHE = Room(
    "CacheConfig",
    takes=_each(
        {
            "cache_dtype kv_cache_dtype_skip_layers": "type of KV elements, after the layers have "
            "had their say",
            "sliding_window": "what a token attends to",
            "prefix_caching_hash_algo": "makes the key",
            "mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode "
            "enable_mamba_shared_prefix_checkpoint use_replayssm replayssm_buffer_len "
            "use_kda_recoverssm": "what is kept of a state, and of which tokens",
            "kv_sharing_fast_prefill swa_bounded_replay": "which layers and tokens are computed at "
            "all",
        }
    ),
    leaves=_each(
        {
            "block_size mamba_block_size user_specified_block_size prefix_match_unit "
            "hash_block_size cache_hit_alignment_tokens _block_size_resolved "
            "effective_attention_block_size": "the manifest has tokens per block and per hash",
            "kv_cache_layout mamba_page_size_padded skip_page_size_padded": "the manifest has "
            "layout and bytes per chunk",
            "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks "
            "kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes "
            "kv_offloading_size kv_offloading_backend": _SIZES,
            "is_attention_free": "follows from the model",
            "enable_prefix_caching prefix_cache_retention_interval": "how long the engine keeps "
            "its own blocks",
        }
    ),
)

_ATTENTION = Room(
    "AttentionConfig",
    takes=_each(
        {
            "use_trtllm_attention disable_flashinfer_q_quantization "
            "use_prefill_query_quantization": "precision of queries, so of all later layers",
            "indexer_kv_dtype": "type of the indexer's elements",
            "indexer_sparse_logits sparse_mla_force_mqa use_non_causal hisparse_config": "what a "
            "token attends to, and what is kept of it",
        }
    ),
    by_hand=_each(
        {
            "backend": "as really chosen, by layer, see `layers`; not as asked for",
            "backend_per_kind": "so too; but with several pipeline stages as asked for, too",
        }
    ),
    leaves=_each(
        {
            "minimax_m3_msa_decode_backend flash_attn_version "
            "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
            "tq_max_kv_splits_for_cuda_graph mla_prefill_backend "
            "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n "
            "flex_attn_q_block_size flex_attn_kv_block_size": _ROUNDING,
        }
    ),
)

_PARALLEL = Room(
    "ParallelConfig",
    takes=_each(
        {
            "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size": "which rank has "
            "which token",
            "worker_cls worker_extension_cls": "whose code runs the model",
        }
    ),
    leaves=_each(
        {
            "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size "
            "decode_context_parallel_size world_size rank": "the manifest has the topology, where "
            "stored bytes depend on it",
            "data_parallel_size data_parallel_size_local data_parallel_rank "
            "data_parallel_rank_local data_parallel_index data_parallel_backend "
            "data_parallel_external_lb data_parallel_hybrid_lb": "replicas share what they store",
            "data_parallel_master_ip data_parallel_rpc_port dp_sync_interval "
            "data_parallel_master_port max_parallel_loading_workers enable_shm_tensor_arena "
            "disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env "
            "placement_group distributed_executor_backend master_addr master_port node_rank nnodes "
            "numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids "
            "distributed_timeout_seconds cpu_distributed_timeout_seconds "
            "_data_parallel_master_port_list _coord_store_port _api_process_count "
            "_api_process_rank enable_fault_tolerance fault_tolerance_config "
            "_allow_auto_resolve_cp_interleave_size": _PLACES,
            "is_moe_model": "follows from the model",
            "enable_hc_sp enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config "
            "expert_placement_strategy all2all_backend disable_custom_all_reduce enable_elastic_ep "
            "elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold "
            "dbo_prefill_token_threshold dcp_comm_backend dcp_q_replicate": _ROUNDING,
            "enable_batch_sharded_sampling": _SAMPLING,
        }
    ),
)

_SPECULATIVE = Room(
    "SpeculativeConfig",
    takes=_each(
        {
            "method num_speculative_tokens parallel_drafting index_share_for_mtp_iteration "
            "use_heterogeneous_vocab": "which layers draft, and what states are kept for them",
            "quantization moe_backend kv_cache_dtype attention_backend": "as the model's, of the "
            "drafter; its pages lie in the same chunks",
            "revision code_revision": "which drafter of a name",
            "disable_eagle_block_drop": "whether the drafter's last tokens are computed anew",
        }
    ),
    by_hand=_each(
        {
            "model": "manifest field model.more_weights.drafter: a fingerprint of its files",
            "draft_load_config": "with dummy weights",
        }
    ),
    leaves=_each(
        {
            "draft_tensor_parallel_size tensor_parallel_size draft_parallel_config "
            "target_model_config target_parallel_config": "follow from the model's",
            "enforce_eager use_local_argmax_reduction disable_padded_drafter_batch": _ROUNDING,
            "max_model_len": "when to stop drafting",
            "prompt_lookup_max prompt_lookup_min num_speculative_tokens_per_batch_size "
            "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
            "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob "
            "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length "
            "enable_adaptive_verification draft_sample_method dspark_draft_topk": _SAMPLING,
        }
    ),
    rooms={"draft_model_config": _MODEL},
)

_LORA = Room(
    "LoRAConfig",
    takes=_each(
        {
            "target_modules default_mm_loras": "which layers an adapter changes, and for which "
            "requests",
        }
    ),
    by_hand=_each(
        {
            "lora_dtype": "where it is not the model's",
            "enable_tower_connector_lora": "where it is on",
        }
    ),
    leaves=_each(
        {
            "max_lora_rank max_loras max_cpu_loras max_lora_cls_labels": _SIZES,
            "fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format "
            "enable_moe_shared_loras": _ROUNDING,
        }
    ),
)

_LOAD = Room(
    "LoadConfig",
    takes=_each(
        {"model_loader_extra_config ignore_patterns": "which files are read, and from where"}
    ),
    by_hand=_each({"load_format": "`dummy`, and then the seed; the others read the same weights"}),
    leaves=_each(
        {
            "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
            "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location": _PLACES,
        }
    ),
)

_KERNEL = Room(
    "KernelConfig",
    takes=_each(
        {
            "moe_backend linear_backend linear_backend_per_quant": "some quantise activations, "
            "others do not",
        }
    ),
    leaves=_each(
        {
            "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune "
            "enable_cutedsl_warmup enable_jit_warmup sparse_indexer_topk_backend": _ROUNDING,
        }
    ),
)

_MAMBA = Room(
    "MambaConfig",
    takes=_each(
        {
            "enable_stochastic_rounding stochastic_rounding_philox_rounds": "rounding that is "
            "meant to differ",
        }
    ),
    leaves=_each({"backend ssu_algorithm": _ROUNDING}),
)

ENGINE = Room(
    "VllmConfig",
    takes=_each(
        {
            "additional_config": "what it does is up to a platform's plug-in",
            "diffusion_config": "how many tokens attend to each other at once",
        }
    ),
    by_hand=_each(
        {
            "device_config": "the platform and its capability, see `device`",
            "weight_transfer_config": "weights that are replaced while the engine runs are nobody "
            "else's: a value of its own",
        }
    ),
    leaves=_each(
        {
            "quant_config": "follows from model.quantization, its configuration and the weights",
            "compilation_config optimization_level performance_mode": _ROUNDING,
            "scheduler_config": _BATCHING,
            "offload_config engram_config ec_transfer_config ec_manager_config instance_id "
            "shutdown_timeout": _PLACES,
            "structured_outputs_config watermark_config reasoning_config": _SAMPLING,
            "observability_config logging_config profiler_config kv_events_config "
            "aux_output_config": _WATCHING,
            "kv_transfer_config": "settings of this library: where chunks are and how long; the "
            "manifest has blocks per chunk",
        }
    ),
    rooms={
        "model_config": _MODEL,
        "cache_config": _CACHE,
        "attention_config": _ATTENTION,
        "parallel_config": _PARALLEL,
        "speculative_config": _SPECULATIVE,
        "lora_config": _LORA,
        "load_config": _LOAD,
        "kernel_config": _KERNEL,
        "mamba_config": _MAMBA,
    },
)
"""vLLM's whole configuration."""

SEALED = frozenset({"additional_config", "model_loader_extra_config"})
"""Fields that may hold credentials: only their digest is a fact."""

ENVIRONMENT = _each(
    {
        "VLLM_FLOAT32_MATMUL_PRECISION VLLM_BATCH_INVARIANT VLLM_CPU_INT4_W4A8 "
        "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD "
        "VLLM_MARLIN_INPUT_DTYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_INPUT_QUANT_CONFIG "
        "VLLM_HUMMING_USE_F16_ACCUM VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_USE_DEEP_GEMM_E8M0 "
        "VLLM_USE_DEEP_GEMM VLLM_MOE_USE_DEEP_GEMM VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 "
        "VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE "
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_USE_AITER_FP8BMM "
        "VLLM_ROCM_USE_AITER_FP4BMM": "precision of what is computed",
        "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_MHA "
        "VLLM_SSM_CONV_STATE_LAYOUT": "how elements lie in a page",
        "VLLM_MLA_DISABLE": "what is kept of a token",
        "VLLM_DISABLED_KERNELS": "which kernels are left: some quantise activations, others do not",
        "VLLM_VIDEO_LOADER_BACKEND": "how media become embeddings, as `media_io_kwargs`",
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_TEST_FORCE_LOAD_FORMAT": "made-up results",
    }
)
"""vLLM's environment variables that are facts where they are set; all others are not."""
