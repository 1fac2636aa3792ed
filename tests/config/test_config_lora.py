"""LoRA with ROLL's keys: the plan, the roles that compute with the base model, and refused settings."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from config_assets import SIZES, set_key
from safetensors.numpy import save_file

from roll_opd.commands.describe import to_json
from roll_opd.commands.plan_text import to_text
from roll_opd.config.plan import Layout, LoraPlan, RunPlan
from roll_opd.config.schema import ModelArgs
from roll_opd.models.adapter_files import CONFIG, HARMLESS, WEIGHTS, adapter_config, read_adapter, tensor_name
from roll_opd.models.model_files import ModelFilesError
from roll_opd.planner.lora_keys import LINEAR, check_experts

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]
STUDENT = "student_train.model_args"
PARALLEL = "strategy_args.strategy_config"


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"lora_target": "all-linear", "lora_rank": 64, "lora_alpha": 64}, LoraPlan(LINEAR, 64, 64.0)),
        ({"lora_target": "o_proj,q_proj, k_proj,v_proj", "lora_rank": 32}, LoraPlan(LINEAR[:4], 32, 64.0)),
        ({"lora_target": ["linear_fc1", "linear_qkv"]}, LoraPlan((*LINEAR[:3], *LINEAR[4:6]), 8, 16.0)),
        ({"lora_rank": 4}, LoraPlan(LINEAR, 4, 8.0)),
        ({"lora_target": "all-linear", "lora_rank": 0}, None),
        ({"lora_alpha": 16, "lora_rank": 0}, None),
    ],
)
def test_rolls_lora_keys_make_the_adapter(plan: Plan, keys: dict[str, Any], wanted: LoraPlan | None) -> None:
    assert plan({f"{STUDENT}.{key}": value for key, value in keys.items()}).student.lora == wanted


def test_the_engines_hold_the_adapter_beside_the_base(plan: Plan) -> None:
    """No update sends the base, so a sleeping engine must keep its weights."""
    given = {f"{STUDENT}.lora_rank": 4}
    held, merged = plan(given | {"lora_sync": "adapter"}), plan({"lora_sync": "merged"})
    assert held.rollout and held.rollout.adapter == held.student.lora and held.rollout.sleep_level == 1
    assert merged.rollout and merged.rollout.adapter is None and merged.rollout.sleep_level == 2
    key = "student_infer.strategy_args.strategy_config.sleep_level"
    asleep = plan({"lora_sync": "adapter", key: 2})
    assert asleep.rollout and asleep.rollout.sleep_level == 1
    assert any(warning.startswith(key) for warning in asleep.warnings)
    large = plan({f"{STUDENT}.lora_rank": 513, "lora_sync": "adapter"})
    assert large.rollout and large.rollout.adapter is None
    assert any(warning.startswith("lora_sync: ") for warning in large.warnings)
    assert any("lora_sync" in warning for warning in plan({f"{STUDENT}.lora_rank": 0}).warnings)


@pytest.mark.parametrize("section", [STUDENT, "teacher.model_args"])
def test_alpha_alone_asks_for_nothing(plan: Plan, section: str) -> None:
    run = plan({f"{section}.lora_alpha": 24})
    (warning,) = run.warnings
    assert run.student.lora is None and warning.startswith(f"{section}.lora_alpha: has no effect without lora_rank")


def test_the_engines_may_write_the_same_keys(plan: Plan) -> None:
    run = plan({f"{STUDENT}.lora_target": "all", "student_infer.model_args.lora_target": "q_proj"})
    assert run.student.lora and any("no effect here: " in text and "lora_target" in text for text in run.warnings)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({f"{STUDENT}.lora_target": "q_proj,w1"}, "lora_target: 'w1' is not a linear layer; use all-linear"),
        ({f"{STUDENT}.lora_rank": -1}, "lora_rank: "),
        ({f"{STUDENT}.lora_rank": 8, f"{STUDENT}.lora_dropout": 0.1}, "lora_dropout: 0.1: log-probs of a model under"),
        ({"teacher.model_args.lora_rank": 8}, "teacher.model_args.lora_rank: only the student has an adapter"),
        ({"student_infer.model_args.lora_rank": 8}, "student_infer.model_args.lora_rank: only the student has"),
        ({f"{STUDENT}.freeze_module_prefix": "x"}, "freeze_module_prefix: is not available yet"),
        ({f"{STUDENT}.additional_target": "embed_tokens"}, "additional_target: is not available yet"),
        ({f"{STUDENT}.adapter_name_or_path": "no/such"}, "adapter_name_or_path: no/such is neither a path"),
    ],
)
def test_one_problem_one_sentence(problems: Problems, changes: dict[str, Any], sentence: str) -> None:
    (found,) = problems(changes)
    assert sentence in found


MODULES = [f"model.layers.{layer}.self_attn.{name}" for layer in range(4) for name in ("q_proj", "o_proj")]


def adapter(directory: Path, modules: Sequence[str] = MODULES, tensors: Sequence[str] = (), **changes: Any) -> str:
    directory.mkdir()
    (directory / CONFIG).write_text(json.dumps({**adapter_config("base", 4, 6.0, ("q_proj", "o_proj")), **changes}))
    matrices = {tensor_name(module, "A"): np.ones((4, 8), np.float32) for module in modules}
    matrices |= {tensor_name(module, "B"): np.ones((8, 4), np.float32) for module in modules}
    save_file(matrices | dict.fromkeys(tensors, np.ones((4, 1), np.float32)), directory / WEIGHTS)
    return str(directory)


def test_an_adapter_to_begin_with_says_what_it_is(root: Path, plan: Plan) -> None:
    path = adapter(root / "adapter")
    assert plan({f"{STUDENT}.adapter_name_or_path": path}).student.lora == LoraPlan(("q_proj", "o_proj"), 4, 6.0, path)


@pytest.mark.parametrize(
    ("changes", "keys", "sentence"),
    [
        ({}, {"lora_rank": 8}, "lora_rank: the initial adapter has 4; remove this key"),
        (
            {},
            {"lora_target": "all-linear"},
            "lora_target: the initial adapter has q_proj,o_proj; remove this key",
        ),
        ({"use_dora": True}, {}, "has use_dora=True; only plain LoRA"),
        ({"rank_pattern": {"q_proj": 2}}, {}, "has rank_pattern={'q_proj': 2}; only plain LoRA"),
        ({"modules": ["lm_head"]}, {}, "has an adapter of lm_head; only linear layers can have adapters"),
        ({"modules": MODULES[:4]}, {}, "has adapters in 4 of 8 layers, none in model.layers.2.self_attn.o_proj"),
        ({"modules": [*MODULES, "model.layers.9.mlp.up_proj"]}, {}, "adapts model.layers.9.mlp.up_proj"),
        ({"tensors": ["base_model.model.lm_head.weight"]}, {}, "has base_model.model.lm_head.weight, which is no"),
        ({"tensors": [tensor_name("model.norm", "A")]}, {}, "lacks base_model.model.model.norm.lora_B.weight"),
        ({"r": None}, {}, "lacks r or lora_alpha"),
        ({"r": 2}, {}, "is [4, 8], but r is 2"),
    ],
)
def test_an_adapter_that_does_not_fit(
    root: Path, problems: Problems, changes: dict[str, Any], keys: dict[str, Any], sentence: str
) -> None:
    keys = {"adapter_name_or_path": adapter(root / "adapter", **changes), **keys}
    (found,) = problems({f"{STUDENT}.{key}": value for key, value in keys.items()})
    assert sentence in found


def test_a_key_that_is_not_known_is_refused_unless_it_is_empty(tmp_path: Path) -> None:
    """For every key of the installed peft: its default is accepted, and a value outside of `HARMLESS` is named."""
    import peft

    keys = {key: getattr(value, "value", value) for key, value in peft.LoraConfig().to_dict().items()}
    keys = {"some_new_key": None, **keys, **adapter_config("base", 4, 6.0, ("q_proj",))}
    accepted = {"init_lora_weights": ["gaussian", "orthogonal", "eva", False]}
    for number, key in enumerate(keys):
        for value in (keys[key], *accepted.get(key, ())):
            path = Path(adapter(tmp_path / f"{number}-{value}"[:40].replace("/", "-"), **{**keys, key: value}))
            assert read_adapter(path).targets == {"q_proj", "o_proj"}
        if key not in HARMLESS:
            for value in ("pissa_niter_4", [1], {"a": 2}, 3):
                (path / CONFIG).write_text(json.dumps({**keys, key: value}))
                with pytest.raises(ModelFilesError, match=f"{key}="):
                    read_adapter(path)


@pytest.mark.slow
def test_the_layers_are_those_that_peft_wrote(tmp_path: Path) -> None:
    """For every form of `target_modules`, and keys that restrict it."""
    import peft
    import transformers

    config = transformers.AutoConfig.for_model(**SIZES)
    forms: list[tuple[dict[str, Any], set[str]]] = [
        ({"target_modules": r".*\.self_attn\.(q|v)_proj"}, {"q_proj", "v_proj"}),
        ({"target_modules": "all-linear"}, set(LINEAR)),
        ({"target_modules": ["self_attn.k_proj", "up_proj"]}, {"k_proj", "up_proj"}),
        ({"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*k_proj"}, {"q_proj"}),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 1, 2, 3]}, {"q_proj"}),
    ]
    for number, (keys, wanted) in enumerate(forms):
        model = transformers.AutoModelForCausalLM.from_config(config)
        peft.get_peft_model(model, peft.LoraConfig(r=4, **keys)).save_pretrained(tmp_path / str(number))
        found = read_adapter(tmp_path / str(number))
        assert (found.targets, found.rank, len(found.modules)) == (wanted, 4, 4 * len(wanted))


def test_an_adapter_without_weights_is_none(root: Path, problems: Problems) -> None:
    path = adapter(root / "adapter")
    (root / "adapter" / WEIGHTS).unlink()
    (found,) = problems({f"{STUDENT}.adapter_name_or_path": path})
    assert f"has no {WEIGHTS}" in found


def taught_by_base(values: dict[str, Any], devices: str) -> dict[str, Any]:
    """Return a teacher with the student's weights that sees the answer."""
    set_key(
        values, "teacher.model_args.model_name_or_path", values["student_train"]["model_args"]["model_name_or_path"]
    )
    return {
        f"{STUDENT}.lora_rank": 8,
        "teacher.system_prompt": "Answer well.",
        "teacher.device_mapping": devices,
        f"teacher.{PARALLEL}": {},
    }


