"""Every formula of the planner, with its source: nothing is calculated elsewhere that `--explain` should show.

Sources: "SGLang" is version 0.5.23 and "vLLM" version 0.32.0, by file and function; `tests/engines` compares the
formulas with those functions.
"""

from __future__ import annotations

from hicache.plan.formula import Formula

_POOL = "SGLang mem_cache/kv_cache_configurator.py, _handle_max_mamba_cache"
_STATE = "SGLang configs/mamba_utils.py"
_CELL = "SGLang model_executor/pool_configurator.py, _compute_cell_size"
_SHAPE = f"{_STATE}, Mamba2StateShape and KimiLinearStateShape"
_SWA = "SGLang model_executor/pool_configurator.py, HybridSWAPoolConfigurator"
_LIMIT = "SGLang mem_cache/kv_cache_configurator.py, resolve_max_num_reqs"
_VLLM = "vLLM v1/core/kv_cache_utils.py"
_MEMORY = "SGLang arg_groups/memory_hook.py, handle_gpu_memory_settings"
_ROW, _LAYER = "bytes per token and layer", "bytes per slot and layer"

# Weights and what they leave.
WEIGHTS = Formula(
    "weights_bytes_per_gpu",
    "ceil((expert_bytes / (tp * dp) + sharded_bytes / tp + copied_bytes) * stage_layers / layers + replicated_bytes)",
    "bytes",
    "GPU",
    "experts over all GPUs of a stage, whole (EP) or cut, heads over TP, latents and routers copied; largest stage",
)
GRAPH_BATCH = Formula(
    "graph_batch",
    "min(graph_batch_max, running_max)",
    "requests",
    "replica",
    f"{_MEMORY}: the largest batch of a CUDA graph, by GPU and no larger than may run",
)
HEADROOM = Formula(
    "headroom_bytes",
    "(512 + max(chunk_tokens, 2048) * 1.5 + gpus / 8 * 1024 + 1536"
    " + graph_batch * (2 + padding_mib * attention_groups)) * 2 ** 20",
    "bytes",
    "rank",
    f"{_MEMORY}: activations of a chunk, collectives, CUDA graphs; more of them with DP attention",
)
FRACTION = Formula(
    "memory_fraction",
    "min(fraction_max, max(0, round(1 - max(headroom_bytes, headroom_bytes_min) / gpu_bytes, 3)))",
    "share",
    "GPU",
    "SGLang's own default, or less: what is left for neither its weights nor its pools is at least its own headroom",
)
REST_OF_TOTAL = Formula(
    "rest_bytes",
    "floor(gpu_bytes * memory_fraction - weights_bytes - reserved_bytes)",
    "bytes",
    "rank",
    "SGLang --mem-fraction-static, vLLM --gpu-memory-utilization: a share of all memory, weights included",
)
REST_OF_FREE = Formula(
    "rest_bytes",
    "floor((gpu_bytes - weights_bytes - reserved_bytes) * memory_fraction)",
    "bytes",
    "rank",
    "TensorRT-LLM free_gpu_memory_fraction: a share of what is free once weights are loaded",
)

