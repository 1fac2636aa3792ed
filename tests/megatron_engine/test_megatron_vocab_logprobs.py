"""Log-probs, top-k, divergences and entropy over a split vocabulary, against dense ones in double precision."""

import math

import megatron_layouts as layouts
import numpy as np
import pytest
import torch
from megatron_answers import Answers
from megatron_jobs import vocabulary
from torch._subclasses.fake_tensor import FakeTensorMode

from roll_opd.megatron.engine import check_scored_tokens
from roll_opd.megatron.vocabulary import raw_logits
from roll_opd.objective.engine_evidence import LAMBDAS
from roll_opd.samples.sample import Sample


def test_a_scored_token_outside_the_softmax_is_refused() -> None:
    """A prompt may have such tokens: they have embeddings, and are not scored."""
    samples = [Sample(np.array([9, 1, 8]), 1), Sample(np.array([9, 9]), 2)]
    check_scored_tokens(samples, 9)
    check_scored_tokens([], 9)
    with pytest.raises(
        ValueError, match="token 8 has no log-prob, as log-probs are normalised over 8 token ids; raise"
    ):
        check_scored_tokens(samples, 8)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_values_and_gradients(answers: Answers, layout: str, temperature: float) -> None:
    """For chunks of one row, of an odd number and of all rows; padding of the vocabulary has no effect."""
    found = answers.arrays(f"vocab-{layout}")
    hidden, weight, targets, incoming = vocabulary.vocab_inputs(
        vocabulary.VOCAB_ROWS, vocabulary.VOCAB_WIDTH, layouts.VOCABULARY
    )
    hidden_ME = torch.from_numpy(hidden).double().requires_grad_()
    weight_VE = torch.from_numpy(weight).double().requires_grad_()
    logits_MV = hidden_ME @ weight_VE.T / temperature
    wanted = logits_MV.log_softmax(-1).gather(1, torch.from_numpy(targets)[:, None])[:, 0]
    wanted.backward(torch.from_numpy(incoming).double())
    for chunks in vocabulary.VOCAB_CHUNK_ROWS:
        key = f"{chunks}-{temperature}"
        np.testing.assert_allclose(found[f"{key}-logprobs"], wanted.detach().numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(found[f"{key}-hidden"], hidden_ME.grad.numpy(), rtol=0, atol=2e-5)
        weight_grad = found[f"{key}-weight"]
        np.testing.assert_allclose(weight_grad[: layouts.VOCABULARY], weight_VE.grad.numpy(), rtol=0, atol=2e-5)
        assert len(weight_grad) > layouts.VOCABULARY and not weight_grad[layouts.VOCABULARY :].any()


def test_memory_is_bounded_by_the_chunk(answers: Answers) -> None:
    """No tensor of the forward or backward pass is larger than a chunk; with one chunk, all logits are there."""
    sizes = answers.values("memory")
    all_logits = 256 * 20_000 * 4
    for name, largest in sizes.items():
        assert 2**18 < largest[str(2**20)] <= 2**20, name
        assert largest[str(2**30)] == all_logits, name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("layout", ["tp1", "tp2"])
@pytest.mark.parametrize("measure", [*vocabulary.MEASURES, "entropy"])
def test_divergences_and_entropy(answers: Answers, measure: str, layout: str, temperature: float) -> None:
    """Against both softmaxes over the columns that student and teacher share, written out in double precision."""
    found = answers.arrays(f"columns-{layout}")
    hidden, weight, _, incoming = vocabulary.vocab_inputs(
        vocabulary.VOCAB_ROWS, vocabulary.VOCAB_WIDTH, layouts.VOCABULARY
    )
    hidden_ME = torch.from_numpy(hidden).double().requires_grad_()
    weight_VE = torch.from_numpy(weight).double().requires_grad_()
    logits_MV = hidden_ME @ weight_VE.T / temperature
    if measure == "entropy":
        logprobs_MV = logits_MV.log_softmax(-1)
        wanted = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
    else:
        teacher_MF, teacher_VF = (
            torch.from_numpy(x).double() for x in vocabulary.teacher_inputs(vocabulary.VOCAB_ROWS)
        )
        teacher = (teacher_MF @ teacher_VF.T / temperature).softmax(-1)
        wanted = naive(measure, logits_MV[:, : vocabulary.TEACHER_VOCABULARY].softmax(-1), teacher)
    wanted.backward(torch.from_numpy(incoming).double())
    for chunks in vocabulary.VOCAB_CHUNK_ROWS:
        key = f"{measure}-{chunks}-{temperature}"
        np.testing.assert_allclose(found[key], wanted.detach().numpy(), rtol=1e-5, atol=1e-6)
        assert_gradients(found, key, hidden_ME, weight_VE)
        assert not found[f"{key}-weight"][layouts.VOCABULARY :].any()


def assert_gradients(
    found: dict[str, np.ndarray], key: str, hidden_ME: torch.Tensor, weight_VE: torch.Tensor, within: float = 1e-5
) -> None:
    """Equal `within` this part of each gradient's scale."""
    for name, leaf in (("hidden", hidden_ME), ("weight", weight_VE)):
        scale = max(1.0, float(leaf.grad.abs().max()))
        actual = found[f"{key}-{name}"][: len(leaf)]
        np.testing.assert_allclose(actual, leaf.grad.numpy(), rtol=0, atol=within * scale, err_msg=f"{key}-{name}")


def naive(measure: str, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p * (p.log() - q.log())).sum(-1)

    beta, alpha = 0.3, 0.2
    m = beta * t + (1 - beta) * s
    return {
        "reverse_kl": kl(s, t),
        "forward_kl": kl(t, s),
        "jsd": beta * kl(t, m) + (1 - beta) * kl(s, m),
        "skewed_reverse_kl": kl(s, alpha * s + (1 - alpha) * t),
        "skewed_forward_kl": kl(t, alpha * t + (1 - alpha) * s),
    }[measure]


@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_moments_of_the_sampling_distribution(answers: Answers, layout: str) -> None:
    """Against sums over a list of the tokens that top-k and top-p keep, in double precision."""
    found = answers.arrays(f"moments-{layout}")
    hidden, weight, targets, _ = vocabulary.vocab_inputs(
        vocabulary.VOCAB_ROWS, vocabulary.VOCAB_WIDTH, layouts.VOCABULARY
    )
    logits_MV = torch.from_numpy(hidden).double() @ torch.from_numpy(weight).double().T
    logprobs_MV = (logits_MV / 0.7).log_softmax(-1)
    excluded = 0
    for top_k, top_p in vocabulary.TRUNCATIONS:
        wanted = [
            naive_moments(row.tolist(), int(target), top_k, top_p)
            for row, target in zip(logprobs_MV, targets, strict=True)
        ]
        excluded += sum(math.isinf(row[1]) for row in wanted)
        for chunks in vocabulary.VOCAB_CHUNK_ROWS:
            np.testing.assert_allclose(found[f"{chunks}-{top_k}-{top_p}"], np.array(wanted), rtol=2e-5, atol=2e-5)
    assert excluded
    wanted = []
    for number, (row, target) in enumerate(zip(logits_MV, targets, strict=True)):
        temperature, top_k, top_p = vocabulary.SETTINGS[number % len(vocabulary.SETTINGS)]
        logprobs_V = (row / (temperature or 1.0)).log_softmax(-1).tolist()
        wanted.append(naive_moments(logprobs_V, int(target), top_k if temperature else 1, top_p))
        if not temperature:
            wanted[-1][1] = 0.0  # the engine returns a greedy token's log-prob at temperature 1
    for chunks in vocabulary.VOCAB_CHUNK_ROWS:
        np.testing.assert_allclose(found[f"{chunks}-settings"], np.array(wanted), rtol=2e-5, atol=2e-5)


def naive_moments(logprobs: list[float], target: int, top_k: int, top_p: float) -> list[float]:
    order = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])
    order = order[:top_k] if top_k > 0 else order
    mass = sum(math.exp(logprobs[token]) for token in order)
    kept, before = [], 0.0
    for token in order:
        if top_p == 1 or before < top_p * mass:
            kept.append(token)
        before += math.exp(logprobs[token])
    mass = sum(math.exp(logprobs[token]) for token in kept)
    mean = sum(math.exp(logprobs[token]) / mass * logprobs[token] for token in kept)
    variance = sum(math.exp(logprobs[token]) / mass * (logprobs[token] - mean) ** 2 for token in kept)
    powers = [sum(math.exp(logprobs[t]) / mass * math.exp(power * logprobs[t]) for t in kept) for power in LAMBDAS]
    log_mass = math.log(mass) if target in kept else math.inf
    return [logprobs[target], log_mass, mean, variance, *map(math.log, powers)]


