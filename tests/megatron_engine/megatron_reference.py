"""Tiny random models on disk, and what Hugging Face and plain torch make of them: the naive side of each test."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from megatron_cases import (
    DISTILLING,
    LORA,
    LORA_MODELS,
    LORA_TARGETS,
    SAVED_AFTER,
    TEACHERS,
    TEMPERATURE,
    UPDATES,
    VALUE_CLIP,
    VOCABULARY,
    looks_at,
    optimizer_plan,
    routes_of,
    train_samples,
    value_samples,
)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from roll_opd.config.plan import ObjectivePlan
from roll_opd.samples.training import TrainSample

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
}
DEEP = COMMON | {  # divides by four in every direction
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
EXPERTS = COMMON | {
    "hidden_size": 32,
    "num_key_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "tie_word_embeddings": False,
}
LARGE = {  # enough for a process's memory to tell
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
# every width is another one, and yarn's two factors differ
LATENT = EXPERTS | {
    "num_experts": None,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "routed_scaling_factor": 1.7,
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
}
del LATENT["num_experts"]
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=False),
    "qwen3_tied": lambda: Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True),
    "qwen2_tied": lambda: Qwen2Config(**COMMON, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**COMMON, head_dim=16, tie_word_embeddings=False),
    "wide": lambda: LlamaConfig(
        **{**COMMON, "vocab_size": VOCABULARY + 30, "hidden_size": 48}, head_dim=16, tie_word_embeddings=False
    ),
    "mistral": lambda: MistralConfig(**COMMON, head_dim=24, tie_word_embeddings=False, sliding_window=None),
    "llama3": lambda: LlamaConfig(**COMMON, head_dim=16, tie_word_embeddings=False, rope_parameters=LLAMA3),
    "qwen3_moe": lambda: Qwen3MoeConfig(**EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **{**EXPERTS, "num_hidden_layers": 4}, shared_expert_intermediate_size=40, mlp_only_layers=[1]
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**LATENT, "num_hidden_layers": 4}, q_lora_rank=18, norm_topk_prob=True, num_nextn_predict_layers=0
    ),
    "deepseek_v2": lambda: DeepseekV2Config(
        **LATENT, q_lora_rank=None, topk_method="group_limited_greedy", norm_topk_prob=False
    ),
    "mixtral": lambda: MixtralConfig(**{**EXPERTS, "intermediate_size": 24}, sliding_window=None),
    "deep": lambda: Qwen3Config(**DEEP),
    "deep_valued": lambda: Qwen3Config(**DEEP, num_labels=1),
    "valued": lambda: Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True, num_labels=1),
    "large": lambda: Qwen3Config(**LARGE, head_dim=64, intermediate_size=1536),
    "large_moe": lambda: Qwen3MoeConfig(**LARGE, head_dim=64, num_experts=16, moe_intermediate_size=128),
    "yarn": lambda: Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True, rope_parameters=YARN),
}


def save_models(directory: Path) -> None:
    """Write every model, its norms and biases moved off their initial ones and zeros."""
    for seed, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        kind = AutoModelForSequenceClassification if name.endswith("valued") else AutoModelForCausalLM
        model = kind.from_config(config()).float()
        with torch.no_grad():
            biases = [buffer for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")]
            for parameter in (*model.parameters(), *biases):
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(directory / name)
    for kind, targets in LORA_TARGETS.items():
        save_adapter(directory / f"adapter-{len(targets)}", str(directory / LORA_MODELS[kind]), targets, **LORA)


def save_adapter(path: Path, base: str, targets: Sequence[str], rank: int, alpha: float) -> None:
    """Write an adapter of which neither matrix is zero, as peft saves it."""
    torch.manual_seed(len(targets))
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM")
    model = get_peft_model(load(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)


def load_adapted(base: str, adapter: Path, *, learns: bool = False) -> PeftModel:
    return PeftModel.from_pretrained(load(base), adapter, is_trainable=learns)


def load(path: str | Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def load_critic(path: str | Path) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)


def token_values(model: PreTrainedModel, tokens: np.ndarray, prompt: int) -> torch.Tensor:
    """[T-P]: entry i is of the state that has read tokens 0 to P + i - 1."""
    states = model.model(torch.from_numpy(tokens)[None]).last_hidden_state[0]
    found = [model.score(states[place - 1])[0] for place in range(prompt, len(tokens))]
    return torch.stack(found) if found else torch.zeros(0)


def all_logprobs(model: PreTrainedModel, tokens: np.ndarray, temperature: float) -> torch.Tensor:
    """[T, V]: row t is the distribution of the token that follows token t."""
    return (model(torch.from_numpy(tokens)[None]).logits[0] / temperature).log_softmax(-1)


def token_logprobs(model: PreTrainedModel, tokens: np.ndarray, prompt: int, temperature: float) -> torch.Tensor:
    """[T-P]: entry i speaks of token P + i, which the model predicts at P + i - 1."""
    table = all_logprobs(model, tokens, temperature)
    picked = [table[place - 1, int(tokens[place])] for place in range(prompt, len(tokens))]
    return torch.stack(picked) if picked else torch.zeros(0)


def naive_loss(logprobs: Sequence[torch.Tensor], samples: Sequence[TrainSample], objective: ObjectivePlan):
    """The objective from its formula, token by token."""
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
    """Of update `step` = 1, 2, ...: linear warm-up, then a cosine or a line down to the minimum."""
    plan = optimizer_plan(False, changed=changed)
    if step <= plan.warmup_steps:
        return plan.learning_rate * step / plan.warmup_steps
    done = (step - plan.warmup_steps) / (plan.total_steps - plan.warmup_steps)
    left = 0.5 * (1 + math.cos(math.pi * done)) if plan.lr_scheduler_type == "cosine" else 1 - done
    return plan.min_learning_rate + (plan.learning_rate - plan.min_learning_rate) * left


def naive_training(
    path: str, objective_name: str, objective: ObjectivePlan, *, changed: bool = False
) -> tuple[list[dict], dict]:
    """Train with autograd and torch's AdamW; return what each update reports, and the weights.

    `changed`: see `descend`.
    """
    return _trained(load(path), objective_name, objective, changed=changed)


def naive_experts_training(path: str, bias_rate: float = 0.0, *, changed: bool = False) -> tuple[list[dict], dict]:
    """The same of a mixture of experts; the weights under the names that are on disk.

    With `bias_rate`, each router's biases move by it after an update, up where an expert had less than the mean.
    """
    model, routers = load(path), []
    counts: dict[int, torch.Tensor] = {}
    for module in model.modules() if bias_rate else ():
        if hasattr(module, "e_score_correction_bias"):
            number = len(routers)
            routers.append(module)

            def count(module: Any, inputs: Any, found: Any, number: int = number) -> None:
                for expert in found[2].flatten().tolist():
                    counts.setdefault(number, torch.zeros(len(module.weight)))[expert] += 1

            module.register_forward_hook(count)

    def move() -> None:
        for number, router in enumerate(routers):
            for expert, tokens in enumerate(counts[number]):
                router.e_score_correction_bias[expert] += bias_rate * torch.sign(counts[number].mean() - tokens)
        counts.clear()

    found, _ = _trained(model, "opd", ObjectivePlan(), move, changed=changed)
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return found, load_file(Path(directory) / "model.safetensors")


def forced(model: PreTrainedModel, sample: np.ndarray, differing: np.ndarray | None = None) -> list:
    """Have each token of `sample` go to the experts of `routes_of`; the last goes where the router says.

    Counts, in `differing` [T-1, layers], where that would have been elsewhere. Returns the hooks.
    """
    routes = torch.from_numpy(routes_of(sample).astype(np.int64))
    hooks = []
    for layer, block in enumerate(model.model.layers):
        if not hasattr(block.mlp, "gate") or not block.mlp.gate.__class__.__name__.lower().endswith("topkrouter"):
            continue

        def choose(module: Any, inputs: Any, found: Any, layer: int = layer) -> Any:
            logits, _, ids = found
            chosen = torch.cat([routes[:, layer], ids[len(routes) :]])
            if differing is not None:
                differing[:, layer] = (ids.sort(-1).values != chosen.sort(-1).values).any(-1)[:-1]
            scores = logits.sigmoid() if hasattr(module, "e_score_correction_bias") else logits.softmax(-1)
            weights = scores.gather(1, chosen)
            if module.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights * getattr(module, "routed_scaling_factor", 1.0), chosen

        hooks.append(block.mlp.gate.register_forward_hook(choose))
    return hooks


def forced_logprobs(model: PreTrainedModel, tokens: np.ndarray, prompt: int, temperature: float, *counted: Any) -> Any:
    """`token_logprobs` along `routes_of`."""
    hooks = forced(model, tokens, *counted)
    found = token_logprobs(model, tokens, prompt, temperature)
    for hook in hooks:
        hook.remove()
    return found


def naive_replay_training(path: str) -> tuple[list[dict], dict]:
    """Train along the routes; records also say how many tokens, and choices, differ from the model's own."""
    model, counts = load(path), []

    def loss(step: int) -> torch.Tensor:
        samples = train_samples(step, "opd")
        tables = [np.zeros((len(s.tokens) - 1, 4), bool) for s in samples]
        logprobs = [
            forced_logprobs(model, s.tokens, s.prompt_length, TEMPERATURE, table)
            for s, table in zip(samples, tables, strict=True)
        ]
        together = np.concatenate(tables)
        counts.append({"rerouted_tokens": together.any(1).sum(), "rerouted_choices": together.sum()})
        return naive_loss(logprobs, samples, ObjectivePlan())

    records, _ = descend(model, loss)
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        final = load_file(Path(directory) / "model.safetensors")
    return [record | counted for record, counted in zip(records, counts, strict=True)], final


