"""Options of Megatron-core: passed to the engine, ignored with a warning, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_opd.base import hardware
from roll_opd.config.plan import RunPlan
from roll_opd.config.roll_keys import IGNORED_MEGATRON
from roll_opd.models.engine_options import MEGATRON_DECIDED, engine_options
from roll_opd.models.megatron_support import FOR_GPUS, SUPPORTED_OPTIONS, WITHOUT_EFFECT, unsupported, usable
from roll_opd.planner.layouts_and_devices import SIZES, SWITCHES

OPTIONS = "student_train.strategy_args.strategy_config"


def test_lists_name_options_of_the_installed_megatron_and_each_once() -> None:
    lists = [
        SUPPORTED_OPTIONS,
        FOR_GPUS,
        WITHOUT_EFFECT.keys(),
        MEGATRON_DECIDED,
        SIZES.keys(),
        {*SWITCHES},
        IGNORED_MEGATRON,
    ]
    for number, names in enumerate(lists):
        assert not any(names & other for other in lists[number + 1 :])
    assert {*SUPPORTED_OPTIONS, *FOR_GPUS, *WITHOUT_EFFECT} <= engine_options("Megatron").keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mtp_num_layers", 1),
        ("fp8", "hybrid"),
        ("enable_cuda_graph", True),
        ("tp_comm_overlap", True),
        ("cpu_offloading", True),
        ("deallocate_pipeline_outputs", True),
        ("defer_embedding_wgrad_compute", True),
        ("hierarchical_context_parallel_sizes", [2, 2]),
        ("transformer_impl", "local"),
        ("moe_token_dispatcher_type", "allgather"),
        ("recompute_modules", ["core_attn", "moe_act"]),
    ],
)
def test_what_would_do_nothing_is_refused(problems: Callable[..., list[str]], name: str, value: Any) -> None:
    (refused,) = problems({f"{OPTIONS}.{name}": value})
    assert refused.startswith(f"{OPTIONS}.{name}: ") and ("available" in refused or "cannot" in refused)


def test_what_asks_for_nothing_is_taken(plan: Callable[..., RunPlan]) -> None:
    assert plan({f"{OPTIONS}.fp8": None, f"{OPTIONS}.tp_comm_overlap": False, f"{OPTIONS}.mtp_num_layers": 0})


def test_what_has_no_effect_says_so(plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    written = {
        f"{OPTIONS}.cross_entropy_loss_fusion": True,
        f"{OPTIONS}.apply_rope_fusion": True,
        f"{OPTIONS}.recompute_modules": "core_attn,layernorm",
    }
    for memory, of_kernels in ((None, 1), (80.0, 0)):
        monkeypatch.setattr(hardware, "gpu_memory_gb", lambda memory=memory: memory)
        run = plan(written)
        reported = [text for text in run.warnings if "has no effect" in text]
        assert sum("cross_entropy_loss_fusion" in text for text in reported) == 1
        assert sum("apply_rope_fusion" in text for text in reported) == of_kernels
        assert run.student.megatron_args.keys() == {"apply_rope_fusion", "recompute_modules"}
    args = {"apply_rope_fusion": True, "recompute_modules": ("core_attn", "layernorm")}
    assert usable(args, has_kernels=True) == args
    assert usable(args, has_kernels=False) == {"recompute_modules": ["core_attn"]}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window=4096"),
        ({"model_type": "mistral"}, "write null"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "cannot learn"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 1, "norm_topk_prob": True}, "cannot learn"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 1, "norm_topk_prob": False}, None),
        ({"model_type": "nemotron"}, "models of type nemotron are not available"),
        ({"model_type": "minimax_m2", "attn_type_list": [1, 0]}, "linear attention"),
        ({"model_type": "minimax_m2", "attn_type_list": [1, 1], "rotary_dim": 64, "num_mtp_modules": 3}, None),
        ({"model_type": "gemma2", "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}, None),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, None),
    ],
)
def test_models_whose_numbers_would_be_wrong_are_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = unsupported(tmp_path)
    assert (said is None and found == []) or (said and len(found) == 1 and said in found[0])
