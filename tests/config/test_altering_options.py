"""Options of the engine that may change the distribution of samples are tested by the engine check, or refused."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from config_assets import base_values, set_key, write_config, write_model

from roll_opd.base.failures import ConfigError
from roll_opd.config.plan import EngineCheckPlan, RunPlan
from roll_opd.config.schema import SamplingKeys, shared
from roll_opd.models.engine_options import ALTERING_OPTIONS, CHECKED_OPTIONS, REFUSED_OPTIONS, VLLM_DECIDED
from roll_opd.planner.load_plan import load_plan

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
    max_cudagraph_capture_size max_logprobs max_lora_cls_labels max_model_len max_num_active_seqs
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
    assert ALTERING_OPTIONS.keys() <= CHECKED_OPTIONS


@pytest.mark.parametrize("name", ["runner", "structured_outputs_config", "skip_tokenizer_init"])
def test_options_without_samples_of_the_student_are_refused(problems: Callable[..., list[str]], name: str) -> None:
    value = {"runner": "generate", "structured_outputs_config": {}}.get(name, True)
    found = problems({f"{OPTION}.{name}": value or {"backend": "auto"}})
    assert [text for text in found if text.startswith(f"{OPTION}.{name}: ") and REFUSED_OPTIONS[name] in text], found


NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
WEIGHTED = {"train_infer_correction": {"is_weight": {"enabled": True}}}
FILTERED = {"train_infer_correction": {"filters": [{"enabled": True, "ratio_enabled": True, "ratio_high": 2.0}]}}
ADMITTED, REFUSED, UNCHANGED = "admitted with a note", "refused", "unchanged"


def test_an_option_that_may_alter_samples_needs_evidence(root: Path) -> None:
    """The test of samples, and for an engine that rounds also a correction; `plan` names the option in each case."""
    cases: list[tuple[str, Any, dict[str, Any], str]] = [
        *(("speculative_config", NGRAM, other, ADMITTED) for other in ({}, WEIGHTED)),
        *(("speculative_config", NGRAM, {"engine_check": value}, REFUSED) for value in (False, "warn")),
        ("speculative_config", NGRAM, {f"{SAMPLING}.repetition_penalty": 1.1}, REFUSED),
        ("hf_overrides", {"rope_theta": 1e4}, {"engine_check": "warn"}, REFUSED),
        *((name, "fp8", {}, REFUSED) for name in ("quantization", "kv_cache_dtype")),
        *((name, "fp8", WEIGHTED, ADMITTED) for name in ("quantization", "kv_cache_dtype")),
        ("quantization", "fp8", FILTERED, ADMITTED),
        ("quantization", "fp8", {**WEIGHTED, "engine_check": "warn"}, REFUSED),
        ("kv_cache_dtype", "bfloat16", {"student_infer.model_args.dtype": "fp32"}, REFUSED),
        ("kv_cache_dtype", "bfloat16", {"student_infer.model_args.dtype": "bf16"}, UNCHANGED),
        ("kv_cache_dtype", "auto", {"engine_check": False}, UNCHANGED),
    ]
    values = base_values(root)
    for name, value, others, expected in cases:
        own = deepcopy(values)
        for key, new in {f"{OPTION}.{name}": value, **others}.items():
            set_key(own, key, new)
        try:
            texts, found = load_plan(write_config(root, own), "run", pure=True).warnings, ADMITTED
        except ConfigError as error:
            texts, found = tuple(error.problems), REFUSED
        named = [text for text in texts if text.startswith(f"{OPTION}.{name}: ")]
        assert (found if named else UNCHANGED) == expected, (name, value, others, texts)


def test_the_options_of_speculation_are_one(plan: Callable[..., RunPlan], problems: Callable[..., list[str]]) -> None:
    """Shorthands and dashes as in vLLM; the draft model is found as other models are, and has the same token ids."""
    rollout = plan({f"{OPTION}.spec_method": "ngram", f"{OPTION}.spec_tokens": 2}).rollout
    assert rollout and rollout.speculates and rollout.engine_args == {"speculative_config": NGRAM}
    found = problems({f"{OPTION}.speculative_config": {"method": "suffix"}})
    assert [text for text in found if text.startswith(f"{OPTION}.spec_method: ")]


def test_a_mapping_as_text_is_refused_with_the_mapping(problems: Callable[..., list[str]]) -> None:
    """As on vLLM's command line; for every option that is a mapping."""
    text = json.dumps(NGRAM)
    for option in ("speculative_config", "compilation_config", "additional_config"):
        [found] = [one for one in problems({f"{OPTION}.{option}": text}) if one.startswith(f"{OPTION}.{option}: ")]
        assert text in found
    for wrong in (3, "ngram", ["ngram"], "[1]"):
        assert any(f"{OPTION}.speculative_config: " in one for one in problems({f"{OPTION}.speculative_config": wrong}))


def test_a_draft_model(root: Path, plan: Callable[..., RunPlan], problems: Callable[..., list[str]]) -> None:
    write_model(root / "config" / "earlier", seed=3)  # relative to the configuration
    write_model(root / "others", seed=3, vocab_size=70)
    key = f"{OPTION}.speculative_config"

    def draft(model: str, **more: Any) -> dict[str, Any]:
        return {key: {"model": model, "num-speculative-tokens": 2, **more}}

    made = plan(draft("earlier")).rollout
    assert made and made.engine_args["speculative_config"] == {
        "model": str((root / "config" / "earlier").resolve()),
        "num_speculative_tokens": 2,
    }
    for wrong in ("nowhere", str(root / "others"), str(root / "train.jsonl")):
        found = problems(draft(wrong))
        assert [text for text in found if text.startswith(f"{key}.model: ") and wrong in text], found
    assert plan(draft(str(root / "others"), use_heterogeneous_vocab=True)).rollout
    for model in ("ngram", "package.module.Proposer"):
        made = plan(draft(model)).rollout
        assert made and made.engine_args["speculative_config"]["model"] == model


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
    assert plan(WEIGHTED).objective.engine_check == EngineCheckPlan()
    made = plan({f"{OPTION}.quantization": "fp8", "engine_check": True, **WEIGHTED})
    assert made.objective.engine_check == EngineCheckPlan(is_corrected=True)