# Attention: bytes of one token in one layer, and in all layers of a rank.
KV_HEADS = Formula(
    "kv_heads_per_rank",
    "max(1, kv_heads // (tp // dcp))",
    "heads",
    "rank",
    "SGLang configs/model_config.py, get_num_kv_heads: replicated when there are fewer heads than ranks, never below 1",
)
GQA_ROW = Formula("kv_row_bytes", "heads_per_rank * (head_dim + v_head_dim) * element_bytes", _ROW, "rank", _CELL)
GQA_ROW_FP4 = Formula(
    "kv_row_bytes",
    "heads_per_rank * ceil((head_dim + v_head_dim) / 2 + (head_dim + v_head_dim) / 16)",
    _ROW,
    "rank",
    f"{_CELL}: two elements a byte, and a scale byte for each 16 elements",
)
MLA_ROW = Formula(
    "kv_row_bytes",
    "(latent_dim + rope_dim) * element_bytes",
    _ROW,
    "rank",
    f"{_CELL}: no head, every attention rank has it whole",
)
MLA_ROW_FP4 = Formula(
    "kv_row_bytes",
    "(latent_dim + rope_dim) // 2 + (latent_dim + rope_dim) // 16",
    _ROW,
    "rank",
    f"{_CELL}: two elements a byte, and a scale byte for each 16 elements",
)
MLA_ROW_PACKED = Formula(
    "kv_row_bytes",
    "latent_dim + latent_dim // 128 * 4 + rope_dim * 2",
    _ROW,
    "rank",
    "fp8_ds_mla: the latent in fp8, a float32 scale for each 128 of it, the rope part in bf16",
)
INDEX_ROW = Formula(
    "index_row_bytes",
    "index_dim + index_dim // 128 * 4",
    _ROW,
    "rank",
    "SGLang pool_configurator.py, _compute_dsa_indexer_cell_size: fp8 with a float32 scale for each 128 of it",
)
KV_CELL = Formula(
    "kv_cell_bytes", "layers * row_bytes", "bytes per token", "rank", f"{_CELL}: layers of the largest stage"
)
KV_CELL_DRAFT = Formula(
    "draft_cell_bytes",
    "int(cell_bytes * draft_layers / layers) * copies + draft_layers * index_bytes",
    "bytes per token",
    "rank",
    "SGLang DefaultPoolConfigurator: a draft that attends as its target does, on each DCP rank if with an indexer",
)
KV_PER_TOKEN = Formula(
    "kv_bytes_per_token_per_rank",
    "ceil((full_cell_bytes + draft_cell_bytes) / dcp + index_cell_bytes)",
    "bytes per token",
    "rank",
    "a token's latent or heads are on one of the DCP ranks; an indexer's keys are on all",
)
KV_CELL_SWA = Formula(
    "pool_bytes_per_token", "full_cell_bytes + window_ratio * window_cell_bytes", "bytes per token", "rank", _SWA
)

# Recurrent state: bytes of one slot.
CONV_PER_LAYER = Formula(
    "conv_bytes_per_layer",
    "(heads * head_dim + 2 * groups * state_dim) * (conv_kernel - 1) * conv_dtype_bytes",
    _LAYER,
    "rank",
    _SHAPE,
)
SSM_PER_LAYER = Formula(
    "ssm_bytes_per_layer", "heads * head_dim * state_dim * state_dtype_bytes", _LAYER, "rank", _SHAPE
)
STATE_ALL_LAYERS = Formula(
    "state_bytes_of_all_stages", "(conv_bytes + ssm_bytes) * layers", "bytes per slot", "replica", _STATE
)
STATE_SHARE = Formula(
    "state_stage_share",
    "stage_layers / layers",
    "share",
    "rank",
    f"{_POOL}: the largest stage's share, which every stage works out for itself alike",
)
STATE_PER_SLOT = Formula(
    "state_bytes_per_slot_per_rank", "int(all_stages_bytes * stage_share)", "bytes per slot", "rank", _POOL
)
CONV_PER_SLOT = Formula("conv_bytes_per_slot_per_rank", "conv_bytes * stage_layers", "bytes per slot", "rank", _STATE)
SSM_PER_SLOT = Formula("ssm_bytes_per_slot_per_rank", "ssm_bytes * stage_layers", "bytes per slot", "rank", _STATE)

# ReplaySSM rings, which stand in for the states of draft tokens.
RING_DEPTH = Formula(
    "replay_ring_depth",
    "2 ** ceil(log2(2 * window_tokens))",
    "tokens",
    "rank",
    "a power of two of at least twice the verify window, which is one anchor and its drafts",
)
RING_GDN = Formula(
    "replay_ring_bytes_of_all_stages",
    "(copies * depth * (heads * head_dim + key_heads * state_dim) * conv_dtype_bytes + heads * depth * 4) * layers",
    "bytes per request",
    "replica",
    f"{_STATE}, replayssm_ring_bytes_per_req: d, k and g; low parts of d and k too unless they are float32",
)
RING_KDA = Formula(
    "replay_ring_bytes_of_all_stages",
    "(2 * depth * (heads * head_dim + key_heads * state_dim) * conv_dtype_bytes"
    " + heads * depth * 4 + heads * depth * state_dim * 4) * layers",
    "bytes per slot",
    "replica",
    f"{_STATE}, replayssm_ring_bytes_per_req: raw v and k, d and k, beta, and a gate for each key channel",
)
RING = Formula("replay_ring_bytes", "int(all_stages_bytes * stage_share)", "bytes", "rank", _POOL)
RING_FIXED = Formula(
    "replay_ring_fixed_bytes",
    "ring_bytes * (running_max + 1)",
    "bytes",
    "rank",
    f"{_POOL}: GDN keeps a ring for each running request, and one for padding",
)

