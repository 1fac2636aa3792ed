"""One update of SFT and of DPO over tensor and data parallelism, against Hugging Face, autograd and the formulas."""

import json
import math

import megatron_cases as cases
import megatron_reference as reference
import pytest
import torch
from conftest import Launches


def naive_sft(logprobs: list[torch.Tensor]) -> torch.Tensor:
    return -sum(values.sum() for values in logprobs) / sum(len(values) for values in logprobs)


def naive_dpo(logprobs: list[torch.Tensor], beta: float = 0.3, smoothing: float = 0.1) -> torch.Tensor:
    """arXiv 2305.18290, equation 7, with the label smoothing of its conservative variant."""
    refs = [torch.from_numpy(sample.ref_logprobs) for sample in cases.supervised_samples("dpo")]
    losses = []
    for pair in range(0, len(logprobs), 2):
        chosen = logprobs[pair].sum() - refs[pair].sum()
        rejected = logprobs[pair + 1].sum() - refs[pair + 1].sum()
        right = 1 / (1 + (-beta * (chosen - rejected)).exp())
        losses.append(-(1 - smoothing) * right.log() - smoothing * (1 - right).log())
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("schema", "loss_of"), [("sft", naive_sft), ("dpo", naive_dpo)])
def test_an_update_equals_the_naive_one(launches: Launches, schema: str, loss_of) -> None:
    found = json.loads((launches.run("4").root / f"{schema}.json").read_text())
    model = reference.load(cases.model_path(launches.root, "qwen3_tied"))
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    samples = cases.supervised_samples(schema)
    loss = loss_of([reference.token_logprobs(model, s.tokens, s.prompt_length, 1.0) for s in samples])
    loss.backward()
    norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()))
    assert found["weighted_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["grad_norms"] == pytest.approx([norm] * 4, rel=1e-5)

    plan = cases.optimizer_plan(True)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": plan.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, plan.max_grad_norm / (norm + 1e-6)))
    betas = (plan.adam_beta1, plan.adam_beta2)
    torch.optim.AdamW(groups, lr=reference.learning_rate(1), betas=betas, eps=plan.adam_epsilon).step()
    weights = launches.weights(schema)
    for name, tensor in model.named_parameters():
        wanted = tensor.detach()
        assert (weights[name] - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name
        assert not torch.equal(weights[name], before[name]), name
