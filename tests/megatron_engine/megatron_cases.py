"""What the Megatron workers are asked to do: layouts, sequences, train samples and the list of their jobs.

Shared by the workers and by the tests that compare their answers with Hugging Face, so everything is seeded, and
nothing here imports an engine.
"""

from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from roll_opd.algorithms.aggregation import MODES
from roll_opd.algorithms.registry import POLICY_LOSSES
from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import Layout, ObjectivePlan, OptimizerPlan
from roll_opd.samples.training import TeacherTargets, TrainSample, ValueSample
from tests.cover import cover

RANKS = 4  # processes
VOCABULARY = 101  # odd: padded wherever the vocabulary is split
DEMO = Path(__file__).parents[2] / "examples" / "demo" / "models"

LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tp=2),
    "tp2sp": Layout(tp=2, sequence_parallel=True),
    "pp2": Layout(pp=2),
    "dp2": Layout(dp=2),
    "tp2dp2": Layout(tp=2, dp=2),
    "tp2pp2": Layout(tp=2, pp=2),
    "tp2sppp2": Layout(tp=2, pp=2, sequence_parallel=True),
    "tp4": Layout(tp=4),
    "pp4": Layout(pp=4),
    "dp4": Layout(dp=4),
    "pp2dp2": Layout(pp=2, dp=2),
    "cp2": Layout(cp=2),
    "cp4": Layout(cp=4),
    "tp2spcp2": Layout(tp=2, cp=2, sequence_parallel=True),
    "pp2cp2": Layout(pp=2, cp=2),
    "cp2dp2": Layout(cp=2, dp=2),
    "pp2vpp2": Layout(pp=2, vpp=2),
    "pp2vpp2dp2": Layout(pp=2, vpp=2, dp=2),
    "tp2pp2vpp2": Layout(tp=2, pp=2, vpp=2),
    "pp2vpp2cp2": Layout(pp=2, vpp=2, cp=2),
    "ep2": Layout(dp=2, ep=2),
    "ep4": Layout(dp=4, ep=4),
    "tp2ep2": Layout(tp=2, ep=2, etp=1),
    "cp2ep2": Layout(cp=2, ep=2),
    "pp2ep2": Layout(pp=2, dp=2, ep=2),
    "tp2etp2ep2": Layout(tp=2, dp=2, ep=2),
    "tp2etp1": Layout(tp=2, etp=1),
    "tp2cp2ep2": Layout(tp=2, cp=2, ep=2, etp=1),
    "pp2vpp2ep2": Layout(pp=2, vpp=2, dp=2, ep=2),
}
# jobs whose gradients are reduced, and parameters gathered, while something else is computed, in small buckets
OVERLAPPED = (
    "few-dp2",
    "replay-qwen2_moe-ep2",
    "replay-qwen2_moe-cp2ep2",
    "replay-qwen2_moe-pp2ep2",
    "train-qwen3_tied-tp2dp2-distributed-70",
    "train-deep-pp2vpp2-distributed-70",
    "lora-dp2",
)
BUCKET = 3000  # values
EXPERT_MODELS = ("qwen3_moe", "qwen2_moe", "mixtral")
EXPERT_LAYOUTS = ("tp1", "tp2sp", "pp2", "ep2", "tp2ep2", "cp2ep2", "ep4", "pp2ep2", "tp2etp2ep2")
LATENT_LAYOUTS = {
    "deepseek_v3": ("cp2ep2", "pp2ep2", "tp2etp2ep2"),
    "deepseek_v2": ("tp2sp",),
}
EXPERT_GRID = [(model, layout) for layout in EXPERT_LAYOUTS for model in EXPERT_MODELS]
EXPERT_GRID += [("qwen3_moe", "tp2etp1")]  # each tensor rank has all experts
EXPERT_GRID += [(model, layout) for model, layouts in LATENT_LAYOUTS.items() for layout in layouts]
BIAS_RATES = {"deepseek_v3": 0.03}  # model -> how far biases of routers move in an update
EXPERT_RESUMES = [  # (model, layout that saved, that loads)
    ("qwen3_moe", "ep2", "tp2sp"),
    ("qwen3_moe", "tp2ep2", "ep2"),
    ("qwen3_moe", "ep2", "ep2"),
    ("deepseek_v3", "cp2ep2", "tp2ep2"),
]
ROUTER_COEFFICIENTS = {
    "z_loss": {"moe_z_loss_coeff": 0.05},
    "load_balancing_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3},
}
# layout -> (losses of routers, tokens a micro-batch): the balancing loss is one of micro-batches
ROUTER_LAYOUTS = {
    "tp1": (("z_loss", "load_balancing_loss"), None),
    "ep2": (("z_loss", "load_balancing_loss"), 70),
    "tp2ep2": (("z_loss", "load_balancing_loss"), None),
    "cp2ep2": (("z_loss", "load_balancing_loss"), None),
    "pp2ep2": (("z_loss",), 70),
}
REPLAYS = {  # (model, layout) -> whether layers are computed again on the way back
    ("qwen2_moe", "tp1"): False,
    ("qwen2_moe", "ep2"): True,
    ("qwen2_moe", "tp2ep2"): False,
    ("qwen2_moe", "cp2ep2"): False,
    ("qwen2_moe", "pp2ep2"): True,
    ("qwen2_moe", "pp2vpp2"): True,
    ("deepseek_v3", "ep2"): False,
    ("deepseek_v3", "pp2vpp2"): True,
}
MODELS = ("qwen3", "qwen3_tied", "qwen2_tied", "llama", "llama3")
DEMO_MODELS = ("demo_student", "demo_teacher")
FROZEN_LAYOUTS = ("tp1", "tp2", "tp2sp", "pp2", "dp2", "tp2pp2", "tp2sppp2", "cp2", "tp2spcp2", "pp2vpp2")
TRAIN_LAYOUTS = ("tp1", "tp2", "tp2sp", "pp2", "dp2", "tp2dp2", "tp2pp2", "cp2", "pp2vpp2")

