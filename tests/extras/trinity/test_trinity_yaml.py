"""Configurations of Trinity-RFT: translated keys, ignored keys, refused keys, and unusual values."""

import copy
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_assets import set_key, write_model

from roll_opd.base import hardware
from roll_opd.base.failures import ConfigError
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import LoraPlan, RunPlan
from roll_opd.config.schema import Top, Worker, keys_of
from roll_opd.extras.trinity.translation.keys import KEYS
from roll_opd.extras.trinity.translation.reading import Machine
from roll_opd.extras.trinity.translation.translate import translated
from roll_opd.planner.load_plan import load_plan
from roll_opd.planner.lora_keys import LINEAR

pytestmark = pytest.mark.extras

# In the forms of Trinity-RFT's own examples, in small. {root} is where models and rows are.
GRPO = """
mode: both
project: arithmetic
name: grpo
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,{root}/checkpoints}
algorithm:
  algorithm_type: grpo
  repeat_times: 4
  optimizer: {lr: 1e-5, lr_warmup_steps_ratio: 0.1, warmup_style: cosine, min_lr_ratio: 0.1, betas: [0.9, 0.95]}
  kl_loss_fn_args: {kl_coef: 0.0}
  policy_loss_fn_args: {clip_range_low: 0.2, clip_range_high: 0.28, loss_agg_mode: seq-mean-token-sum}
  advantage_fn_args: {std_threshold: 0.0001}
data_processor: {}
model: {model_path: "${oc.env:TRINITY_MODEL_PATH,{root}/student}", max_response_tokens: 48, max_model_len: 80}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  batch_size: 8
  total_epochs: 2
  explorer_input:
    taskset:
      name: sums
      storage_type: file
      path: {root}/rows
      subset_name: main
      split: train
      format: {prompt_key: question, response_key: answer, system_prompt: Add.}
      rollout_args: {temperature: 0.7, logprobs: 0}
      workflow_args: {}
      enable_progress_bar: false
    eval_tasksets:
      - name: held
        path: {root}/rows
        split: test
        format: {prompt_key: question, response_key: answer}
        rollout_args: {n: 2, top_p: 0.8, top_k: 20}
    default_workflow_type: math_workflow
  trainer_input: {experience_buffer: {name: b, storage_type: queue, path: "sqlite:///b.db"}}
explorer:
  eval_interval: 10
  runner_per_model: 3
  max_timeout: 900
  rollout_model: {engine_num: 2, tensor_parallel_size: 2, enforce_eager: true, dtype: bfloat16, seed: 7,
                  gpu_memory_utilization: 0.85, enable_history: true, enable_openai_api: true}
synchronizer: {sync_method: nccl, sync_style: dynamic_by_explorer, sync_interval: 2, sync_timeout: 1200}
trainer:
  trainer_type: verl
  save_interval: 40
  grad_clip: 0.5
  use_dynamic_bsz: true
  max_token_len_per_gpu: 512
  ulysses_sequence_parallel_size: 2
  trainer_config:
    actor_rollout_ref: {model: {use_remove_padding: true}, actor: {fsdp_config: {param_offload: true}}}
    trainer: {max_actor_ckpt_to_keep: 5}
monitor: {monitor_type: tensorboard}
log: {level: INFO}
"""
DISTIL = """
project: arithmetic
algorithm: {algorithm_type: on_policy_distill, repeat_times: 2, advantage_fn_args: {kl_coef: 0.5}}
model: {model_path: {root}/student, max_prompt_tokens: 32, max_response_tokens: 48, temperature: 0.6}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  batch_size: 16
  total_steps: 5
  explorer_input:
    taskset: {path: {root}/rows/main/train.jsonl, format: {prompt_key: question, response_key: answer}}
    default_workflow_type: on_policy_distill_workflow
explorer:
  rollout_model: {engine_num: 2}
  auxiliary_models: [{model_path: {root}/teacher, engine_num: 1, tensor_parallel_size: 2, dtype: bfloat16}]
trainer: {save_interval: 0}
"""
PPO = """
algorithm: {algorithm_type: ppo, repeat_times: 2, kl_penalty_fn: k3, kl_penalty_fn_args: {kl_coef: 0.01}}
model: {model_path: {root}/student, critic_model_path: {root}/teacher, max_prompt_tokens: 32, max_response_tokens: 48}
cluster: {node_num: 1, gpu_per_node: 4}
buffer:
  batch_size: 8
  train_batch_size: 8
  total_steps: 5
  explorer_input:
    tasksets: [{path: {root}/rows/main/train.jsonl, default_reward_fn_type: math_dapo_reward,
                reward_fn_args: {enable_overlong_penalty: true, penalty_factor: 0.5, max_response_length: 48,
                                 cache_length: 16}}]
    default_workflow_type: simple_workflow
explorer: {rollout_model: {engine_num: 2}}
trainer:
  trainer_config:
    actor_rollout_ref: {actor: {optim: {lr: 2e-6}, ppo_epochs: 2}}
    critic: {optim: {lr: 2e-5}, cliprange_value: 0.25}
    trainer: {critic_warmup: 1}
"""
CHORD = """
algorithm: {algorithm_type: mix_chord, kl_loss_fn: none, repeat_times: 4,
            sample_strategy_args: {expert_data_ratio: 0.2},
            policy_loss_fn_args: {mu_peak: 0.4, clip_range: 0.2, ngpus_trainer: 4, train_batch_size_expert: 64,
                                  use_token_level_loss_in_sft: true}}
model: {model_path: {root}/student, max_prompt_tokens: 32, max_response_tokens: 48}
buffer:
  batch_size: 8
  total_steps: 5
  explorer_input:
    taskset: {path: {root}/rows/main/train.jsonl, format: {prompt_key: question, response_key: answer}}
    default_workflow_type: math_boxed_workflow
  trainer_input:
    sft_warmup_dataset: {path: {root}/answers.jsonl, format: {prompt_type: messages, messages_key: messages}}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_model(tmp_path / "student", seed=1)
    write_model(tmp_path / "teacher", seed=2)
    (tmp_path / "rows/main").mkdir(parents=True)
    for split, count in (("train", 40), ("test", 8)):
        rows = [{"question": f"a{number}", "answer": "b", "prompt": "a", "response": "b"} for number in range(count)]
        (tmp_path / f"rows/main/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "answers.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 20)
    return tmp_path


@pytest.fixture(autouse=True)
def slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without GPUs, on any machine."""
    monkeypatch.setattr(hardware, "_gpu_mebibytes", list)
    monkeypatch.setattr(hardware, "devices", lambda: 2)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_gpu_mebibytes", lambda: [80_000] * 8)
    monkeypatch.setattr(hardware, "devices", lambda: 8)


