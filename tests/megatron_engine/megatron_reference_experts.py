"""The naive side of mixtures of experts: their training, forced routes, losses of routers."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from megatron_data import TEMPERATURE, routes_of, train_samples
from megatron_models import load
from megatron_reference import _trained, descend, naive_loss, token_logprobs
from megatron_samples import TrainSample
from safetensors.torch import load_file
from transformers import PreTrainedModel

from roll_opd.config.plan import ObjectivePlan


def naive_experts_training(path: str, bias_rate: float = 0.0, *, changed: bool = False) -> tuple[list[dict], dict]:
    """Train a mixture of experts in the same way; the weights have the names on disk.

    With `bias_rate`, each router's biases change by this rate after an update: up for experts with fewer tokens than
    the mean.
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
    """Route each token of `sample` to the experts of `routes_of`; the last token is routed by the router.

    Mark, in `differing` [T-1, layers], the tokens whose routes differ from the router's choice. Returns the hooks.
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
    """Train with the routes; records also have the number of tokens and choices that differ from the model's choice."""
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
    """Return a loss of the routers over all tokens, summed over layers, and its gradient by name.

    The balancing loss is computed for each of `packs` (sample numbers), weighted by its share of the tokens.
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
