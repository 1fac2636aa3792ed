"""Every policy loss against a loop in double precision, and properties of all policy losses."""

import math
from dataclasses import replace

import pytest
import torch
from naive_losses import CASES, REFERENCES, Sequence, outside

from roll_opd.objective.aggregation import MODES, token_weights
from roll_opd.objective.losses.batch import MAX_LOG_RATIO, LossBatch, beyond_bounds, probability_ratio
from roll_opd.objective.registry import POLICY_LOSSES as REGISTRY
from tests.each import each

POLICY_LOSSES = {name: REGISTRY.find(name) for name in REGISTRY.builtin}
# pairs of sequences; one without a token, one without an action
LENGTHS = [7, 1, 12, 4, 5, 9, 0, 6]
NO_ACTION = 4
STEP = 3

# sg() somewhere in them: the gradient is not the derivative
STOPPED = {"gspo", "cispo", "tis", "topr", "rec", "mix_chord"}
# at old = new, the gradient is that of REINFORCE: -A
POLICY_GRADIENT = (
    "importance_sampling",
    "ppo",
    "gspo",
    "cispo",
    "sapo",
    "sppo",
    "vanilla",
    "tis",
    "topr",
    "kimi15",
    "rec",
)
CASES = [case for case in CASES if case[0] in POLICY_LOSSES]  # a room of roll_opd/extras may be absent
case = each(("name", "arguments"), CASES)


