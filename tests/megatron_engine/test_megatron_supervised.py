"""One update of SFT, of DPO and of demonstrations among the student's samples, over tensor, pipeline and data
parallelism, against Hugging Face, autograd and the formulas.
"""

import math

import megatron_data as data
import megatron_layouts as layouts
import megatron_models as models
import megatron_reference as reference
import numpy as np
import pytest
import torch
from megatron_answers import Answers
from megatron_jobs import supervised
from transformers import PreTrainedModel


def logprobs_of(model: PreTrainedModel, schema: str) -> list[torch.Tensor]:
    samples = supervised.supervised_samples(schema)
    return [reference.token_logprobs(model, s.tokens, s.prompt_length, 1.0) for s in samples]


def naive_sft(model: PreTrainedModel) -> torch.Tensor:
    logprobs = logprobs_of(model, "sft")
    return -sum(values.sum() for values in logprobs) / sum(len(values) for values in logprobs)


def naive_dpo(model: PreTrainedModel, beta: float = 0.3, smoothing: float = 0.1) -> torch.Tensor:
    """arXiv 2305.18290, equation 7, with the label smoothing of its conservative variant."""
    logprobs = logprobs_of(model, "dpo")
    refs = [torch.from_numpy(sample.ref_logprobs) for sample in supervised.supervised_samples("dpo")]
    losses = []
    for pair in range(0, len(logprobs), 2):
        chosen = logprobs[pair].sum() - refs[pair].sum()
        rejected = logprobs[pair + 1].sum() - refs[pair + 1].sum()
        right = 1 / (1 + (-beta * (chosen - rejected)).exp())
        losses.append(-(1 - smoothing) * right.log() - smoothing * (1 - right).log())
    return sum(losses) / len(losses)


def naive_mix_chord(model: PreTrainedModel) -> torch.Tensor:
    """(1-mu) · PPO, KL and entropy of the own samples, mu · -p(1-p) log p of demonstrations; each a mean of its own."""
    mu = 0.9 * 4 / 10
    samples = supervised.supervised_samples("mix_chord")
    acted = {kind: sum(bool(s.action_mask.any()) for s in samples if s.demonstration == kind) for kind in (False, True)}
    total = torch.zeros(())
    for sample, new in zip(samples, logprobs_of(model, "mix_chord"), strict=True):
        table = reference.all_logprobs(model, sample.tokens, 1.0)
        for t in np.flatnonzero(sample.action_mask):
            if sample.demonstration:
                p = new[t].detach().exp()
                value = -mu * p * (1 - p) * new[t]
            else:
                old, ref, a = (float(x[t]) for x in (sample.old_logprobs, sample.ref_logprobs, sample.advantages))
                a -= float(sample.opd_coefficients[t]) * old - float(sample.opd_teacher[t])
                ratio = (new[t] - old).exp()
                surrogate = torch.maximum(-a * ratio, -a * ratio.clamp(0.9, 1.3))
                surrogate = surrogate.clamp(max=-a * 1.2) if a < 0 else surrogate
                row = table[sample.prompt_length + int(t) - 1]
                surrogate = surrogate * float(sample.importance_weights[t])
                value = (1 - mu) * surrogate + 0.2 * (new[t] - ref) ** 2 / 2 + 0.02 * (row.exp() * row).sum()
            total = total + value / int(sample.action_mask.sum()) / acted[sample.demonstration]
    return total


@pytest.mark.parametrize("layout", supervised.SUPERVISED_LAYOUTS)
@pytest.mark.parametrize(
    ("schema", "loss_of"), [("sft", naive_sft), ("dpo", naive_dpo), ("mix_chord", naive_mix_chord)]
)
def test_an_update_equals_the_naive_one(answers: Answers, layout: str, schema: str, loss_of) -> None:
    name = f"{schema}-{layout}"
    found = answers.values(f"{name}")
    model = models.load(layouts.model_path(answers.root, "qwen3_tied"))
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    loss = loss_of(model)
    loss.backward()
    norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()))
    assert found["weighted_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["grad_norms"] == pytest.approx([norm] * layouts.LAYOUTS[layout].world_size, rel=1e-5)

    if schema == "mix_chord":  # what is counted of each part
        samples = supervised.supervised_samples(schema)
        for counted, kind in (("tokens", False), ("demonstration_tokens", True)):
            assert found[counted] == sum(int(s.action_mask.sum()) for s in samples if s.demonstration == kind)
        of_demonstrations = [new for s, new in zip(samples, logprobs_of(model, schema), strict=True) if s.demonstration]
        mean = sum(-float(new.detach().mean()) for new in of_demonstrations) / len(of_demonstrations)
        assert found["demonstration_loss"] == pytest.approx(mean, rel=1e-5)

    plan = data.optimizer_plan(True)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": plan.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, plan.max_grad_norm / (norm + 1e-6)))
    betas = (plan.adam_beta1, plan.adam_beta2)
    torch.optim.AdamW(groups, lr=reference.learning_rate(1), betas=betas, eps=plan.adam_epsilon).step()
    weights = answers.weights(name)
    for name, tensor in model.named_parameters():
        wanted = tensor.detach()
        assert (weights[name] - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name
        assert not torch.equal(weights[name], before[name]), name