def test_the_base_is_the_student_without_its_adapter(plan: Plan, values: dict[str, Any]) -> None:
    """On the student's devices; on other devices, or without LoRA, the teacher is loaded."""
    run = plan(taught_by_base(values, values["student_train"]["device_mapping"]))
    teacher = run.teachers[0].source
    assert run.serving(teacher) is run.student and "teacher" not in run.memory
    assert "teacher is the student without its adapter" in to_text(run)
    assert to_json(run)["roles"]["student_train"]["lora"]["rank"] == 8
    whole = plan({f"{STUDENT}.lora_rank": 0})
    assert whole.serving(whole.teachers[0].source) is whole.teachers[0].source


def test_only_adapters_have_gradients_and_moments(plan: Plan) -> None:
    """Counted by hand: rank x (inputs + outputs) for each linear layer."""
    run = plan({f"{STUDENT}.lora_target": "q_proj,down_proj", f"{STUDENT}.lora_rank": 3})
    config = json.loads((Path(run.student.model.path) / "config.json").read_text())
    hidden, width, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    queries = config["num_attention_heads"] * config.get("head_dim", hidden // config["num_attention_heads"])
    count = layers * 3 * (hidden + queries + width + hidden)
    (parts,) = run.memory["student_train"]
    copies = run.student.layout.dp
    assert parts["gradients"] == 4 * count and parts["optimizer"] == 8 * count // copies
    assert parts["weights"] - 4 * count == plan({f"{STUDENT}.lora_rank": 0}).memory["student_train"][0]["weights"]


def test_adapters_of_experts_that_cannot_be_trained_are_refused() -> None:
    """By the tensors of the model, the targets and the layout."""
    each = [f"model.layers.0.mlp.experts.{expert}.{part}.weight" for expert in range(2) for part in LINEAR[4:]]
    shared, fused = "model.layers.0.mlp.shared_expert.up_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"
    cases = [(each, LINEAR, Layout(), 0), (each, LINEAR, Layout(tp=2, ep=2, etp=1), 0), (each, LINEAR, Layout(tp=2), 1)]
    cases += [(each, LINEAR[:6], Layout(), 1), (each, LINEAR[:4], Layout(tp=2), 0)]
    cases += [([*each, shared], LINEAR, Layout(), 1), ([fused], LINEAR, Layout(), 1)]
    for names, targets, layout, refused in cases:
        args = ModelArgs(lora_rank=4)
        before = len(args.diag.blockers)  # sections made without a configuration share one
        model: Any = SimpleNamespace(tensors=dict.fromkeys(names), path=Path("model"))
        check_experts(LoraPlan(targets, 4, 8.0), model, layout, args)
        assert len(args.diag.blockers) - before == refused, (names[0], targets, layout)
