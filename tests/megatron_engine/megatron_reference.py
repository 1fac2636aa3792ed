"""Results of Hugging Face's models and plain torch for the same samples: the naive side of each test."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron_data import (
    SAVED_AFTER,
    TEMPERATURE,
    UPDATES,
    VALUE_CLIP,
    optimizer_plan,
    sequences,
    train_samples,
    value_samples,
)
from megatron_jobs.distillation import DISTILLING, TEACHERS, looks_at
from megatron_layouts import VOCABULARY
from megatron_models import load, load_adapted, load_critic
from megatron_samples import TrainSample
from safetensors.torch import load_file
from transformers import PreTrainedModel

from roll_opd.config.plan import ObjectivePlan


def token_values(model: PreTrainedModel, tokens: np.ndarray, prompt: int) -> torch.Tensor:
    """Return [T-P]: entry i is the value of the state after tokens 0 to P + i - 1."""
    states = model.model(torch.from_numpy(tokens)[None]).last_hidden_state[0]
    found = [model.score(states[place - 1])[0] for place in range(prompt, len(tokens))]
    return torch.stack(found) if found else torch.zeros(0)


def all_logprobs(model: PreTrainedModel, tokens: np.ndarray, temperature: float) -> torch.Tensor:
    """Return [T, V]: row t is the distribution of the token that follows token t."""
    return (model(torch.from_numpy(tokens)[None]).logits[0] / temperature).log_softmax(-1)


def token_logprobs(model: PreTrainedModel, tokens: np.ndarray, prompt: int, temperature: float) -> torch.Tensor:
    """Return [T-P]: entry i is the log-prob of token P + i, which the model predicts at P + i - 1."""
    table = all_logprobs(model, tokens, temperature)
    picked = [table[place - 1, int(tokens[place])] for place in range(prompt, len(tokens))]
    return torch.stack(picked) if picked else torch.zeros(0)


@contextmanager
def in_float64() -> Iterator[None]:
    """Let transformers compute in f64 what it computes in f32 for every dtype: norms, softmax, the recurrence."""
    double = mock.patch.multiple(torch, float32=torch.float64, float=torch.float64)
    with double, mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def sequence_logprobs(model: PreTrainedModel, temperature: float, *, exact: bool) -> np.ndarray:
    """Return the log-probs of all test sequences, one after the other; with `exact`, all operations are in f64."""
    if exact:
        model.set_experts_implementation("eager")  # the default kernel refuses f64
    with torch.no_grad(), in_float64() if exact else torch.no_grad():
        model = model.double() if exact else model
        found = [token_logprobs(model, tokens, prompt, temperature) for tokens, prompt in sequences(VOCABULARY)]
        return torch.cat(found).numpy()


def assert_as_exact(ours: np.ndarray, theirs: np.ndarray, exact: np.ndarray, temperature: float, name: str) -> None:
    """Assert that log-probs are within 1e-5 of Hugging Face in f32 or f64, or no farther from f64 than its f32 is.

    The bound is 1e-5 / temperature below 1, because the temperature divides the logits with their rounding errors.
    """
    pairs = ((ours, theirs), (ours, exact), (theirs, exact))
    apart, error, rounding = (float(np.abs(a - b).max(initial=0.0)) for a, b in pairs)
    bound = 1e-5 / min(1.0, temperature)
    assert min(apart, error) <= bound or error <= rounding, (
        f"{name}: {apart:.1e} apart, f64 {error:.1e}, {rounding:.1e}"
    )


def naive_loss(logprobs: Sequence[torch.Tensor], samples: Sequence[TrainSample], objective: ObjectivePlan):
    """Return the objective from its formula, token by token."""
    counts = [int(sample.action_mask.sum()) for sample in samples]
    total = torch.zeros(())
    for sample, new, count in zip(samples, logprobs, counts, strict=True):
        old = new.detach() if sample.old_logprobs is None else torch.from_numpy(sample.old_logprobs)
        penalty = [
            float(sample.opd_coefficients[t]) * float(old[t]) - float(sample.opd_teacher[t]) for t in range(len(new))
        ]
        for t in np.flatnonzero(sample.action_mask):
            ahead = [k for k in range(t, len(new)) if sample.action_mask[k]]  # a discount is of one action token
            later = sum(objective.opd_kl_discount**apart * penalty[k] for apart, k in enumerate(ahead))
            limit = objective.advantage_clip or math.inf
            advantage = min(max(float(sample.advantages[t]) - later, -limit), limit)
            ratio = (new[t] - old[t]).exp()
            loss = -advantage * ratio
            if objective.policy_loss == "ppo":
                clipped = ratio.clamp(1 - objective.pg_clip_low, 1 + objective.pg_clip_high)
                loss = max(loss, -advantage * clipped)
                if advantage < 0:
                    loss = min(loss, torch.tensor(-advantage * objective.dual_clip))
            if sample.importance_weights is not None:
                loss = loss * float(sample.importance_weights[t])
            if objective.loss_agg_mode == "token-mean":
                total = total + loss / sum(counts)
            else:  # seq-mean-token-mean
                total = total + loss / count / sum(count > 0 for count in counts)
    return objective.rl_loss_coef * total


def learning_rate(step: int, *, changed: bool = False) -> float:
    """Return the learning rate of update `step` = 1, 2, ...: linear warm-up, then a cosine or a line down to the
    minimum."""
    plan = optimizer_plan(False, changed=changed)
    if step <= plan.warmup_steps:
        return plan.learning_rate * step / plan.warmup_steps
    done = (step - plan.warmup_steps) / (plan.total_steps - plan.warmup_steps)
    left = 0.5 * (1 + math.cos(math.pi * done)) if plan.lr_scheduler_type == "cosine" else 1 - done
    return plan.min_learning_rate + (plan.learning_rate - plan.min_learning_rate) * left


def naive_training(
    path: str, objective_name: str, objective: ObjectivePlan, *, changed: bool = False
) -> tuple[list[dict], dict]:
    """Train with autograd and torch's AdamW; return the report of each update, and the weights.

    `changed`: see `descend`.
    """
    return _trained(load(path), objective_name, objective, changed=changed)


class AddedProducts(torch.nn.Module):
    """A model whose weights are those of `base` plus alpha / rank · B A for each linear layer of an adapter."""

    def __init__(self, base: str, adapter: Path) -> None:
        super().__init__()
        self.base = load(base).requires_grad_(False)
        config = json.loads((adapter / "adapter_config.json").read_text())
        self.scale = config["lora_alpha"] / config["r"]
        matrices = load_file(adapter / "adapter_model.safetensors")
        self.matrices = {name: torch.nn.Parameter(tensor) for name, tensor in matrices.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self.matrices.items()

    def forward(self, tokens: torch.Tensor) -> Any:
        weights = dict(self.base.named_parameters())
        added: dict[str, torch.Tensor] = {}
        for name, matrix_a in self.matrices.items():
            if ".lora_A." in name:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                added[module] = self.scale * self.matrices[name.replace("lora_A", "lora_B")] @ matrix_a
        for module in [name for name in added if ".experts." not in name]:
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + added[module]
        for block in {name.partition(".experts.")[0] for name in added if ".experts." in name}:
            experts = range(len(weights[f"{block}.experts.down_proj"]))
            gate, up, down = (
                torch.stack([added[f"{block}.experts.{each}.{part}_proj"] for each in experts])
                for part in ("gate", "up", "down")
            )
            both = torch.cat([gate, up], 1)
            for part, sum_of in (("gate_up_proj", both), ("down_proj", down)):
                weights[f"{block}.experts.{part}"] = weights[f"{block}.experts.{part}"] + sum_of
        return torch.func.functional_call(self.base, weights, (tokens,))


def naive_lora_training(base: str, adapter: Path, *, changed: bool = False) -> tuple[list[dict], dict]:
    """Train in the same way with peft, or without it for experts, which peft fuses: only the adapter is trained."""
    if any(".experts." in name for name in load_file(adapter / "adapter_model.safetensors")):
        return _trained(AddedProducts(base, adapter), "opd", ObjectivePlan(), changed=changed)
    return _trained(load_adapted(base, adapter, learns=True), "opd", ObjectivePlan(), changed=changed)


def _trained(
    model: PreTrainedModel,
    objective_name: str,
    objective: ObjectivePlan,
    after: Callable[[], None] = lambda: None,
    *,
    changed: bool = False,
) -> tuple[list[dict], dict]:
    def loss(step: int) -> torch.Tensor:
        samples = train_samples(step, objective_name)
        logprobs = [token_logprobs(model, s.tokens, s.prompt_length, TEMPERATURE) for s in samples]
        return naive_loss(logprobs, samples, objective)

    return descend(model, loss, after, changed=changed)


def naive_distilling(paths: dict[str, str], student: str) -> tuple[list[dict], dict]:
    """Train in the same way with each of `DISTILLING` in turn, from whole distributions of the student and its
    teachers."""
    model, teachers = load(student), {name: load(paths[name]) for name in TEACHERS}

    def loss(step: int) -> torch.Tensor:
        objective, samples = DISTILLING[step], train_samples(step, "opd")
        logprobs = [token_logprobs(model, s.tokens, s.prompt_length, TEMPERATURE) for s in samples]
        total = naive_loss(logprobs, samples, objective)
        counts = [int(sample.action_mask.sum()) for sample in samples]
        for number, (sample, count) in enumerate(zip(samples, counts, strict=True)):
            table = all_logprobs(model, sample.tokens, TEMPERATURE)
            for t in np.flatnonzero(sample.action_mask):
                place = sample.prompt_length + int(t) - 1
                s, value = table[place].exp(), torch.zeros(())
                value = value + objective.entropy_loss_coef * (s * s.log()).sum()
                for name in (name for name in TEACHERS if looks_at(name, number)):
                    with torch.no_grad():
                        logits = teachers[name](torch.from_numpy(sample.tokens)[None]).logits[0, place]
                        q = (logits / TEMPERATURE)[:VOCABULARY].softmax(0)  # of what both have
                    value = value + TEACHERS[name] * _naive_divergence(s, q, objective)
                if objective.loss_agg_mode == "token-mean":
                    total = total + value / sum(counts)
                else:
                    total = total + value / count / sum(count > 0 for count in counts)
        return total

    return descend(model, loss)


def _naive_divergence(s: torch.Tensor, q: torch.Tensor, objective: ObjectivePlan) -> torch.Tensor:
    if objective.opd_objective == "topk":
        ids = q.topk(objective.opd_topk).indices
        s, q = (
            torch.cat([p[ids], (1 - p[ids].double().sum()).clamp(min=1e-12)[None]]) for p in (s.double(), q.double())
        )
    beta, alpha = objective.opd_jsd_beta, objective.opd_skew_alpha
    m = beta * q + (1 - beta) * s
    mixed = alpha * s + (1 - alpha) * q

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a.log() - b.log())).sum()

    return {
        "reverse_kl": lambda: kl(s, q),
        "jsd": lambda: beta * kl(q, m) + (1 - beta) * kl(s, m),
        "skewed_reverse_kl": lambda: kl(s, mixed),
    }[objective.opd_divergence]().float()


def naive_critic_training(path: str, *, changed: bool = False) -> tuple[list[dict], dict]:
    """Train a critic in the same way: half the squared error, clipped, as a mean over sequences of token means."""
    model = load_critic(path)

    def loss(step: int) -> torch.Tensor:
        samples = [sample for sample in value_samples(step) if sample.action_mask.any()]
        total = torch.zeros(())
        for sample in samples:
            values = token_values(model, sample.tokens, sample.prompt_length)
            for t in np.flatnonzero(sample.action_mask):
                old, target = float(sample.old_values[t]), float(sample.returns[t])
                held = values[t].clamp(old - VALUE_CLIP, old + VALUE_CLIP)
                error = max((values[t] - target) ** 2, (held - target) ** 2) / 2
                total = total + error / int(sample.action_mask.sum()) / len(samples)
        return total

    return descend(model, loss, changed=changed)


def descend(
    model: PreTrainedModel,
    loss_of: Callable[[int], torch.Tensor],
    after: Callable[[], None] = lambda: None,
    *,
    changed: bool = False,
) -> tuple[list[dict], dict]:
    """Minimise the loss of each step with clipped gradients, the schedule of `optimizer_plan` and torch's AdamW.

    `after` is called after each update. With `changed`, every setting changes after `SAVED_AFTER` updates, and the
    moments stay.
    """
    plan = optimizer_plan(False)
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # vectors are never decayed; transformers has those of a layer's experts in one tensor
    is_vector = {name: each.ndim == 1 or name.endswith("proj_bias") for name, each in learning.items()}
    matrices = [each for name, each in learning.items() if not is_vector[name]]
    vectors = [each for name, each in learning.items() if is_vector[name]]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(plan.adam_beta1, plan.adam_beta2),
        eps=plan.adam_epsilon,
    )
    records = []
    for step in range(UPDATES):
        is_changed = changed and step >= SAVED_AFTER
        plan = optimizer_plan(False, changed=is_changed)
        for group, decay in zip(optimizer.param_groups, (plan.weight_decay, 0.0), strict=True):
            group |= {"weight_decay": decay, "betas": (plan.adam_beta1, plan.adam_beta2), "eps": plan.adam_epsilon}
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in learning.values()))
        scale = min(1.0, plan.max_grad_norm / (norm + 1e-6))
        for parameter in learning.values():
            parameter.grad.mul_(scale)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step + 1, changed=is_changed)
        optimizer.step()
        after()
        records.append({"loss": loss.item(), "grad_norm": norm, "learning_rate": optimizer.param_groups[0]["lr"]})
    return records, {name: tensor.detach() for name, tensor in learning.items()}