def test_layouts_agree(answers: Answers) -> None:
    """Sums over the vocabulary do not depend on how many ranks share it, nor on the rows of a chunk."""
    one, two = (answers.arrays(f"columns-tp{world}") for world in (1, 2))
    for key in (f"{m}-{c}-{t}" for m in vocabulary.MEASURES for c in vocabulary.VOCAB_CHUNK_ROWS for t in (1.0, 0.7)):
        wanted = one[key.replace("one", "all").replace("odd", "all")]
        np.testing.assert_allclose(two[key], wanted, rtol=2e-6, atol=1e-9, err_msg=key)


@pytest.mark.parametrize("k", vocabulary.TOPK)
def test_topk_ids_logprobs_and_gradients_equal_dense_ones(answers: Answers, k: int) -> None:
    """Ids and log-probs of the most likely tokens, and the gradient of a divergence on them and their tail."""
    hidden, weight, _, incoming = vocabulary.vocab_inputs(
        vocabulary.VOCAB_ROWS, vocabulary.VOCAB_WIDTH, layouts.VOCABULARY
    )
    hidden_ME = torch.from_numpy(hidden).double().requires_grad_()
    weight_VE = torch.from_numpy(weight).double().requires_grad_()
    logprobs_MV = (hidden_ME @ weight_VE.T / 0.7).log_softmax(-1)
    best = logprobs_MV.topk(k, -1)
    p, share = best.values.exp(), k / layouts.VOCABULARY
    rest = 1 - p.sum(-1)
    wanted = (p * (p * layouts.VOCABULARY).log()).sum(-1)
    if k < layouts.VOCABULARY:
        wanted = wanted + rest * (rest / (1 - share)).log()
    wanted.backward(torch.from_numpy(incoming).double())
    for layout in ("tp1", "tp2"):
        found = answers.arrays(f"topk-{layout}")
        np.testing.assert_array_equal(found[f"{k}-ids"], best.indices.numpy())
        np.testing.assert_allclose(found[f"{k}-logprobs"][:, :-1], best.values.detach().numpy(), rtol=0, atol=1e-5)
        others_MV = logprobs_MV.detach().scatter(1, best.indices, -torch.inf)
        np.testing.assert_allclose(found[f"{k}-logprobs"][:, -1], others_MV.logsumexp(1).numpy(), rtol=0, atol=1e-5)
        np.testing.assert_array_equal(found[f"{k}-again"], found[f"{k}-logprobs"])
        assert_gradients(found, str(k), hidden_ME, weight_VE, within=2e-5)  # log-ratios of up to 20 in f32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_logits_are_f32_whatever_the_model_is(device: str, dtype: torch.dtype) -> None:
    """On a GPU with another kernel; without a GPU, meta tensors show shapes and dtypes."""
    with FakeTensorMode():
        hidden, weight = (torch.empty(rows, 8, dtype=dtype, device=device) for rows in (3, 5))
        logits = raw_logits(hidden, weight)
    assert (logits.dtype, logits.shape, logits.device.type) == (torch.float32, (3, 5), device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_does_not_round_logits(dtype: torch.dtype) -> None:
    hidden, weight = (torch.randn(rows, 256, device="cuda").to(dtype) for rows in (64, 4096))
    wanted = hidden.double() @ weight.double().T
    assert (raw_logits(hidden, weight) - wanted).abs().max() < 1e-4 * wanted.abs().max()