Planner = Callable[..., tuple[RunPlan, str]]


@pytest.fixture
def plan(root: Path) -> Planner:
    """Plan a configuration after dotted-key changes (`...` removes a key); return the plan and the report."""

    def make(text: str, changes: dict[str, Any] | None = None, *overrides: str) -> tuple[RunPlan, str]:
        values = yaml.safe_load(text.replace("{root}", str(root)))
        for key, value in (changes or {}).items():
            set_key(values, key, value)
        dumped = yaml.safe_dump(values, sort_keys=False).replace("NUMBER", "1.50e1")
        (root / "theirs.yaml").write_text(dumped)
        reported: list[str] = []
        return load_plan(str(root), "theirs", list(overrides), say=reported.append), "\n".join(reported)

    return make


@pytest.fixture
def refusals(plan: Planner) -> Callable[..., list[str]]:
    def make(*args: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            plan(*args)
        return caught.value.problems

    return make


def test_numbers_are_quoted_as_written(plan: Planner, refusals: Callable[..., list[str]], root: Path) -> None:
    assert plan(GRPO, {}, "exp_name=1e3")[0].exp_name == "1e3"
    held = {"name": "held", "path": f"{root}/rows", "split": "test", "rollout_args": {"n": "NUMBER"}}
    teacher = {"model_path": f"{root}/teacher", "engine_num": "NUMBER"}
    cases = [
        (GRPO, {}, "rollout_batch_size=1.50e1"),
        (GRPO, {}, "actor_infer.generating_args.stop_strings=[a,1.50e1]"),
        (GRPO, {"buffer.explorer_input.eval_tasksets": [held]}),
        (GRPO, {"algorithm.repeat_times": "NUMBER"}),
        (GRPO, {"algorithm.optimizer.betas": [0.9, "NUMBER"]}),
        (DISTIL, {"explorer.auxiliary_models": [teacher]}),
    ]
    for text, changes, *overrides in cases:
        (problem,) = refusals(text, changes, *overrides)
        assert "1.50e1" in problem and "15" not in problem, problem


def test_grpo_without_gpus(plan: Planner, root: Path) -> None:
    found, reported = plan(GRPO)
    assert found.mode == "rl" and found.exp_name == "grpo" and found.output_dir == f"{root}/checkpoints/arithmetic"
    assert found.rollout_batch_size == 8 and found.rollout.sampling.n == 4 and found.max_steps == 2 * 40 // 8
    assert found.student.mini_batch_sequences == 32 and found.objective.kl_loss_coef == 0
    assert found.objective.policy_loss_args["clip_high"] == 0.28
    assert found.objective.loss_agg_mode == "seq-mean-token-sum"
    assert found.objective.advantage_args["std_threshold"] == 0.0001
    assert found.student.optimizer.learning_rate == 1e-5 and found.student.optimizer.max_grad_norm == 0.5
    assert found.rollout.sampling.temperature == 0.7
    assert found.data.prompt_length and found.rollout.max_model_len == 32 + 48
    assert found.workflow and found.workflow.workflow == "math_workflow" and found.workflow.workflow_timeout == 900
    assert found.workflow.system_prompt == "Add." and not found.workflow.workflow_args
    assert found.workflow.workflow_workers == 2  # of 3: as many as there are slots
    assert found.validation and found.validation.sampling.n == 2 and found.validation.sampling.top_k == 20
    assert found.eval_steps == 10 and found.checkpoint.save_steps == 40 and found.checkpoint.max_ckpt_to_keep == 5
    assert found.seed == 7 and found.student.model.dtype == "fp32"
    assert [term.worker for term in found.rewards[0].terms] == ["math_rule", "format"]
    assert found.reference is None and not found.warnings
    dropped = next(line for line in reported.splitlines() if "no GPUs" in line)
    for key in ("gpu_per_node", "engine_num", "tensor_parallel_size", "dtype", "gpu_memory_utilization", "ulysses"):
        assert key in dropped
    assert "synchronizer.sync_interval" in reported and "weights of the previous step" in reported
    assert "algorithm.repeat_times -> num_return_sequences_in_group: 4" in reported


@pytest.mark.usefixtures("gpus")
def test_devices_are_those_of_the_cluster(plan: Planner) -> None:
    found, _ = plan(GRPO)
    assert found.devices_per_node == 8 and found.student.devices == (0, 1, 2, 3)
    assert found.student.layout.tp == 2 and found.student.layout.dp == 2
    assert found.rollout.devices == (4, 5, 6, 7) and found.rollout.layout.tp == 2
    assert found.student.model.dtype == found.rollout.model.dtype == "bf16"
    assert found.student.mini_batch_sequences == 32

    found, _ = plan(DISTIL)
    (teacher,) = found.teachers
    assert found.student.devices == (0, 1, 2, 3) and found.rollout.devices == (4, 5)
    assert teacher.source.devices == (6, 7) and teacher.source.layout.tp == 2

    found, _ = plan(PPO)
    assert found.critic and found.reference
    assert found.student.devices == found.critic.devices == found.reference.devices == (0, 1)


def test_trinitys_distillation_is_planned(plan: Planner, root: Path) -> None:
    found, _ = plan(DISTIL)
    (teacher,) = found.teachers
    assert found.mode == "pure" and teacher.source.model.path == str(root / "teacher")
    assert teacher.opd_kl_coef == 0.5 and found.rollout.sampling.temperature == 0.6
    assert found.max_steps == 5 and found.student.optimizer.learning_rate == 1e-6  # Trinity-RFT's default
    assert not found.warnings


def test_trinitys_ppo_is_planned(plan: Planner, root: Path) -> None:
    found, _ = plan(PPO)
    assert found.critic and found.critic.model.path == str(root / "teacher") and found.critic.value_clip == 0.25
    assert found.critic.critic_warmup == 1 and found.critic.optimizer.learning_rate == 2e-5
    assert found.student.optimizer.learning_rate == 2e-6 and found.student.mini_batch_sequences == 8
    assert found.objective.init_kl_coef == 0.01 and found.objective.kl_penalty == "low_var_kl"
    assert found.objective.kl_loss_coef == 0.001 and found.reference
    correct, penalty = found.rewards[0].terms
    assert correct.worker == "math_rule" and penalty.weight == 0.5
    assert penalty.args == {"max_tokens": 48, "cache_tokens": 16}
    assert found.workflow and found.workflow.prompt_key == "prompt" and found.workflow.response_key == "response"


def test_trinitys_demonstrations_are_planned(plan: Planner) -> None:
    found, reported = plan(CHORD)
    assert found.objective.policy_loss_args["mu_peak"] == 0.4 and "policy_loss_fn_args.ngpus_trainer" in reported
    assert found.demonstrations and found.demonstrations.rows_per_update == 8  # beside 8 x 4 samples: a fifth of 40
    assert found.student.mini_batch_sequences == 40 and found.reference is None


@pytest.mark.parametrize(("workflow", "name"), [("simple_workflow", "countdown_reward"), ("mine", "math_reward")])
def test_a_reward_that_the_workflow_calls(plan: Planner, workflow: str, name: str) -> None:
    """Where `rewards` has no counterpart, and where the workflow is the user's own."""
    changes = {"default_workflow_type": workflow, "default_reward_fn_type": name, "taskset.reward_fn_args": {"a": 1}}
    found, _ = plan(GRPO, {f"buffer.explorer_input.{key}": value for key, value in changes.items()})
    assert found.workflow and found.workflow.workflow_reward == name and not found.rewards
    assert found.workflow.workflow_reward_args == {"a": 1}


def test_workflows_of_mathematics(plan: Planner, refusals: Any) -> None:
    """Their arguments and rewards have the same effect as in Trinity-RFT."""
    place = "buffer.explorer_input"
    boxed = {f"{place}.default_workflow_type": "math_boxed_workflow"}
    thinking = {f"{place}.taskset.workflow_args": {"with_think": True, "format_score_coef": 0.2}}
    found, _ = plan(GRPO, {**boxed, **thinking})
    assert found.workflow and found.workflow.workflow_reward == "math_boxed_reward" and not found.rewards
    assert found.workflow.workflow_args == {"with_think": True, "format_score_coef": 0.2}
    found, _ = plan(GRPO, {**boxed, f"{place}.taskset.workflow_args": {"use_base": True}})
    assert found.workflow and found.workflow.workflow_reward is None and found.rewards[0].terms[0].worker == "math_rule"
    assert all("unknown argument of math_workflow" in problem for problem in refusals(GRPO, thinking))
    own = {f"{place}.taskset.format.system_prompt": ...}
    assert plan(GRPO, own)[0].workflow.system_prompt is None
    found, reported = plan(GRPO, {**own, f"{place}.default_reward_fn_type": "accuracy_reward"})
    assert found.workflow and found.workflow.system_prompt == "" and "system_prompt" in reported


def test_overrides_are_of_our_keys(plan: Planner) -> None:
    more = ("max_steps=3", "+student_infer.generating_args.top_k=5", "~opd_kl_coef", "exp_name=other")
    found, _ = plan(DISTIL, {}, *more)
    assert found.max_steps == 3 and found.exp_name == "other" and found.rollout.sampling.top_k == 5
    assert found.teachers[0].opd_kl_coef == 1.0


def test_references_and_environment_variables_of_a_yaml_are_resolved(
    plan: Planner, refusals: Any, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    changes = {"model.model_path": "${oc.env:TRINITY_MODEL_PATH}", "trainer.save_interval": "${buffer.total_steps}"}
    (problem,) = refusals(DISTIL, changes)
    assert "TRINITY_MODEL_PATH is not set" in problem and "model_path" in problem
    monkeypatch.setenv("TRINITY_MODEL_PATH", str(root / "teacher"))
    found, _ = plan(DISTIL, {**changes, "explorer.auxiliary_models": [{"model_path": str(root / "student")}]})
    assert found.student.model.path == str(root / "teacher") and found.checkpoint.save_steps == 5


def test_models_that_workflows_ask(plan: Planner, root: Path) -> None:
    """A judge has a name; the teacher in a user's workflow is also such a model."""
    judge = {"model_path": str(root / "teacher"), "name": "judge", "engine_num": 1, "max_model_len": 64}
    found, _ = plan(GRPO, {"explorer.auxiliary_models": [judge, {"model_path": str(root / "student")}]})
    one, other = found.workflow.auxiliary_models
    assert (one.name, other.name) == ("judge", "auxiliary_1") and one.engine.max_model_len == 64
    assert one.engine.model.path == str(root / "teacher") and not found.teachers
    found, _ = plan(DISTIL, {"buffer.explorer_input.default_workflow_type": "my_workflows.Mine"})
    (teacher,) = found.workflow.auxiliary_models
    assert teacher.engine.model.path == found.teachers[0].source.model.path
    assert plan(DISTIL, {})[0].workflow.auxiliary_models == ()


def test_an_auxiliary_model_samples_as_it_is_written(plan: Planner, root: Path) -> None:
    """Missing settings are the student's, as in Trinity-RFT; redundant lengths are listed."""
    judge = {"model_path": str(root / "teacher"), "max_prompt_tokens": 20, "max_response_tokens": 9, "temperature": 0.3}
    other = {"model_path": str(root / "teacher"), "max_model_len": 64, "max_prompt_tokens": 20, "top_p": 0.5}
    found, reported = plan(GRPO, {"explorer.auxiliary_models": [judge, other], "model.temperature": 0.8})
    one, two = (model.engine for model in found.workflow.auxiliary_models)
    assert (one.sampling.temperature, one.sampling.max_new_tokens, one.max_model_len) == (0.3, 9, 29)
    assert (two.sampling.temperature, two.sampling.top_p, two.sampling.max_new_tokens) == (0.8, 0.5, 48)
    assert "auxiliary_models.1.max_prompt_tokens: max_model_len sets" in reported
    found, _ = plan(GRPO, {"explorer.auxiliary_models": [other]})
    assert found.workflow.auxiliary_models[0].engine.sampling.temperature == 1.0
    found, _ = plan(
        DISTIL,
        {
            "buffer.explorer_input.default_workflow_type": "my_workflows.Mine",
            "explorer.auxiliary_models": [{**judge, "max_response_tokens": 11}],
        },
    )
    assert found.teachers and found.workflow.auxiliary_models[0].engine.sampling.max_new_tokens == 11


def test_trinitys_lora_keys_make_the_adapter(plan: Planner) -> None:
    written, _ = plan(GRPO, {"model.lora_configs": [{"name": "lora", "is_dummy": True, "path": "", "lora_rank": 4}]})
    assert written.student.lora == LoraPlan(LINEAR, 4, 32.0)  # alpha and targets: their defaults


def test_keys_of_trinity_0_6_are_translated(plan: Planner) -> None:
    place, engine = "buffer.explorer_input.taskset", "explorer.rollout_model"
    mapped = {
        "algorithm.loss_agg_mode": "seq-mean-token-mean",  # beside the loss's own, which it takes the place of
        "algorithm.optimizer.clip_grad": 0.25,
        "trainer.grad_clip": ...,
        "model.repetition_penalty": 1.5,
        f"{engine}.temperature": 0.5,
        f"{engine}.top_p": 0.7,
        f"{place}.rollout_args": {"logprobs": 0},
    }
    nothing = {
        "algorithm.bypass_old_logprobs": True,
        "algorithm.rollout_correction": {"bypass_mode": True},
        "algorithm.kl_penalty_fn": "none",
        "model.trust_remote_code": True,
        f"{place}.data_selector": {"selector_type": "shuffle", "seed": 3},
        f"{engine}.data_parallel_size": 1,
        f"{engine}.logprobs": 0,
        f"{engine}.enable_chunked_prefill": True,
        "trainer.megatron": {"tensor_model_parallel_size": 2},
        "trainer.critic_warmup": 0,
        "trainer.param_offload": True,
        "trainer.use_remove_padding": True,
        "synchronizer.explorer_sync_interval": 4,
    }
    found, reported = plan(GRPO, {**mapped, **nothing})
    assert found.objective.loss_agg_mode == "seq-mean-token-mean"
    assert found.student.optimizer.max_grad_norm == 0.25
    sampling = found.rollout.sampling
    assert (sampling.repetition_penalty, sampling.temperature, sampling.top_p) == (1.5, 0.5, 0.7)
    assert found.validation and found.validation.sampling.repetition_penalty == 1.5
    assert "enable_chunked_prefill" not in found.rollout.engine_args
    dropped = reported.partition("ignored:")[2]
    for key in nothing:
        assert key in dropped, key
    assert f"{engine}.enable_chunked_prefill: this machine has no GPUs" in dropped
    read = " ".join(reported.partition("ignored:")[0].split())
    assert f"{place}.path + {place}.subset_name + {place}.split -> actor_train.data_args.file_name" in read
    assert "trainer.use_dynamic_bsz -> actor_train.use_dynamic_batching_in_train" in read


def largest_age(interval: int, offset: int, limit: float, steps: int = 60) -> int:
    """Return the largest age of a trained batch, from a simulation of Trinity-RFT with `sync_style: fixed`.

    The explorer waits at a transfer of weights for the trainer, and the trainer for the explorer. The trainer discards
    what its staleness control does not admit.
    """
    ages, explored = [], []  # explored: version of each sampled batch
    version, trained = 0, 0
    while trained < steps:
        explored.append(version)
        if len(explored) > offset and (len(explored) - offset) % interval == 0:  # the explorer needs a transfer
            while trained % interval or trained == version:
                if explored[trained] >= trained + 1 - limit:
                    ages.append(trained - explored[trained])
                trained += 1
            version = trained
    return max(ages)


@pytest.mark.usefixtures("gpus")
def test_the_largest_age_is_that_of_the_synchronizer(plan: Planner) -> None:
    """A style without a bound has the bound of its staleness control, or the age of an explorer that waits."""
    settings = {f"synchronizer.{name}": ... for name in ("sync_style", "sync_interval", "sync_offset")}
    control = {"algorithm.sample_strategy": "staleness_control", "algorithm.sample_strategy_args": {"max_staleness": 3}}
    for interval, offset, limit in itertools.product((1, 2, 4), (0, 1, 3), (None, 3)):
        here = {"synchronizer.sync_interval": interval, "synchronizer.sync_offset": offset}
        for text in (DISTIL, GRPO):
            found, reported = plan(text, {**settings, **here, **(control if limit else {})})
            expected = largest_age(interval, offset, limit or math.inf)
            assert found.async_generation_ratio == expected, (interval, offset, limit)
            assert found.objective.max_age == expected
            assert found.on_weight_update == ("wait" if expected else "continue")
            correction = found.objective.correction
            assert bool(correction and correction.weight) == (text == GRPO and expected > 0)
            assert f"-> async_generation_ratio: {expected}" in " ".join(reported.split())

    styles = [
        ({"sync_style": "fully_async", "trainer_sync_interval": 2}, {}, 3),  # two batches in flight
        ({"sync_style": "fully_async"}, {"explorer.max_inflight_batches": 4}, 4),
        ({"sync_style": "fully_async"}, control, 2),
        ({"sync_style": "explorer_driven", "sync_interval": 3}, {}, 2),
        ({"sync_style": "DYNAMIC_BY_EXPLORER", "sync_interval": 3}, control, 2),
        ({"sync_style": "trainer_driven", "sync_interval": 1, "trainer_sync_interval": 4}, {}, 3),
        # two updates per step: four updates are two steps
        ({"sync_style": "trainer_driven", "trainer_sync_interval": 4}, {"buffer.train_batch_size": 16}, 1),
        ({"sync_interval": 4}, {"buffer.train_batch_size": 16} | control, 0),
    ]
    for keys, other, expected in styles:
        found, reported = plan(GRPO, {**settings, **{f"synchronizer.{key}": v for key, v in keys.items()}, **other})
        assert found.async_generation_ratio == expected, keys
        style = keys.get("sync_style", "fixed")
        assert ("synchronizer.sync_style" in reported.partition("ignored:")[2]) == (style != "fixed")
        if expected:
            assert found.on_weight_update == ("continue" if style == "fully_async" else "wait"), keys


@pytest.mark.usefixtures("gpus")
def test_training_by_megatron_there_is_spread_as_there(plan: Planner) -> None:
    megatron = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    found, _ = plan(GRPO, {"trainer.trainer_strategy": "megatron", "trainer.megatron": megatron})
    layout = found.student.layout
    assert (layout.tp, layout.pp, layout.dp, layout.sequence_parallel) == (2, 2, 1, True)
    assert found.student.mini_batch_sequences == 32
    megatron |= {"expert_tensor_parallel_size": 1, "virtual_pipeline_model_parallel_size": None}
    found, _ = plan(GRPO, {"trainer.trainer_strategy": "megatron", "trainer.megatron": megatron})
    assert found.student.layout.etp == 1 and found.student.layout.vpp is None
    found, reported = plan(GRPO, {"trainer.megatron": megatron, "explorer.rollout_model.enable_chunked_prefill": True})
    assert found.student.layout.pp == 1 and "trainer_strategy is not megatron" in reported
    assert found.rollout.engine_args["enable_chunked_prefill"] is True


@pytest.mark.parametrize("has_gpus", [False, True])
@pytest.mark.parametrize("text", [GRPO, DISTIL, PPO, CHORD])
def test_no_key_vanishes(text: str, has_gpus: bool) -> None:
    """Each key that is not refused is in the list, either itself or with its section."""
    whole = yaml.safe_load(text.replace("{root}", "/root"))
    diag = Diagnostics()
    read = translated(whole, diag, Machine(8, has_gpus), lambda path, *_: [path], lambda files: 40)
    listed = {key for keys, *_ in read.mapped for key in keys.split(" + ")} | read.unread.keys()
    for place in places(whole):
        key, value = ".".join(map(str, place)), whole
        for part in place:
            value = value[part]
        if isinstance(value, dict | list) or key.startswith("trainer.trainer_config"):
            continue
        key = key.replace("explorer_input.tasksets.0", "explorer_input.taskset")
        assert any(key == other or key.startswith(f"{other}.") for other in listed), key


@pytest.mark.usefixtures("gpus")
def test_an_auxiliary_model_has_gpus_of_its_own(plan: Planner, root: Path) -> None:
    judge = {"model_path": str(root / "teacher"), "engine_num": 1, "tensor_parallel_size": 2}
    found, _ = plan(GRPO, {"explorer.auxiliary_models": [judge]})
    (model,) = found.workflow.auxiliary_models
    assert (model.engine.engines, model.engine.tp, len(model.engine.devices)) == (1, 2, 2)
    assert not set(model.engine.devices) & {*found.rollout.devices, *found.student.devices}


@pytest.mark.usefixtures("gpus")
def test_a_run_in_both_forms_is_one_run(plan: Planner, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = (
        text.replace("Qwen/Qwen3-1.7B", str(root / "student"))
        .replace("Qwen/Qwen3-32B", str(root / "teacher"))
        .replace("1024", "32")
        .replace("2048", "48")
        .replace("parallel_size: 4", "parallel_size: 2")
        for text in (Path(__file__).parent / "distil_in_both_forms.yaml").read_text(encoding="utf-8").split("---\n")
    )
    monkeypatch.chdir(root)
    (root / "data").mkdir()
    rows = '{"question": "a", "answer": "b", "ground_truth": "b", "tag": "math"}\n'
    (root / "data/train.jsonl").write_text(rows * 64)
    (root / "ours.yaml").write_text(ours)
    one, _ = plan(theirs, {"explorer.auxiliary_models": [{"model_path": str(root / "teacher"), "engine_num": 2,
                           "tensor_parallel_size": 2}]})  # fmt: skip
    other = load_plan(str(root), "ours")
    for found in (one, other):
        (teacher,) = found.teachers
        student, rollout = found.student, found.rollout
        assert (found.exp_name, found.mode, found.max_steps, found.checkpoint.save_steps) == ("distil", "pure", 200, 50)
        assert (found.rollout_batch_size, rollout.sampling.n, rollout.max_model_len) == (64, 8, 80)
        assert (student.devices, rollout.devices, teacher.source.devices) == ((0, 1), (2, 3), (4, 5, 6, 7))
        assert (student.mini_batch_sequences, teacher.source.layout.tp) == (512, 2)
        assert (student.optimizer.learning_rate, student.model.dtype) == (1e-6, "bf16")
        assert teacher.source.model.path == str(root / "teacher")


def test_all_refused_keys_are_reported_together(refusals: Any) -> None:
    changes = {
        "mode": "explore",
        "algorithm.repeat_tims": 3,
        "algorithm.batch_size": 3,
        "buffer.explorer_input.taskset.path": "openai/gsm8k",
        "buffer.explorer_input.taskset.storage_type": "sql",
        "model.lora_configs": [{"name": "lora", "exclude_modules": "lm_head"}],
        "data_processor.experience_pipeline.operators": [{"name": "x"}],
        "stages": [{"stage_name": "one"}],
        "trainer.trainer_config_path": "verl.yaml",
        "explorer.over_rollout.ratio": 0.2,
    }
    problems = refusals(GRPO, changes)
    expected = {
        "mode: explore": "(mode: both)",
        "algorithm.repeat_tims": "did you mean 'repeat_times'?",
        "algorithm.batch_size": "belongs to buffer.batch_size",
        "buffer.explorer_input.taskset.path": "a run downloads",
        "buffer.explorer_input.taskset.storage_type": "sql is not available",
        "model.lora_configs": "has exclude_modules",
        "data_processor.experience_pipeline.operators": "in the workflow",
        "stages": "one configuration per stage",
        "trainer.trainer_config_path": "not read",
        "explorer.over_rollout": "is_use_additional_prompts",
    }
    assert len(problems) == len(expected), problems
    for key, text in expected.items():
        (problem,) = [problem for problem in problems if problem.startswith(key)]
        assert text in problem and "theirs.yaml:" in problem


@pytest.mark.parametrize(
    ("text", "changes", "reported"),
    [
        (DISTIL, {"explorer.auxiliary_models": []}, "add the teacher as the first auxiliary model"),
        (GRPO, {"explorer.auxiliary_models": [{"model_path": "x"}]}, "auxiliary_models.auxiliary_0"),
        (GRPO, {"explorer.auxiliary_models": [{"model_pat": "x"}]}, "did you mean 'model_path'"),
        (DISTIL, {"buffer.train_batch_size": 12}, "not a divisor of the 32 sequences of a step"),
        (DISTIL, {"model.max_prompt_tokens": ...}, "model.max_prompt_tokens: is missing"),
        (DISTIL, {"model.model_path": ...}, "model.model_path: is missing"),
        (GRPO, {"buffer.explorer_input.taskset.split": "dev"}, "no file of split 'dev'"),
        (GRPO, {"buffer.explorer_input.default_workflow_type": ...}, "write the name of the workflow"),
        (GRPO, {"algorithm.algorithm_type": "sft"}, "start_sft_pipeline.py"),
        (GRPO, {"algorithm.kl_loss_fn_args": {"beta": 1}}, "the only supported argument is kl_coef"),
        (GRPO, {"buffer.batch_size": 0}, "an integer of at least 1"),
        (GRPO, {"buffer.batch_size": 100}, "less than one step of 100"),
        (GRPO, {"buffer": 3}, "expected a section with keys"),
        (GRPO, {"explorer.never_heard": 3}, "is not a key of Trinity-RFT up to 0.6"),
        (GRPO, {"algorithm.rollout_correction": {"rollout_is": "token"}}, "train_infer_correction"),
        (GRPO, {"explorer.rollout_model.data_parallel_size": 2}, "use more engines"),
        (GRPO, {"data": {"dataset_path": "x"}}, "before 0.2"),
        (GRPO, {"algorithm.sample_strategy_args": {"max_staleness": 2}}, "max_staleness: is not supported"),
        # the template of the tests does not read it
        (GRPO, {"model.enable_thinking": False}, "chat_template_kwargs.enable_thinking"),
        (GRPO, {"algorithm.sample_strategy": "warmup"}, "sample_strategy: warmup is not available"),
        (GRPO, {"algorithm.algorithm_type": "grop"}, "grop"),
        (GRPO, {"trainer.grad_clip": "much"}, "max_grad_norm"),  # our own check, with the place of their key
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_do(refusals: Any, text: str, changes: dict, reported: str) -> None:
    changes = {
        key: value.replace("{root}", f"{root}/rows") if isinstance(value, str) else value
        for key, value in changes.items()
    }
    problems = refusals(text, changes)
    assert any(reported in problem for problem in problems), problems


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"cluster.gpu_per_node": 4}, "leave some GPUs for training"),
        ({"cluster.gpu_per_node": 7}, "cannot be split among 3"),
        ({"explorer.rollout_model.dtype": "int8"}, "should be one of bfloat16"),
        ({"synchronizer.sync_style": "sometimes"}, "should be one of fixed"),
        ({"synchronizer.sync_interval": 0}, "synchronizer.sync_interval: should be an integer of at least 1"),
        ({"synchronizer.sync_offset": -1}, "synchronizer.sync_offset: should be an integer of at least 0"),
        (
            {
                "algorithm.sample_strategy": "staleness_control",
                "algorithm.sample_strategy_args": {"max_staleness": 1},
                "buffer.train_batch_size": 16,
            },
            "max_staleness: 1 discards samples within a step",
        ),
    ],
)
def test_devices_that_do_not_fit(refusals: Any, changes: dict, reported: str) -> None:
    problems = refusals(DISTIL, changes)
    assert any(reported in problem for problem in problems), problems


def test_a_place_is_named_by_their_key(refusals: Any) -> None:
    (problem,) = refusals(DISTIL, {"model.model_path": "/no/such/model"})
    assert "model.model_path, theirs.yaml:" in problem


def test_secrets_are_not_printed(plan: Planner) -> None:
    monitor = {"monitor_type": "wandb", "monitor_args": {"api_key": "abc123"}}
    found, reported = plan(GRPO, {"monitor": monitor}, "track_with=tensorboard", "~tracker_kwargs")
    assert "tracker_kwargs" in reported and "abc123" not in reported + found.config_yaml


def test_our_own_files_are_read_as_ever(root: Path) -> None:
    (root / "ours.yaml").write_text("model: x\nactor_train:\n  infer_batch_size: ${model}\n")
    with pytest.raises(ConfigError) as caught:
        load_plan(str(root), "ours")
    assert any("ours.yaml:3" in problem for problem in caught.value.problems), caught.value.problems


def test_our_keys_exist() -> None:
    for theirs, rule in KEYS.items():
        first, *rest = rule.ours.split(".")
        if first in ("{train}", "{infer}"):
            assert rest[0] in keys_of(Worker), theirs
        elif first:
            assert first in keys_of(Top), theirs


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


@pytest.mark.parametrize("has_gpus", [False, True])
@pytest.mark.parametrize("text", [GRPO, DISTIL, PPO, CHORD])
def test_no_value_of_any_key_is_a_surprise(text: str, has_gpus: bool) -> None:
    """Any value at any place is accepted, or refused with a message."""
    whole = yaml.safe_load(text.replace("{root}", "/root"))
    for *parents, last in places(whole):
        for junk in (3, -1, "x", [], {}, [1], {"a": 1}, True, float("nan"), float("inf")):
            values = copy.deepcopy(whole)
            place = values
            for parent in parents:
                place = place[parent]
            place[last] = junk
            diag = Diagnostics()
            read = translated(values, diag, Machine(8, has_gpus), lambda path, *_: [path], lambda files: 40)
            assert list(read.lines())
            assert all(len(problem) > 20 for problem in diag.problems)