# The state pool.
SLOTS_PER_REQUEST = Formula(
    "slots_per_request",
    "base_slots + tracking_slots",
    "slots per request",
    "request",
    "SGLang kv_cache_configurator.py, _calculate_mamba_ratio; mem_cache/allocation_sizing.py",
)
RUNNING_PER_DP = Formula("running_max_per_dp_rank", "max(1, max_running_requests // dp)", "requests", "DP rank", _LIMIT)
STATE_BUDGET = Formula(
    "state_budget_bytes", "rest_bytes * ratio / (1 + ratio)", "bytes", "rank", f"{_POOL}: ratio of state to KV"
)
SLOTS_BY_RATIO = Formula(
    "state_slots",
    "int((budget_bytes - fixed_bytes - (slot_bytes + ring_bytes)) // (slot_bytes + ring_bytes))",
    "slots",
    "rank",
    f"{_POOL}: one slot more is padding",
)
SLOTS_SPECULATIVE = Formula(
    "state_slots",
    "int((budget_bytes - slot_bytes * (1 + draft_tokens) - ring_bytes)"
    " // (slot_bytes * (1 + draft_tokens / slots_per_request) + ring_bytes))",
    "slots",
    "rank",
    f"{_POOL}: each request that may run also keeps a state for each draft token",
)
SLOTS_GIVEN = Formula("state_slots", "slots_wanted // dp", "slots", "rank", f"{_POOL}: --max-mamba-cache-size")
SLOTS_RUNNING = Formula("state_slots", "running_max", "slots", "rank", f"{_POOL}: without radix cache one a request")
INTERMEDIATES = Formula(
    "draft_state_bytes",
    "slot_bytes * (min(running_max, state_slots // slots_per_request) + 1) * draft_tokens",
    "bytes",
    "rank",
    f"{_POOL}: states of draft tokens of the requests that really run, and of padding",
)
STATE_POOL = Formula(
    "state_pool_bytes", "(state_slots + 1) * (slot_bytes + ring_bytes) + fixed_bytes", "bytes", "rank", _POOL
)
KV_POOL = Formula("kv_pool_bytes", "rest_bytes - draft_state_bytes - state_pool_bytes", "bytes", "rank", _POOL)
STATE_CAP = Formula("requests_by_state", "state_slots // slots_per_request", "requests", "DP rank", _LIMIT)

# Tokens and requests.
KV_TOKENS = Formula(
    "kv_tokens",
    "kv_pool_bytes // cell_bytes // page_tokens * page_tokens * dcp",
    "tokens",
    "DP rank",
    "SGLang pool_configurator.py, calculate_pool_sizes; the stage that holds fewest decides",
)
KV_TOKENS_SWA = Formula(
    "kv_tokens", "floor(kv_pool_bytes / cell_bytes) // page_tokens * page_tokens", "tokens", "DP rank", _SWA
)
WINDOW_TOKENS = Formula(
    "window_tokens", "int(kv_tokens * window_ratio) // page_tokens * page_tokens", "tokens", "DP rank", _SWA
)
RUNNING_AUTO = Formula(
    "requests_by_engine",
    "min(max(min(int(kv_tokens / context_tokens * 512), 4096), 2048), kv_tokens // 2)",
    "requests",
    "DP rank",
    "SGLang resolve_max_num_reqs: its limit when none is given",
)
RUNNING_GIVEN = Formula("requests_by_engine", "min(running_max, kv_tokens // 2)", "requests", "DP rank", _LIMIT)
REQUEST_KV = Formula(
    "kv_bytes_per_request", "tokens * bytes_per_token", "bytes per request", "rank", "every token of the request"
)
REQUEST_KV_WINDOWS = Formula(
    "kv_bytes_per_request",
    "tokens * (bytes_per_token - window_bytes_per_token) + window_tokens * window_bytes_per_token",
    "bytes per request",
    "rank",
    "every token of the request; in windows, the last ones and a page",
)
REQUEST_STATE = Formula(
    "state_bytes_per_request",
    "slots_per_request * (slot_bytes + ring_bytes)",
    "bytes per request",
    "rank",
    "every slot that the request takes",
)
REQUEST_CLUSTER = Formula(
    "bytes_per_request",
    "(kv_bytes + state_bytes) * ranks",
    "bytes per request",
    "replica",
    "on all ranks that keep a part of the request: one DP rank's TP x PP",
)
SNAPSHOTS = Formula(
    "states_stored_per_request",
    "ceil(input_tokens / chunk_tokens) + 1",
    "states",
    "request",
    "one at the end of each prefill chunk, and one at the end of decode",
)