def batch(seed: int, *, spread: float = 0.3, dtype: torch.dtype = torch.float64, rewards: bool = False) -> LossBatch:
    """Return random sequences in which some tokens are not actions; values outside the mask are infinite or NaN."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)

    def draw(scale: float = 1.0) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64) * scale

    mask = draw() > -0.7
    numbers = torch.repeat_interleave(torch.tensor(LENGTHS))
    mask &= numbers != NO_ACTION
    new = -draw().abs() - 0.01
    old, ref = new + draw(spread), new + draw(spread)
    new, old, ref = (
        torch.where(mask, values, torch.tensor(wild)).to(dtype)
        for values, wild in ((new, -math.inf), (old, math.nan), (ref, -math.inf))
    )
    return LossBatch(
        logprobs_M=new.requires_grad_(),
        old_logprobs_M=old,
        advantages_M=(draw(2.0) * mask).to(dtype),
        mask_M=mask,
        lengths=tuple(LENGTHS),
        rewards_M=(numbers % 3 - 1.0).to(dtype) if rewards else None,
        ref_logprobs_M=ref,
        demonstration_M=numbers % 4 == 1,
        step=STEP,
    )


def sequences(made: LossBatch) -> list[Sequence]:
    rows = {
        name: [piece.tolist() for piece in values.detach().split(list(made.lengths))]
        for name, values in vars(made).items()
        if isinstance(values, torch.Tensor)
    }
    return [
        Sequence(
            new=rows["logprobs_M"][number],
            still=rows["logprobs_M"][number],
            old=rows["old_logprobs_M"][number],
            advantages=rows["advantages_M"][number],
            mask=rows["mask_M"][number],
            rewards=rows["rewards_M"][number] if "rewards_M" in rows else None,
            ref=rows["ref_logprobs_M"][number],
            demonstration=any(rows["demonstration_M"][number]),
            step=made.step,
        )
        for number in range(len(made.lengths))
    ]


def part(made: LossBatch, numbers: list[int]) -> LossBatch:
    """Return the batch with only these sequences, in this order."""
    starts = [sum(made.lengths[:number]) for number in numbers]
    places = torch.cat([torch.arange(s, s + made.lengths[n]) for s, n in zip(starts, numbers, strict=True)]).long()
    picked = {name: values[places] for name, values in vars(made).items() if isinstance(values, torch.Tensor)}
    return replace(made, **picked, lengths=tuple(made.lengths[number] for number in numbers))


def test_every_loss_has_a_reference() -> None:
    assert REFERENCES.keys() >= POLICY_LOSSES.keys()


@case
@each("spread", [0.3, 30.0])
def test_equals_its_formula(name: str, arguments: dict, spread: float) -> None:
    for seed in range(3):
        made = batch(seed, spread=spread, rewards=seed == 2)
        found = POLICY_LOSSES[name](made, **arguments)
        wanted = [value for row in REFERENCES[name](sequences(made), **arguments) for value in row]
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-10, atol=1e-10)
        assert not found[~made.mask_M].any()


@case
def test_losses_in_single_precision_equal_the_reference(name: str, arguments: dict) -> None:
    made = batch(5, dtype=torch.float32)
    found = POLICY_LOSSES[name](made, **arguments)
    assert found.dtype == torch.float32
    wanted = [value for row in REFERENCES[name](sequences(made), **arguments) for value in row]
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-4, atol=1e-5)


@case
def test_gradients_of_losses_equal_central_differences(name: str, arguments: dict) -> None:
    """Central differences of the reference, in which values under a stop-gradient are constant."""
    made, step = batch(7), 1e-6
    base = sequences(made)

    def total(number: int, t: int, change: float) -> float:
        new = [value + change * (place == t) for place, value in enumerate(base[number].new)]
        moved = [*base[:number], replace(base[number], new=new), *base[number + 1 :]]
        return sum(map(sum, REFERENCES[name](moved, **arguments)))

    wanted = [
        (total(number, t, step) - total(number, t, -step)) / (2 * step) if taken else 0.0
        for number, s in enumerate(base)
        for t, taken in enumerate(s.mask)
    ]
    (found,) = torch.autograd.grad(POLICY_LOSSES[name](made, **arguments).sum(), made.logprobs_M)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-6)


@each("name", sorted(set(POLICY_LOSSES) - STOPPED))
def test_gradcheck(name: str) -> None:
    made = batch(9)

    def total(logprobs: torch.Tensor) -> torch.Tensor:
        return POLICY_LOSSES[name](replace(made, logprobs_M=torch.where(made.mask_M, logprobs, -1.0)))

    start = torch.where(made.mask_M, made.logprobs_M.detach(), -1.0).requires_grad_()
    assert torch.autograd.gradcheck(total, (start,))


@each("name", [name for name in POLICY_GRADIENT if name in POLICY_LOSSES])
def test_on_policy_gradient_is_the_policy_gradient(name: str) -> None:
    made = batch(11)
    made = replace(made, old_logprobs_M=made.logprobs_M.detach())
    (found,) = torch.autograd.grad(POLICY_LOSSES[name](made).sum(), made.logprobs_M)
    torch.testing.assert_close(found, -made.advantages_M)


def test_sequence_ratio_has_the_gradient_of_its_mean() -> None:
    made = batch(12)
    made = replace(made, old_logprobs_M=made.logprobs_M.detach(), advantages_M=torch.ones_like(made.logprobs_M))
    (found,) = torch.autograd.grad(POLICY_LOSSES["ppo"](made, ratio_type="sequence").sum(), made.logprobs_M)
    torch.testing.assert_close(found, -made.mask_M.double())  # n tokens, each with 1/n of the gradient of n


@case
@each("mode", MODES)
def test_no_split_and_no_order_changes_loss_and_gradient(name: str, arguments: dict, mode: str) -> None:
    """Only pairs must stay together."""
    made = batch(13)
    masks = list(made.mask_M.split(list(made.lengths)))
    demonstrations = [bool(piece.any()) for piece in made.demonstration_M.split(list(made.lengths))]
    weights = torch.cat(token_weights(masks, mode, 11.0, demonstrations if name.startswith("mix") else None)).double()
    whole = (POLICY_LOSSES[name](made, **arguments) * weights).sum()
    (wanted,) = torch.autograd.grad(whole, made.logprobs_M)
    units = [[n, n + 1] for n in range(0, len(LENGTHS), 2)] if name == "dpo" else [[n] for n in range(len(LENGTHS))]
    for seed in range(3):
        order = torch.randperm(len(units), generator=torch.Generator().manual_seed(seed)).tolist()
        cut = seed + 1
        total = torch.zeros((), dtype=torch.float64)
        for share in (order[:cut], order[cut:]):
            numbers = [number for unit in share for number in units[unit]]
            own = torch.cat([torch.arange(sum(LENGTHS[:n]), sum(LENGTHS[: n + 1])) for n in numbers]).long()
            total = total + (POLICY_LOSSES[name](part(made, numbers), **arguments) * weights[own]).sum()
        (found,) = torch.autograd.grad(total, made.logprobs_M)
        torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@each("name", POLICY_LOSSES)
@each("lengths", [(3, 2), (0, 0), (0, 4)])
def test_nothing_to_learn_from(name: str, lengths: tuple[int, ...]) -> None:
    count = sum(lengths)
    new = torch.full((count,), -math.inf, requires_grad=True)
    none = torch.zeros(count)
    made = LossBatch(new, none, none, none.bool(), lengths, None, none, none.bool())
    found = POLICY_LOSSES[name](made)
    assert found.shape == (count,) and not found.any()
    (gradient,) = torch.autograd.grad(found.sum(), new)
    assert not gradient.any()


@case
@each("distance", [40.0, 1e4])
def test_extreme_logprobs_stay_finite(name: str, arguments: dict, distance: float) -> None:
    for sign in (1.0, -1.0):
        new = torch.tensor([-distance, -1e-7, -distance, -1e-7, 0.0, -1.0], requires_grad=True)
        old = torch.tensor([-1e-7, -distance, -distance, -1e-7, -1.0, 0.0])
        made = LossBatch(new, old, torch.full((6,), sign), torch.ones(6, dtype=torch.bool), (3, 3), None, old, old < -2)
        loss = POLICY_LOSSES[name](made, **arguments)
        assert torch.isfinite(loss).all()
        (gradient,) = torch.autograd.grad(loss.sum(), new)
        assert torch.isfinite(gradient).all()


@each("distance", [1e3, 1e30, math.inf])
def test_ratio_is_bounded(distance: float) -> None:
    new = torch.tensor([distance, -distance]).requires_grad_()
    ratio = probability_ratio(new, torch.zeros(2))
    torch.testing.assert_close(ratio.detach(), torch.tensor([MAX_LOG_RATIO, -MAX_LOG_RATIO]).exp())
    mask = torch.ones(2, dtype=torch.bool)
    for name in {"importance_sampling", "ppo", "gspo", "sapo"} & POLICY_LOSSES.keys():
        for advantage in (1.0, -1.0):
            made = LossBatch(new, torch.zeros(2), torch.full((2,), advantage), mask, (1, 1))
            loss = POLICY_LOSSES[name](made)
            assert torch.isfinite(loss).all() or name == "gspo"  # whose gradient is taken through inf - inf
            if name != "gspo":
                (gradient,) = torch.autograd.grad(loss.sum(), new, retain_graph=True)
                assert torch.isfinite(gradient).all()


@case
def test_which_tokens_are_clipped(name: str, arguments: dict) -> None:
    whole = {**REGISTRY.defaults(name), **arguments}
    made = batch(21, rewards=True)
    wanted = [mask and outside(name, s, t, **whole) for s in sequences(made) for t, mask in enumerate(s.mask)]
    assert beyond_bounds(name, made, whole).tolist() == wanted


def of_ones_own(batch: LossBatch) -> torch.Tensor:
    return batch.ratio_M


def test_bounds_of_a_loss_of_ones_own() -> None:
    made = one([1.05, 1.2, 0.7], [1.0, 1.0, 1.0])
    REGISTRY.register("of_ones_own")(of_ones_own)
    assert beyond_bounds("of_ones_own", made, {"clip_low": 0.1, "clip_high": 0.1}).tolist() == [False, True, True]
    assert not beyond_bounds("of_ones_own", made, {"epsilon": 0.0}).any()


def one(ratio: list[float], advantages: list[float]) -> LossBatch:
    """Sequences of one token."""
    count = len(ratio)
    new = torch.tensor(ratio).log().requires_grad_()
    return LossBatch(
        new, torch.zeros(count), torch.tensor(advantages), torch.ones(count, dtype=torch.bool), (1,) * count
    )


def test_every_branch_of_ppo_by_hand() -> None:
    """Inside the bounds, clipped above or below, outside but not clipped, dual clip; no gradient if clipped."""
    made = one([1.1, 1.5, 0.5, 0.5, 1.5, 9.0], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    loss = POLICY_LOSSES["ppo"](made)
    torch.testing.assert_close(loss.detach(), torch.tensor([-2.2, -2.4, -1.0, 1.6, 3.0, 6.0]))
    (gradient,) = torch.autograd.grad(loss.sum(), made.logprobs_M)
    torch.testing.assert_close(gradient, torch.tensor([-2.2, 0.0, -1.0, 0.0, 3.0, 0.0]))


def test_dpo_is_the_mean_over_pairs() -> None:
    made = batch(17)
    weights = torch.cat(token_weights(list(made.mask_M.split(list(made.lengths))[:4]), "seq-mean-token-mean")).double()
    pairs = part(made, [0, 1, 2, 3])
    found = (POLICY_LOSSES["dpo"](pairs) * weights).sum()
    values = REFERENCES["dpo"](sequences(pairs))
    assert found.item() == pytest.approx((max(values[0]) + max(values[2])) / 2, rel=1e-6)
    with pytest.raises(ValueError, match="needs pairs of sequences, but the pack has 3"):
        POLICY_LOSSES["dpo"](part(made, [0, 1, 2]))


def test_what_a_loss_needs_is_named() -> None:
    missing = {"dpo": "ref_logprobs_M", "mix": "demonstration_M", "mix_chord": "demonstration_M"}
    for name in missing.keys() & POLICY_LOSSES.keys():
        with pytest.raises(ValueError, match=f"policy loss {name} needs {missing[name]} in its batch"):
            POLICY_LOSSES[name](replace(batch(0), **{missing[name]: None}))


def test_unknown_choices_are_refused() -> None:
    wrong = [
        ("ppo", {"ratio_type": "word"}),
        ("topr", {"sign_of": "score"}),
        ("rec", {"clip_mode": "x"}),
        ("rec", {"weight": "x"}),
        ("rec", {"regularizer": "x"}),
    ]
    for name, arguments in wrong:
        if name in POLICY_LOSSES:
            with pytest.raises(ValueError, match=f"of policy loss {name} is unknown; use "):
                POLICY_LOSSES[name](batch(0), **arguments)