HALF_LAYOUTS = ("tp1", "tp2sp", "pp2", "dp2", "cp2", "pp2vpp2")  # that train in bf16
CRITIC_LAYOUTS = tuple(name for name in TRAIN_LAYOUTS if not LAYOUTS[name].vpp)

# name of a pass -> (sequences a micro-batch, tokens a micro-batch, temperature, whether relatives share their prefix)
PASSES = {
    "pack": (None, None, 1.0, False),
    "single": (1, None, 1.0, False),
    "cold": (None, 100, 0.7, False),
    "shared": (None, None, 1.0, True),
    "shared_cold": (4, 100, 0.7, True),
}
SIBLINGS = {5: 1, 7: 0, 8: 0}  # number of a sequence -> of the one whose prompt it has
CONTINUED = {4: 3, 9: 2}  # number of a sequence -> of the one that its prompt begins with, response and all

# trainers whose memory comes and goes: layout, model, distributed optimizer, tokens a micro-batch, and what is special
TURNS = [
    ("tp1", "qwen3_tied", False, None, "fp32"),
    ("dp2", "qwen3_tied", True, 70, "fp32"),
    ("dp2", "deep", True, 70, "bf16"),
    ("tp2sp", "deep", True, 70, "bf16"),
    ("dp2", "deep", True, 70, "lora"),
]
TEMPERATURE = 0.9
TRAIN_MODELS = {"qwen3_tied": "opd", "qwen2_tied": "ppo", "deep": "opd"}  # model -> its objective
OBJECTIVES = {
    "opd": ObjectivePlan(),
    "ppo": ObjectivePlan(
        policy_loss="ppo",
        pg_clip_low=0.1,
        pg_clip_high=0.3,
        dual_clip=1.2,
        policy_loss_args=FrozenDict({"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2}),
        loss_agg_mode="seq-mean-token-mean",
        opd_kl_discount=0.5,
        advantage_clip=1.5,
        rl_loss_coef=0.7,
    ),
}
# one update each, with two teachers for some samples: what a divergence in the loss can be
DISTILLING = [
    ObjectivePlan(opd_vocab_size=VOCABULARY, opd_objective="full", adv_estimator="grpo", entropy_loss_coef=0.02),
    ObjectivePlan(
        opd_vocab_size=VOCABULARY,
        opd_objective="topk",
        opd_topk=5,
        opd_divergence="skewed_reverse_kl",
        opd_skew_alpha=0.2,
    ),
    ObjectivePlan(
        opd_vocab_size=VOCABULARY,
        opd_objective="full",
        opd_divergence="jsd",
        opd_jsd_beta=0.3,
        loss_agg_mode="seq-mean-token-mean",
    ),
    ObjectivePlan(opd_vocab_size=VOCABULARY, opd_objective="topk", opd_topk=VOCABULARY),
]
TEACHERS = {"wide": 0.7, "llama": 0.4}  # model -> coefficient; "wide" pads its vocabulary further than the student
# layout of the student -> that of the teachers
TEACHER_LAYOUTS = {
    "tp1": "tp1",
    "tp2": "pp2",
    "pp2": "tp2sp",
    "dp2": "tp2",
    "cp2": "cp2",
    "tp2pp2": "tp2dp2",
    "tp2dp2": "pp2cp2",
    "cp2dp2": "tp2pp2",
}
# one update each, from rows with answers; in the last one these are a part of the batch
SUPERVISED = {
    "sft": ObjectivePlan(policy_loss="sft", loss_agg_mode="token-mean"),
    "dpo": ObjectivePlan(
        policy_loss="dpo",
        policy_loss_args={"beta": 0.3, "label_smoothing": 0.1},
        paired=True,
        kl_loss="k2",
        loss_agg_mode="seq-mean-token-mean",
    ),
    "mix_chord": ObjectivePlan(
        policy_loss="mix_chord",
        policy_loss_args=FrozenDict(
            {"mu_warmup_steps": 10, "mu_peak": 0.9, "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2}
        ),
        adv_estimator="grpo",
        pg_clip_low=0.1,
        pg_clip_high=0.3,
        dual_clip=1.2,
        kl_loss="k2",
        kl_loss_coef=0.2,
        entropy_loss_coef=0.02,
        loss_agg_mode="seq-mean-token-mean",
    ),
}
# layout -> (sequences a micro-batch, tokens a micro-batch); a pair is never torn apart
SUPERVISED_LAYOUTS = {"tp2dp2": (None, 70), "pp2": (4, None), "tp2pp2": (2, None), "cp2": (None, 70)}
SUPERVISED_STEP = 4  # of the run; mix_chord's mu is 4/10 of its peak
FOLLOW_LAYOUTS = ("tp1", "tp2sp", "pp2", "dp2", "tp2pp2")
FOLLOWED = {"qwen3_tied": "fp32", "qwen3": "bf16"}  # model -> what it computes in
DECAYS = (0.0, 0.75)
FOLLOWED_TIMES = 3  # of which the last one is done again after a resume
INVARIANT = (*POLICY_LOSSES.builtin, "topk", "full")  # losses of a policy
CRITIC_LOSS = "value"
# name -> (sequences a micro-batch, tokens a micro-batch, the batch from its end)
SPLITS = {
    "whole": (None, None, False, False),
    "tokens": (None, 200, True, False),
    "sequences": (4, None, True, False),
    "shared": (None, 240, False, True),
    "observed": (None, 200, True, False),  # as "tokens", with other values where nothing is learned from
}
# every factorisation of four ranks, and one rank -> its splits
INVARIANCE_LAYOUTS = {
    "tp1": ("whole", "tokens", "sequences", "shared", "observed"),
    "tp4": ("tokens",),
    "pp4": ("sequences",),
    "dp4": ("tokens", "sequences", "shared"),
    "tp2pp2": ("tokens", "shared", "observed"),
    "tp2dp2": ("sequences",),
    "pp2dp2": ("sequences",),
    "cp4": ("tokens", "shared"),
    "tp2spcp2": ("sequences",),
    "pp2cp2": ("tokens", "observed"),
    "pp2vpp2dp2": ("sequences",),
    "cp2dp2": ("sequences",),
    "tp2pp2vpp2": ("tokens",),
    "pp2vpp2cp2": ("tokens",),
}
# the same of a mixture of experts, whose ranks meet in every micro-batch: layout -> its split, and losses
EXPERT_INVARIANCE = {
    "tp1": ("whole", INVARIANT),
    "tp2cp2ep2": ("tokens", INVARIANT[::2]),
    "pp2vpp2ep2": ("sequences", INVARIANT[1::2]),
}
CORE = ("ppo", "topk", "full")  # a ratio of two policies, and what a teacher says of other tokens
# the losses of a layout are those of one job on every push, and of another one nightly
INVARIANCE_GRID = [(loss, layout) for loss in (*INVARIANT, CRITIC_LOSS) for layout in INVARIANCE_LAYOUTS]
PUSHED_INVARIANCE = [case for case in INVARIANCE_GRID if case[0] in CORE or case[1] == "tp1"]
PUSHED_INVARIANCE += cover(case for case in INVARIANCE_GRID if case[1] != "tp1")
EXPERT_INVARIANCE_GRID = [(layout, loss) for layout, (_, losses) in EXPERT_INVARIANCE.items() for loss in losses]
PUSHED_EXPERT_INVARIANCE = [case for case in EXPERT_INVARIANCE_GRID if case[1] in CORE or case[0] == "tp1"]
# layout -> its adapters: all layers, some of what Megatron has in one, or those of attention between experts
LORA_LAYOUTS = {
    "tp1": "all",
    "tp2": "all",
    "tp2sp": "all",
    "pp2": "all",
    "dp2": "all",
    "cp2": "all",
    "pp2vpp2": "all",
    "tp2dp2": "all",
    "tp2sppp2": "some",
    "tp2spcp2": "some",
    "ep2": "attention",
    "tp2ep2": "attention",
}
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
LORA_TARGETS = {
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "some": ("q_proj", "v_proj", "down_proj"),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
LORA_MODELS = {"all": "deep", "some": "deep", "attention": "qwen3_moe"}
LORA = {"rank": 3, "alpha": 5.0}
LORA_RESUMES = [("tp2", "pp2"), ("dp2", "tp2"), ("cp2", "tp2"), ("tp2", "tp2")]  # (layout that saved, that loads)
LOADED = [("large", "tp2"), ("large", "pp2"), ("large_moe", "ep2")]  # (model, layout)
POISON = {"dp2": "nan", "pp2": "inf", "tp2": "nan"}  # layout -> what stands where a number should
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = ("core_attn", "mlp", "moe", "shared_experts", "layernorm")
# name -> (model, layout, options of Megatron's that change neither loss nor gradient)
OPTIONS = {
    "none": ("deep", "tp1", {}),
    "none_experts": ("qwen2_moe", "tp1", {}),
    "uniform": ("qwen2_moe", "tp1", FULL),
    "block": ("deep", "tp1", FULL | {"recompute_method": "block", "recompute_num_layers": 3}),
    "selective": ("deep", "tp1", {"recompute_granularity": "selective", "recompute_modules": SELECTIVE[:2]}),
    "selective_experts": ("qwen2_moe", "ep2", {"recompute_granularity": "selective", "recompute_modules": SELECTIVE}),
    "layers_with_experts": ("qwen2_moe", "tp1", {"moe_layer_recompute": True}),
    "overlap": ("qwen2_moe", "ep2", {"moe_shared_expert_overlap": True}),
    "routers": ("qwen2_moe", "tp1", {"moe_router_dtype": "fp64"}),
    "first": ("deep", "pp2", {"num_layers_in_first_pipeline_stage": 1}),
    "last": ("qwen2_moe", "pp2", {"num_layers_in_last_pipeline_stage": 3}),
    "counted": ("deep", "pp2", dict.fromkeys(COUNTED, True)),
    "written": ("deep", "pp2", {"pipeline_model_parallel_layout": "Et|tttL"}),
    "kernels": ("deep", "tp1", {"bias_activation_fusion": True, "apply_rope_fusion": True}),
}
UPDATES = 4
SAVED_AFTER = 2


def optimizer_plan(distributed: bool, *, changed: bool = False) -> OptimizerPlan:
    """Every part of the schedule and of AdamW takes part, and clipping bites; `changed`: with another value each.

    A large epsilon: where a gradient is nothing but rounding, Adam would blow it up to a full step.
    """
    if changed:
        return OptimizerPlan(
            learning_rate=4e-3,
            weight_decay=0.2,
            adam_beta1=0.6,
            adam_beta2=0.8,
            adam_epsilon=1e-3,
            max_grad_norm=0.3,
            lr_scheduler_type="linear",
            warmup_steps=1,
            total_steps=5,
            min_learning_rate=5e-4,
            use_distributed_optimizer=distributed,
        )
    return OptimizerPlan(
        learning_rate=1e-3,
        weight_decay=0.05,
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_epsilon=1e-4,
        max_grad_norm=0.5,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        total_steps=6,
        min_learning_rate=1e-4,
        use_distributed_optimizer=distributed,
    )


def sequences_for(model: str) -> list[tuple[np.ndarray, int]]:
    """What `model` is asked to score."""
    return demo_sequences() if model in DEMO_MODELS else sequences(VOCABULARY)


def sequences(vocabulary: int) -> list[tuple[np.ndarray, int]]:
    """(tokens, prompt length): of all lengths, among them one without a response and one of a single token."""
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(9, 60, size=9), 20, 1]
    prompts = [*rng.integers(1, 9, size=9), 20, 1]
    tokens = [rng.integers(0, vocabulary, size=int(n)) for n in lengths]
    for number, other in SIBLINGS.items():
        prompts[number] = prompts[other]
        tokens[number][: prompts[other]] = tokens[other][: prompts[other]]
    tokens[4] = np.concatenate([tokens[CONTINUED[4]], tokens[4]])
    prompts[4] += len(tokens[CONTINUED[4]])
    return [(own, int(p)) for own, p in zip(tokens, prompts, strict=True)]


def demo_sequences() -> list[tuple[np.ndarray, int]]:
    """Sums with their working, as the demo's models write them; one without a response, one of a single token.

    On noise those models are so sure of themselves (log-probs down to -30) that 1e-5 is less than f32 can tell apart.
    """
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "teacher")
    rng = np.random.default_rng(1)
    found = []
    for a, b in rng.integers(100, 1000, size=(12, 2)).tolist():
        carry, working = 0, []
        for place in (1, 10, 100):
            x, y = a // place % 10, b // place % 10
            working.append(f"{x}+{y}+{carry}={x + y + carry}")
            carry = (x + y + carry) // 10
        prompt = tokenizer.encode(f"<|user|>{a}+{b}=<|end|><|assistant|>")
        response = tokenizer.encode(f"{','.join(working)}\n{a + b}<|end|>")
        found.append((np.array([*prompt, *response]), len(prompt)))
    (first, length), (second, _) = found[:2]
    siblings = [(tokens[: prompt + 7], prompt) for tokens, prompt in found[2:5]]
    return [*found, (first[:length], length), (second[:1], 1), *siblings]


def train_samples(step: int, objective: str, count: int = 12) -> list[TrainSample]:
    """The mini-batch of one update; sample 3 has nothing to learn from, sample 5 no response at all."""
    rng = np.random.default_rng(100 + step)
    samples = []
    for index in range(count):
        prompt = int(rng.integers(1, 9))
        response = 0 if index == 5 else int(rng.integers(5, 50))
        mask = (rng.random(response) > 0.2) & (index != 3)
        ppo = objective == "ppo"
        tokens = rng.integers(0, VOCABULARY, size=prompt + response)
        if index in SIBLINGS:
            other = samples[SIBLINGS[index]]
            tokens = np.concatenate([other.tokens[: other.prompt_length], tokens[prompt:]])
            prompt = other.prompt_length
        if index in CONTINUED:
            earlier = samples[CONTINUED[index]].tokens
            tokens, prompt = np.concatenate([earlier, tokens]), len(earlier) + prompt
        samples.append(
            TrainSample(
                tokens=tokens,
                prompt_length=prompt,
                action_mask=mask,
                advantages=(rng.normal(0, 2 * ppo, size=response) * mask).astype(np.float32),
                opd_coefficients=(0.5 * mask).astype(np.float32),
                opd_teacher=(0.5 * rng.normal(-4, 1, size=response) * mask).astype(np.float32),
                old_logprobs=rng.normal(-4.6, 0.5, size=response).astype(np.float32) if ppo else None,
                importance_weights=rng.uniform(0, 1.5, size=response).astype(np.float32) if ppo else None,
            )
        )
    return samples


def routes_of(tokens: np.ndarray) -> np.ndarray:
    """Two of four experts for each token but the last, in each of four layers, uint8 [T-1, 4, 2].

    They depend on the tokens up to it alone, as an engine's do, and hardly ever are what a router would choose.
    """
    keys = np.cumsum(np.asarray(tokens[:-1]) + 7) % 1009
    table = np.random.default_rng(5).permuted(np.tile(np.arange(4, dtype=np.uint8), (1009, 4, 1)), axis=-1)
    return table[keys][..., :2]


def value_samples(step: int, count: int = 12) -> list[ValueSample]:
    """The sequences of `train_samples`, with values before the update and returns of which some are out of reach."""
    rng = np.random.default_rng(200 + step)
    return [
        ValueSample(
            tokens=sample.tokens,
            prompt_length=sample.prompt_length,
            action_mask=sample.action_mask,
            old_values=rng.normal(0, 0.5, size=len(sample.action_mask)).astype(np.float32),
            returns=(rng.normal(size=len(sample.action_mask)) * sample.action_mask).astype(np.float32),
        )
        for sample in train_samples(step, "opd", count)
    ]


def looks_at(teacher: str, sample: int) -> bool:
    """Every third sample has both teachers, the others one."""
    return sample % 3 != list(TEACHERS).index(teacher)


def answered(prompt: np.ndarray, answer: np.ndarray) -> TrainSample:
    mask, zeros = np.ones(len(answer), dtype=bool), np.zeros(len(answer), np.float32)
    return TrainSample(np.concatenate([prompt, answer]), len(prompt), mask, zeros, zeros, zeros, old_logprobs=None)


def supervised_samples(schema: str) -> list[TrainSample]:
    """Answers to learn, every token of them; of schema dpo in pairs, with a reference policy's log-probs.

    Of mix_chord demonstrations, between samples of the student's own with all that those have.
    """
    rng = np.random.default_rng(300)
    rows = []
    for _ in range(7):
        prompt = rng.integers(0, VOCABULARY, size=int(rng.integers(1, 9)))
        answers = [rng.integers(0, VOCABULARY, size=int(rng.integers(3, 30))) for _ in range(1 + (schema == "dpo"))]
        rows.append((prompt, tuple(answers)))
    samples = [answered(prompt, answer) for prompt, answers in rows for answer in answers]
    if schema == "sft":
        return samples
    if schema == "mix_chord":
        demonstrations = [replace(sample, demonstration=True) for sample in samples]
        own = [
            replace(s, reward=1.0, ref_logprobs=rng.normal(-4.6, 0.5, size=len(s.action_mask)).astype(np.float32))
            for s in train_samples(3, "ppo", len(demonstrations))
        ]
        return [sample for pair in zip(own, demonstrations, strict=True) for sample in pair]
    return [replace(s, ref_logprobs=rng.normal(-4.6, 0.5, size=len(s.action_mask)).astype(np.float32)) for s in samples]


def invariance_objective(name: str) -> ObjectivePlan:
    """Of one of `INVARIANT`, with every other part that a loss can have; the ways of aggregating take turns."""
    number = INVARIANT.index(name)
    if name not in POLICY_LOSSES.builtin:
        return ObjectivePlan(
            opd_objective=name,
            opd_vocab_size=VOCABULARY,
            opd_divergence="jsd",
            opd_jsd_beta=0.3,
            adv_estimator="grpo",
            loss_agg_mode=MODES[number % len(MODES)],
        )
    return ObjectivePlan(
        policy_loss=name,
        adv_estimator="grpo",
        opd_kl_discount=0.5,
        kl_loss=("k2", "k3", "corrected_k3")[number % 3],
        kl_loss_coef=0.2,
        entropy_loss_coef=0.02,
        loss_agg_mode=POLICY_LOSSES.facts(name).loss_agg_mode or MODES[number % len(MODES)],
        loss_normaliser=50.0,
        paired=name == "dpo",
    )


def disturbed(sample: TrainSample | ValueSample) -> Any:
    """Return a sample with 100 more or less in every number that is there of an observed token."""
    actions = getattr(sample, "actions", None)
    off = ~(sample.action_mask if actions is None else actions | sample.action_mask)
    rng = np.random.default_rng(int(off.sum()))

    def wild(values: np.ndarray) -> np.ndarray:
        other = values + rng.choice([-100, 100], values.shape).astype(values.dtype)
        return np.where(off if values.ndim == 1 else off[:, None], other, values)

    if isinstance(sample, ValueSample):
        return replace(sample, old_values=wild(sample.old_values), returns=wild(sample.returns))
    names = ("advantages", "opd_teacher", "old_logprobs", "ref_logprobs", "importance_weights")
    there = {name: getattr(sample, name) for name in names}
    teachers = {
        name: replace(t, arrays={key: wild(v) if v.dtype.kind == "f" else v for key, v in t.arrays.items()})
        for name, t in sample.teachers.items()
    }
    columns = {name: wild(values) for name, values in there.items() if values is not None}
    return replace(sample, **columns, teachers=teachers)


def invariance_samples(name: str) -> list[TrainSample]:
    """What one of `INVARIANT` learns from: pairs, demonstrations among the own, or own samples."""
    needs = POLICY_LOSSES.facts(name).needs if name in POLICY_LOSSES.builtin else None
    if needs == "pairs":
        return supervised_samples("dpo")
    if needs == "demonstrations":
        return supervised_samples("mix_chord")
    rng = np.random.default_rng(400)
    if name not in POLICY_LOSSES.builtin:
        return [
            replace(sample, teachers=random_targets(name, len(sample.action_mask)))
            for sample in train_samples(3, "opd")
        ]
    return [
        replace(
            sample,
            reward=float(rng.normal()),
            ref_logprobs=rng.normal(-4.6, 0.5, size=len(sample.action_mask)).astype(np.float32),
        )
        for sample in train_samples(3, "ppo")
    ]


def random_targets(objective: str, tokens: int) -> dict[str, TeacherTargets]:
    """What a teacher might say of so many tokens; its head, for `full`, is that of `teacher_inputs`."""
    rng = np.random.default_rng(tokens)
    if objective == "full":
        arrays = {"hidden": rng.normal(size=(tokens, TEACHER_WIDTH)).astype(np.float32)}
    else:
        ids = np.stack([rng.permutation(VOCABULARY)[:5] for _ in range(tokens)]) if tokens else np.zeros((0, 5))
        logprobs = rng.normal(-4, 1, size=(tokens, 5)).astype(np.float32)
        rest = rng.normal(-1, 1, size=tokens).astype(np.float32)
        arrays = {"topk_ids": ids.astype(np.int32), "topk_logprobs": logprobs, "topk_rest": rest}
    return {"random": TeacherTargets(0.7, arrays)}


def vocab_inputs(rows: int, width: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states, output embedding, targets, and the gradient that arrives."""
    rng = np.random.default_rng(7)
    return (
        rng.normal(size=(rows, width)).astype(np.float32),
        rng.normal(size=(vocabulary, width)).astype(np.float32),
        rng.integers(0, vocabulary, size=rows),
        rng.normal(size=rows).astype(np.float32),
    )


def teacher_inputs(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states and whole output embedding of a teacher: another width, and a vocabulary of another size."""
    rng = np.random.default_rng(8)
    return (
        rng.normal(size=(rows, TEACHER_WIDTH)).astype(np.float32),
        rng.normal(size=(TEACHER_VOCABULARY, TEACHER_WIDTH)).astype(np.float32),
    )


VOCAB_ROWS, VOCAB_WIDTH = 23, 16
TEACHER_WIDTH, TEACHER_VOCABULARY = 12, 97  # fewer columns than the student's: on two ranks they end inside the second
TOPK = (1, 5, VOCABULARY)
MEASURES = {
    "reverse_kl": {},
    "forward_kl": {},
    "jsd": {"beta": 0.3},
    "skewed_reverse_kl": {"alpha": 0.2},
    "skewed_forward_kl": {"alpha": 0.2},
}
VOCAB_CHUNK_ROWS = {"one": 1, "odd": 7, "all": 1000}


def learned(start: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
    """What a student that began with the weights `start` has after some updates."""
    generator = torch.Generator().manual_seed(times)
    return {name: start[name] + 0.01 * torch.randn(start[name].shape, generator=generator) for name in sorted(start)}


def model_path(root: Path, name: str) -> str:
    """Where a model lies: the demo's in the repository, the random ones under `root`."""
    return str(DEMO / name.removeprefix("demo_") if name in DEMO_MODELS else root / "models" / name)


def models(layout: str) -> tuple[str, ...]:
    """The random models that fit a layout: one has as many layers as two stages of two parts need."""
    more = {"tp1": ("yarn", "mistral"), "cp2": ("yarn",), "tp2pp2": ("mistral",)}
    return ("deep",) if LAYOUTS[layout].vpp else (*MODELS, *more.get(layout, ()))


def demo_models(layout: str) -> tuple[str, ...]:
    """The demo's models that fit a layout: the student's three layers make no two equal stages."""
    return DEMO_MODELS if LAYOUTS[layout].pp == 1 else DEMO_MODELS[1:]


def few_model(layout: str) -> str:
    """The model that learns from fewer samples than there are ranks."""
    return "deep" if LAYOUTS[layout].vpp else "qwen3_tied"


def axes(layout: str) -> tuple:
    """The sizes of a layout, which a cover of layouts has each once."""
    return astuple(LAYOUTS[layout])


def invariance_name(loss: str, layout: str) -> str:
    """The job that computes a loss in a layout."""
    if loss == CRITIC_LOSS:
        return f"critic_invariance-{layout}"
    return f"invariance-{layout}" + ("" if (loss, layout) in PUSHED_INVARIANCE else "-nightly")


def expert_invariance_name(layout: str, loss: str) -> str:
    return f"experts_invariance-{layout}" + ("" if (layout, loss) in PUSHED_EXPERT_INVARIANCE else "-nightly")


def train_name(model: str, layout: str, distributed: bool, tokens: int | None) -> str:
    return f"train-{model}-{layout}-{'distributed' if distributed else 'plain'}-{tokens or 'unlimited'}"


def train_variants(layout: str) -> list[tuple[str, bool, int | None]]:
    """(model, distributed optimizer, tokens a micro-batch) to train under `layout`."""
    variants = [("qwen3_tied", True, 70), ("qwen3_tied", False, None), ("qwen2_tied", True, 70)]
    if layout == "cp2":
        variants.append(("deep", True, 70))
    if LAYOUTS[layout].vpp:
        variants = [("deep", True, 70), ("deep", False, None)]
    return [*variants, ("qwen3_tied", True, None), ("qwen3_tied", False, 70)] if layout == "tp1" else variants


def jobs() -> dict[str, dict[str, Any]]:
    """All jobs by name; one that goes on from the state of another has its `load`, the other's name and ".ckpt"."""
    losses: dict[tuple[str, str], list[str]] = {}
    for loss, layout in INVARIANCE_GRID:
        losses.setdefault((invariance_name(loss, layout), layout), []).append(loss)
    for layout, loss in EXPERT_INVARIANCE_GRID:
        losses.setdefault((expert_invariance_name(layout, loss), layout), []).append(loss)
    every = [
        {"op": name.partition("-")[0], "name": name, "layout": layout, "losses": some}
        for (name, layout), some in losses.items()
    ]
    every += [job for world in (1, 2, 4) for job in _jobs_of(world)]
    every += [*_resume_jobs(), {"op": "priorities", "name": "priorities", "layout": "tp4"}]
    return {job["name"]: job for job in every}


def _jobs_of(world: int) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = []
    for layout in (name for name in FROZEN_LAYOUTS if LAYOUTS[name].world_size == world):
        jobs += [_frozen_job(layout, model, "frozen") for model in (*models(layout), *demo_models(layout))]
        jobs += [_frozen_job(layout, model, "ordinary") for model in demo_models(layout)]
    for layout in (name for name in TRAIN_LAYOUTS if LAYOUTS[name].world_size == world):
        jobs += [_train_job(layout, *variant) for variant in train_variants(layout)]
        if world < 4:
            job = _train_job(layout, few_model(layout), True, 70)
            jobs.append({**job, "name": f"few-{layout}", "count": 1, "save_after": None})
        if layout in HALF_LAYOUTS:
            job = _train_job(layout, "deep", True, 70)
            jobs.append({**job, "name": f"half-{layout}", "dtype": "bf16", "save_after": None})
        if layout in CRITIC_LAYOUTS:
            jobs.append(_critic_job(layout, "valued"))
    jobs += [_experts_job(layout, model) for model, layout in EXPERT_GRID if LAYOUTS[layout].world_size == world]
    for layout in (name for name in ROUTER_LAYOUTS if LAYOUTS[name].world_size == world):
        jobs.append({"op": "routers", "name": f"routers-{layout}", "layout": layout})
    for name, (model, layout, _) in OPTIONS.items():
        if LAYOUTS[layout].world_size == world:
            jobs.append({"op": "options", "name": f"options-{name}", "option": name, "model": model, "layout": layout})
    for model, layout in (pair for pair in REPLAYS if LAYOUTS[pair[1]].world_size == world):
        jobs.append({"op": "replay", "name": f"replay-{model}-{layout}", "model": model, "layout": layout})
    for layout in (name for name in LORA_LAYOUTS if LAYOUTS[name].world_size == world):
        jobs.append(lora_job(layout))
    for layout in (name for name in TEACHER_LAYOUTS if LAYOUTS[name].world_size == world):
        jobs.append({"op": "distil", "name": f"distil-{layout}", "layout": layout})
    for layout in (name for name in SUPERVISED_LAYOUTS if LAYOUTS[name].world_size == world):
        for schema in SUPERVISED:
            jobs.append({"op": "supervised", "name": f"{schema}-{layout}", "schema": schema, "layout": layout})
    for layout in (name for name in FOLLOW_LAYOUTS if LAYOUTS[name].world_size == world):
        jobs.append({"op": "follow", "name": f"follow-{layout}", "layout": layout})
    jobs += turns_jobs(world)
    if world == 1:
        jobs.append(_critic_job("tp1", "qwen3"))
        jobs.append({"op": "memory", "name": "memory", "layout": "tp1"})
    if world in (1, 2):
        layout = f"tp{world}"
        jobs += [{"op": op, "name": f"{op}-{layout}", "layout": layout} for op in ("vocab", "columns", "topk")]
    if world == 2:
        for model, layout in LOADED:
            jobs.append({"op": "loading", "name": f"loading-{model}-{layout}", "model": model, "layout": layout})
        for layout, value in POISON.items():
            jobs.append({"op": "poison", "name": f"poison-{layout}", "layout": layout, "value": value})
    return jobs


def turns_jobs(world: int) -> list[dict[str, Any]]:
    """Those of `TURNS`: what another job trains, with memory that comes and goes."""
    jobs = []
    for layout, model, distributed, tokens, dtype in (job for job in TURNS if LAYOUTS[job[0]].world_size == world):
        same = lora_job(layout) if dtype == "lora" else _train_job(layout, model, distributed, tokens)
        name = f"half-{layout}" if dtype == "bf16" else same["name"]
        extra = {"dtype": dtype} if dtype == "bf16" else {}
        jobs.append({**same, **extra, "op": "turns", "as": name, "name": f"turns-{name}"})
    return jobs


def _frozen_job(layout: str, model: str, kind: str) -> dict[str, Any]:
    name = f"{kind}-{model}-{layout}"
    return {"op": "frozen", "name": name, "model": model, "layout": layout, "deterministic": kind != "ordinary"}


def _train_job(layout: str, model: str, distributed: bool, tokens: int | None) -> dict[str, Any]:
    saves = (layout, model) in SAVED
    return {
        "op": "train",
        "name": train_name(model, layout, distributed, tokens),
        "model": model,
        "layout": layout,
        "distributed": distributed,
        "tokens": tokens,
        "save_after": SAVED_AFTER if saves else None,
        "load": None,
        "count": 12,
    }


def critic_name(layout: str, model: str = "valued") -> str:
    return f"critic-{model}-{layout}"


def _critic_job(layout: str, model: str) -> dict[str, Any]:
    name = critic_name(layout, model)
    return {"op": "critic", "name": name, "layout": layout, "model": model, "save": layout in ("tp2", "dp2")}


CRITIC_RESUMES = [("tp2", "tp2"), ("tp2", "pp2"), ("dp2", "tp2")]  # (layout that saved, layout that loads)
VALUE_CLIP = 0.4


def critic_resume_name(saved: str, loads: str) -> str:
    return f"critic-resume-{saved}-{loads}"


# (layout that saved, layout that loads, distributed optimizer, its tokens a micro-batch)
RESUMES = [
    ("tp2", "tp2", True, 70),
    ("tp2", "tp2", False, None),
    ("dp2", "dp2", True, 70),
    ("dp2", "dp2", False, None),
    ("tp2", "pp2", True, 70),
    ("tp2", "dp2", True, 70),
    ("dp2", "tp2", True, 70),
    ("tp2", "pp2", False, None),
    ("cp2", "pp2vpp2", True, 70),
    ("pp2vpp2", "cp2", True, 70),
]


# resumed with the changed settings of the optimizer: (layout that saved, that loads, distributed optimizer)
CHANGED = [("tp2", "tp2", True), ("tp2", "pp2", False), ("dp2", "tp2", True)]
CHANGED_CRITIC, CHANGED_LORA, CHANGED_EXPERTS = ("tp2", "pp2"), ("tp2", "tp2"), ("qwen3_moe", "ep2", "ep2")

SAVED = [("tp2", "qwen3_tied"), ("dp2", "qwen3_tied"), ("cp2", "deep"), ("pp2vpp2", "deep")]


def resumed_model(saved: str, loads: str) -> str:
    return "deep" if "pp2vpp2" in (saved, loads) else "qwen3_tied"


def resume_name(saved: str, loads: str, distributed: bool) -> str:
    return f"resume-{saved}-{loads}-{'distributed' if distributed else 'plain'}"


def _experts_job(layout: str, model: str, saved: str | None = None) -> dict[str, Any]:
    saves = (model, layout) in {(of, saved) for of, saved, _ in EXPERT_RESUMES}
    return {
        "op": "experts",
        "name": f"experts-{model}-{layout}" if saved is None else f"experts-resume-{model}-{saved}-{layout}",
        "model": model,
        "layout": layout,
        "save": saves and saved is None,
        "load": saved and f"experts-{model}-{saved}.ckpt",
        "megatron_args": {"moe_router_bias_update_rate": BIAS_RATES[model]} if model in BIAS_RATES else {},
    }


def lora_job(layout: str, loads: str | None = None) -> dict[str, Any]:
    return {
        "op": "lora",
        "name": f"lora-{layout}" + (f"-resumed-{loads}" if loads else ""),
        "layout": loads or layout,
        "model": LORA_MODELS[LORA_LAYOUTS[layout]],
        "targets": LORA_TARGETS[LORA_LAYOUTS[layout]],
        "load": f"lora-{layout}.ckpt" if loads else None,
        "save": not loads and layout in {saved for saved, _ in LORA_RESUMES},
    }


def _resume_jobs() -> list[dict[str, Any]]:
    critics = [
        {
            **_critic_job(loads, "valued"),
            "name": critic_resume_name(saved, loads),
            "save": False,
            "load": f"{critic_name(saved)}.ckpt",
        }
        for saved, loads in CRITIC_RESUMES
    ]
    changed: list[dict[str, Any]] = [
        {
            **_train_job(loads, "qwen3_tied", distributed, 70 if distributed else None),
            "load": f"{train_name('qwen3_tied', saved, distributed, 70 if distributed else None)}.ckpt",
            "name": f"changed-{resume_name(saved, loads, distributed)}",
            "save_after": None,
        }
        for saved, loads, distributed in CHANGED
    ]
    critic = next(job for job in critics if job["name"] == critic_resume_name(*CHANGED_CRITIC))
    changed += [
        {**job, "name": f"changed-{job['op']}"}
        for job in (critic, lora_job(*CHANGED_LORA), _experts_job(CHANGED_EXPERTS[2], *CHANGED_EXPERTS[:2]))
    ]
    adapters = [lora_job(saved, loads) for saved, loads in LORA_RESUMES]
    adapters += [_experts_job(loads, model, saved) for model, saved, loads in EXPERT_RESUMES]
    return (
        critics
        + adapters
        + [{**job, "changed": True} for job in changed]
        + [
            {
                **_train_job(loads, resumed_model(saved, loads), distributed, tokens),
                "name": resume_name(saved, loads, distributed),
                "save_after": None,
                "load": f"{train_name(resumed_model(saved, loads), saved, distributed, tokens)}.ckpt",
            }
            for saved, loads, distributed, tokens in RESUMES
        ]
    )