# vLLM draws pages of attention and states of every group from one pool of equal blocks.
VLLM_BLOCK = Formula(
    "block_tokens",
    "alignment_tokens * ceil(state_page_bytes / (alignment_tokens * row_bytes))",
    "tokens",
    "rank",
    "vLLM platforms/interface.py, _align_hybrid_block_size: a block of attention must be as large as a state",
)
VLLM_BLOCK_BYTES = Formula(
    "block_bytes", "group_layers * block_tokens * row_bytes", "bytes", "rank", f"{_VLLM}, _get_kv_cache_bytes_per_block"
)
VLLM_BLOCKS = Formula(
    "kv_blocks",
    "rest_bytes // block_bytes - 1",
    "blocks",
    "rank",
    f"{_VLLM}, get_kv_cache_config_from_groups; one block is the null block",
)
VLLM_REQUEST = Formula(
    "blocks_per_request",
    "attention_groups * ceil(tokens / (block_tokens * dcp)) + window_groups * window_blocks"
    " + state_groups * states_per_request",
    "blocks per request",
    "request",
    f"{_VLLM}, get_max_concurrency_for_kv_cache_config",
)
VLLM_TOKENS = Formula(
    "kv_tokens",
    "kv_blocks // attention_groups * block_tokens * dcp",
    "tokens",
    "DP rank",
    "what the groups of attention would hold, if states took no block",
)
VLLM_STATES = Formula(
    "state_slots", "kv_blocks // state_groups", "slots", "rank", "states of all layers, if attention took no block"
)
VLLM_SLOTS_PER_REQUEST = Formula(
    "slots_per_request",
    "running_states + draft_states",
    "slots per request",
    "request",
    "vLLM v1/kv_cache_interface.py, MambaSpec: with prefix caching (align) two, and one for each draft",
)
VLLM_LOGGED = Formula(
    "logged_kv_cache_tokens",
    "int((kv_blocks + 1) / blocks_at_context * context_tokens)",
    "tokens",
    "DP rank",
    f"{_VLLM}, get_kv_cache_capacity: concurrency x max_model_len, what one would hold if all were that long",
)

# Machines.
EXPERT_RANKS = Formula(
    "expert_ranks_per_token", "ep * (1 - (1 - 1 / ep) ** top_k)", "ranks", "cluster", "expected, with experts at random"
)
EXPERT_RANKS_FAR = Formula(
    "expert_ranks_on_other_nodes",
    "expert_ranks * (ep - gpus_per_node) / ep",
    "ranks",
    "cluster",
    "of the ranks above, those that are on another node",
)
CORES = Formula(
    "physical_cores",
    "api_servers + engine_cores + gpus + min(1, dp - 1)",
    "cores",
    "node",
    "vLLM docs: an API server and an engine core for each DP rank of a node, a worker for each GPU of it, a coordinator"
    " with DP > 1",
)
CHUNK_PER_DP = Formula(
    "chunk_tokens_per_rank",
    "chunk_tokens // dp",
    "tokens",
    "DP rank",
    "SGLang arg_groups/parallel_hook.py: chunked prefill size is divided by DP",
)

# Tiers below GPU memory.
TIER_TOKENS = Formula(
    "tier_tokens", "tier_bytes // bytes_per_token", "tokens", "cluster", "every byte of a token, stored once"
)
L2_TOKENS = Formula(
    "l2_tokens",
    "min(page_slots * page_tokens, state_slots * snapshot_tokens) * dp",
    "tokens",
    "replica",
    "hicache/sizing.py, l2_slot_counts: pages, and a snapshot of the state at the end of each prefill chunk",
)
L2_NODE = Formula("l2_bytes_per_node", "l2_bytes * gpus", "bytes", "node", "host memory of all ranks that run on it")
WRITE_RATE = Formula(
    "write_bytes_per_s",
    "new_tokens_per_s * bytes_per_token * write_amplification",
    "bytes/s",
    "cluster",
    "new tokens, once",
)
DWPD = Formula(
    "drive_writes_per_day",
    "write_bytes_per_s * 86400 / drive_bytes",
    "drive writes per day",
    "drive",
    "bytes of a day over the bytes of the drives",
)
