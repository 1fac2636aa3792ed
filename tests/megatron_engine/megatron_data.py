"""Sequences, samples and settings that the jobs share. They are seeded, so tests compute the same ones with Hugging
Face.

Imports no engine.
"""

import numpy as np
from megatron_layouts import DEMO, DEMO_MODELS, VOCABULARY
from megatron_samples import TrainSample, ValueSample
from transformers import AutoTokenizer

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import ObjectivePlan, OptimizerPlan

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
UPDATES = 4
SAVED_AFTER = 2


def optimizer_plan(distributed: bool, *, changed: bool = False) -> OptimizerPlan:
    """Return a plan in which every part of the schedule, AdamW and clipping has an effect; `changed`: every value
    differs.

    Epsilon is large, because Adam would scale a gradient that is only rounding error to a full step.
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
    """Return the sequences that `model` scores."""
    return demo_sequences() if model in DEMO_MODELS else sequences(VOCABULARY)


def sequences(vocabulary: int) -> list[tuple[np.ndarray, int]]:
    """Return (tokens, prompt length) of sequences of different lengths, one without a response and one of a single
    token."""
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
    """Return sums with their calculation in the demo's format; one without a response, one of a single token.

    On noise the demo's models have log-probs down to -30, for which 1e-5 is below the resolution of f32.
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
    """Return the mini-batch of one update; sample 3 has no token in the loss, and sample 5 has no response."""
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
    """Return two of four experts for each token except the last, in each of four layers, uint8 [T-1, 4, 2].

    They depend only on the tokens up to this token, as in an engine, and are seldom the choice of the router.
    """
    keys = np.cumsum(np.asarray(tokens[:-1]) + 7) % 1009
    table = np.random.default_rng(5).permuted(np.tile(np.arange(4, dtype=np.uint8), (1009, 4, 1)), axis=-1)
    return table[keys][..., :2]


def value_samples(step: int, count: int = 12) -> list[ValueSample]:
    """Return the sequences of `train_samples`, with values before the update and returns, some of them outside the
    clipping range."""
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


VALUE_CLIP = 0.4
