"""Options of the engine that may change the distribution of samples are tested by the engine check, or refused."""

from collections.abc import Callable
from dataclasses import fields

import pytest

from roll_opd.config.plan import EngineCheckPlan, RunPlan
from roll_opd.config.schema import SamplingKeys, shared
from roll_opd.models.engine_options import ALTERING_OPTIONS, CHECKED_OPTIONS, REFUSED_OPTIONS, VLLM_DECIDED

OPTION = "student_infer.strategy_args.strategy_config"
SAMPLING = "student_infer.generating_args"
# options of memory, scheduling, processes, records and media, which change no distribution; a new option of vLLM is
# in none of the lists, and this test then asks where it belongs
_UNCHANGING = """
    _api_process_count _api_process_rank aggregate_engine_logging all2all_backend allowed_local_media_path
    allowed_media_domains async_scheduling aux_output_config block_size collect_detailed_traces
    cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params
    cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets data_parallel_address data_parallel_backend
    data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank
    data_parallel_rpc_port data_parallel_size data_parallel_size_local data_parallel_start_rank
    dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate
    device_ids disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats
    disable_nccl_for_dp_synchronization distributed_timeout_seconds download_dir dp_sync_interval
    elastic_ep_max_dp_size enable_chunked_prefill enable_cumem_allocator enable_dbo enable_elastic_ep
    enable_fault_tolerance enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing enable_log_requests
    enable_logging_iteration_details enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds
    enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend enable_return_routed_experts
    enable_shm_tensor_arena enable_sleep_mode enable_tower_connector_lora enforce_eager fail_on_environ_validation
    fault_tolerance_config fully_sharded_loras gpu_memory_utilization hf_token interleave_mm_strings
    io_processor_plugin jit_monitor_mode jit_monitor_verbose kv_cache_memory_bytes kv_cache_metrics
    kv_cache_metrics_sample kv_events_config kv_offloading_backend kv_offloading_size language_model_only
    limit_mm_per_prompt log_config_file log_level logging_config long_prefill_token_threshold
    long_prefill_token_threshold_adaptive mamba_block_size master_addr master_port max_cpu_loras
    max_cudagraph_capture_size max_logprobs max_lora_cls_labels max_loras max_model_len max_num_active_seqs
    max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens max_num_seqs
    max_parallel_loading_workers media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only
    mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type
    mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc nnodes node_rank
    num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes offload_backend offload_group_size
    offload_num_in_group offload_params offload_prefetch_step otlp_traces_endpoint per_request_spec_decode_metrics
    pipeline_parallel_size prefill_schedule_interval prefix_cache_retention_interval prefix_caching_hash_algo
    prefix_match_unit profiler_config pt_load_map_location ray_workers_use_nsight renderer_num_workers
    return_sampling_mask safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    scheduler_reserve_full_isl scheduling_policy served_model_name show_hidden_metrics_for_version shutdown_timeout
    skip_mm_profiling sleep_mode_offload_cudagraph sleep_preserve_parameter_names specialize_active_lora
    stream_interval tensor_parallel_size ubatch_size use_tqdm_on_load video_pruning_method video_pruning_rate watermark
"""


def test_each_option_of_the_installed_vllm_is_on_one_list() -> None:
    from vllm import AsyncEngineArgs

    lists = [set(VLLM_DECIDED), CHECKED_OPTIONS, REFUSED_OPTIONS.keys(), set(_UNCHANGING.split())]
    options = {field.name for field in fields(AsyncEngineArgs)}
    assert sum(map(len, lists)) == len(set().union(*lists)), "an option is on two lists"
    assert options == set().union(*lists)
    assert set(ALTERING_OPTIONS) <= CHECKED_OPTIONS


@pytest.mark.parametrize("name", ["runner", "structured_outputs_config", "skip_tokenizer_init"])
def test_options_without_samples_of_the_student_are_refused(problems: Callable[..., list[str]], name: str) -> None:
    value = {"runner": "generate", "structured_outputs_config": {}}.get(name, True)
    found = problems({f"{OPTION}.{name}": value or {"backend": "auto"}})
    assert [text for text in found if text.startswith(f"{OPTION}.{name}: ") and REFUSED_OPTIONS[name] in text], found


def test_altering_options_are_tested(plan: Callable[..., RunPlan], problems: Callable[..., list[str]]) -> None:
    option = {f"{OPTION}.speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    made = plan(option)
    assert made.objective.engine_check == EngineCheckPlan()
    assert [text for text in made.warnings if text.startswith(f"{OPTION}.speculative_config: ")]
    assert not [text for text in plan({f"{OPTION}.kv_cache_dtype": "auto"}).warnings if "kv_cache_dtype" in text]
    found = problems({**option, "engine_check": False})
    assert [text for text in found if text.startswith(f"{OPTION}.speculative_config: ")], found


def test_what_is_tested(plan: Callable[..., RunPlan]) -> None:
    """The distribution after top-k and top-p; the run's settings; weighted tokens of rounding engines."""
    made = plan({f"{SAMPLING}.top_p": 0.9, f"{SAMPLING}.top_k": 20})
    assert made.objective.engine_check == EngineCheckPlan(SamplingKeys(top_k=20, top_p=0.9))
    plain = {f"{SAMPLING}.top_p": 1.0, f"{SAMPLING}.top_k": -1}
    made = plan({f"{SAMPLING}.repetition_penalty": 1.1, f"{SAMPLING}.temperature": 0.7})
    assert made.objective.engine_check and made.rollout
    assert shared(SamplingKeys, made.objective.engine_check.sampling) == shared(SamplingKeys, made.rollout.sampling)
    assert plan({"engine_check": False}).objective.engine_check is None
    plain |= {f"{SAMPLING}.repetition_penalty": 1.0, f"{SAMPLING}.temperature": 1.0}
    assert plan({"engine_check": "warn", **plain}).objective.engine_check == EngineCheckPlan()
    correction = {"train_infer_correction": {"is_weight": {"enabled": True}}}
    assert plan(correction).objective.engine_check == EngineCheckPlan()
    made = plan({f"{OPTION}.quantization": "fp8", **correction})
    assert made.objective.engine_check == EngineCheckPlan(is_corrected=True)
