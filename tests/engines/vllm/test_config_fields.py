"""Every field of the installed vLLM's configs was judged: it is part of the namespace, or it changes no stored byte.

A field that a new release brings fails here, until somebody has decided.
"""

from __future__ import annotations

import dataclasses
import re
import warnings

import pytest

from hicache.connectors import vllm_identity

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch warn of themselves while they are imported
    from vllm import config, envs

CLASSES = {
    "model_config": config.ModelConfig,
    "model_config.multimodal_config": config.MultiModalConfig,
    "cache_config": config.CacheConfig,
    "parallel_config": config.ParallelConfig,
    "attention_config": config.AttentionConfig,
    "mamba_config": config.MambaConfig,
    "lora_config": config.LoRAConfig,
    "speculative_config": config.SpeculativeConfig,
}

# Those under "elsewhere" count, by what they lead to: the parsed config, the weights, the groups of the cache.
CHANGES_NOTHING = {
    "model_config": """
        elsewhere: hf_config hf_text_config hf_overrides hf_config_path config_format model model_weights revision seed
            multimodal_config
        allow_deprecated_quantization allowed_local_media_path allowed_media_domains disable_cascade_attn
        enable_cumem_allocator enable_nccl_comm_suspend enable_prompt_embeds enable_sleep_mode enable_trace_replay
        enforce_eager generation_config hf_token io_processor_plugin is_submodel_config logits_processors logprobs_mode
        max_logprobs override_generation_config pooler_config renderer_num_workers return_sampling_mask
        served_model_name skip_tokenizer_init sleep_mode_backend sleep_mode_offload_cudagraph
        sleep_preserve_parameter_names spec_target_max_model_len tokenizer tokenizer_mode tokenizer_revision
        use_fp64_gumbel word_embeddings_untied_by_checkpoint""",
    "model_config.multimodal_config": """
        allow_missing_mm_embeddings enable_mm_embeds interleave_mm_strings limit_per_prompt mm_encoder_attn_backend
        mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_ipc_gpu_memory_gb
        mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc
        skip_mm_profiling""",
    "cache_config": """
        elsewhere: hash_block_size kv_cache_layout mamba_page_size_padded prefix_caching_hash_algo
            skip_page_size_padded swa_bounded_replay
        _block_size_resolved cache_hit_alignment_tokens effective_attention_block_size
        enable_mamba_shared_prefix_checkpoint enable_prefix_caching gpu_memory_utilization is_attention_free
        kv_cache_max_concurrency kv_cache_memory_bytes kv_cache_size_tokens kv_offloading_backend kv_offloading_size
        num_cpu_blocks num_gpu_blocks num_gpu_blocks_override prefix_cache_retention_interval prefix_match_unit
        user_specified_block_size""",
    "parallel_config": """
        _allow_auto_resolve_cp_interleave_size _api_process_count _api_process_rank _coord_store_port
        _data_parallel_master_port_list all2all_backend assigned_physical_gpu_ids cpu_distributed_timeout_seconds
        data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index
        data_parallel_master_ip data_parallel_master_port data_parallel_rank data_parallel_rank_local
        data_parallel_rpc_port data_parallel_size data_parallel_size_local dbo_decode_token_threshold
        dbo_prefill_token_threshold dcp_comm_backend dcp_q_replicate disable_custom_all_reduce
        disable_nccl_for_dp_synchronization distributed_executor_backend distributed_timeout_seconds dp_sync_interval
        elastic_ep_max_dp_size enable_batch_sharded_sampling enable_dbo enable_elastic_ep enable_ep_weight_filter
        enable_eplb enable_expert_parallel enable_fault_tolerance enable_hc_sp enable_shm_tensor_arena eplb_config
        expert_placement_strategy fault_tolerance_config is_moe_model master_addr master_port
        max_parallel_loading_workers nnodes node_rank numa_bind numa_bind_cpus numa_bind_nodes placement_group rank
        ray_runtime_env ray_workers_use_nsight ubatch_size worker_cls worker_extension_cls world_size""",
    "attention_config": """
        flash_attn_max_num_splits_for_cuda_graph flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
        minimax_m3_msa_decode_backend sparse_mla_force_mqa sparse_mla_prefill_workspace_factor
        tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph""",
    "mamba_config": "ssu_algorithm stochastic_rounding_philox_rounds",
    "lora_config": """
        fully_sharded_loras max_cpu_loras max_lora_cls_labels max_lora_rank max_loras specialize_active_lora""",
    "speculative_config": """
        elsewhere: draft_load_config draft_model_config model revision code_revision
        disable_padded_drafter_batch draft_parallel_config draft_sample_method draft_tensor_parallel_size
        dspark_draft_topk enable_adaptive_verification enforce_eager max_model_len moe_backend
        num_speculative_tokens_per_batch_size prompt_lookup_max prompt_lookup_min rejection_sample_method
        suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth
        suffix_decoding_min_token_prob synthetic_acceptance_length synthetic_acceptance_rates target_model_config
        target_parallel_config tensor_parallel_size use_heterogeneous_vocab use_local_argmax_reduction""",
}
PARTS_THAT_CHANGE_NOTHING = """
    aux_output_config compilation_config device_config ec_manager_config ec_transfer_config instance_id kernel_config
    kv_events_config kv_transfer_config load_config logging_config observability_config offload_config
    optimization_level performance_mode profiler_config quant_config reasoning_config scheduler_config
    shutdown_timeout structured_outputs_config watermark_config weight_transfer_config"""


# Switches of the process whose names say that they are about precision, or make things up, and that change no number
# which another kernel of the same precision does not.
SWITCHES_THAT_CHANGE_NOTHING = """
    VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_USE_FLASHINFER_MOE_INT4 VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE
    VLLM_XPU_INC_WNA16_BACKEND"""
SPEAKING = re.compile(
    r"QUANT|FP8|FP4|INT4|INT8|W4A|WNA|A16|F16|E8M0|DTYPE|PRECISION|INVARIANT|SIMULAT|EMULATION|DETERMINIS|RANDOMIZE"
)
DUMMY_BATCHES = "VLLM_RANDOMIZE_DP_DUMMY_INPUTS"  # whose tokens nobody keeps


def names_of(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("part", CLASSES)
def test_every_field_was_judged(part: str) -> None:
    counted = set(vllm_identity._CONFIG_FIELDS[part])
    judged = set(CHANGES_NOTHING[part].replace("elsewhere:", "").split())
    assert counted & judged == set()
    assert counted | judged == names_of(CLASSES[part])


def test_every_config_was_judged() -> None:
    counted = {part for part in vllm_identity._CONFIG_FIELDS if "." not in part} | set(vllm_identity._CONFIGS_WHOLE)
    assert counted | set(PARTS_THAT_CHANGE_NOTHING.split()) == names_of(config.VllmConfig)


def test_every_switch_of_the_process_that_speaks_of_numbers_was_judged() -> None:
    speaking = {name for name in envs.environment_variables if SPEAKING.search(name)}
    judged = {*SWITCHES_THAT_CHANGE_NOTHING.split(), DUMMY_BATCHES}
    assert {name for name in speaking if not vllm_identity._ENVIRONMENT.fullmatch(name)} == judged