def naive_router_loss(
    path: str, name: str, samples: Sequence[TrainSample], packs: Sequence[Sequence[int]]
) -> tuple[float, dict]:
    """A loss of the routers, summed over layers, of all tokens; and its gradient, by name.

    The balancing loss is one of each of `packs`, sample numbers, weighed by its share of the tokens.
    """
    model, logits = load(path), []
    for _, module in model.named_modules():
        if module.__class__.__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda module, inputs, _: logits.append((module, inputs[0])))
    of_layers: dict[int, list[torch.Tensor]] = {}
    for sample in samples:
        logits.clear()
        model.model(torch.from_numpy(sample.tokens)[None])
        for layer, (module, states) in enumerate(logits):
            of_layers.setdefault(layer, []).append(states.reshape(-1, states.size(-1)) @ module.weight.T)
    total = torch.zeros(())
    for pieces in of_layers.values():
        table = torch.cat(pieces)
        if name == "z_loss":
            total = total + table.logsumexp(-1).square().mean()
            continue
        for pack in packs:
            own = torch.cat([pieces[number] for number in pack])
            chosen = torch.zeros_like(own).scatter(1, own.topk(2).indices, 1.0)
            balance = own.size(1) * (chosen.mean(0) / 2 * own.softmax(-1).mean(0)).sum()
            total = total + balance * len(own) / len(table)
    total.backward()
    return total.item(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def naive_lora_training(base: str, adapter: Path, *, changed: bool = False) -> tuple[list[dict], dict]:
    """The same with peft: only the adapter learns."""
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
    """The same with each of `DISTILLING` in turn, from whole distributions of the student and its teachers."""
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
    """The same for a critic: half the squared error, clipped, its mean over sequences of token means."""
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

    `after` is called after each update. With `changed`, the moments stay after `SAVED_AFTER` updates, and every
    setting is another one.
    """
    plan = optimizer_plan(False)
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    matrices = [parameter for parameter in learning.values() if parameter.ndim > 1]
    vectors = [parameter for parameter in learning.values() if parameter.ndim == 1]  # never decayed
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
