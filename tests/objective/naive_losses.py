"""Policy losses computed from their formulas, token by token in double precision. No code is shared with the package.

A reference takes the sequences of a batch and its arguments, and returns one list of numbers per sequence.
"""

import math
from dataclasses import dataclass


@dataclass
class Sequence:
    """All data of a sequence, as plain lists; `mask` is true at action tokens.

    `still` are the log-probs where a formula says sg(): the same numbers as `new`, and no gradient.
    """

    new: list[float]
    still: list[float]
    old: list[float]
    advantages: list[float]
    mask: list[bool]
    rewards: list[float] | None
    ref: list[float]
    demonstration: bool
    step: int

    def geometric(self, new: list[float]) -> float:
        gaps = [n - o for n, o, m in zip(new, self.old, self.mask, strict=True) if m]
        return ratio(sum(gaps) / len(gaps), 0.0) if gaps else 1.0


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ratio(new: float, old: float) -> float:
    return math.exp(clip(new - old, -20, 20))


def surrogate(r: float, a: float, low: float, high: float, dual: float | None) -> float:
    value = min(a * r, a * clip(r, 1 - low, 1 + high))
    return -max(value, a * dual) if dual is not None and a < 0 else -value


def each(per_token):
    """Convert a reference for one action token to a reference for a batch."""

    def loss(sequences: list[Sequence], **arguments) -> list[list[float]]:
        return [
            [
                per_token(s, t, s.new[t], s.old[t], s.advantages[t], **arguments) if s.mask[t] else 0.0
                for t in range(len(s.new))
            ]
            for s in sequences
        ]

    return loss


@each
def importance_sampling(s, t, new, old, a):
    return -a * ratio(new, old)


@each
def ppo(s, t, new, old, a, clip_low=0.2, clip_high=0.2, dual_clip=3.0, ratio_type="token"):
    r = ratio(new, old) if ratio_type == "token" else s.geometric(s.new)
    return surrogate(r, a, clip_low, clip_high, dual_clip)


@each
def gspo(s, t, new, old, a, clip_low=3e-4, clip_high=4e-4):
    return surrogate(math.exp(new - s.still[t]) * s.geometric(s.still), a, clip_low, clip_high, None)


@each
def cispo(
    s, t, new, old, a, clip_low=1.0, clip_high=0.28,
    enable_mask_clip=False, mask_clip_range_low=1.0, mask_clip_range_high=0.28,
):  # fmt: skip
    r = ratio(s.still[t], old)
    if enable_mask_clip and ((a > 0 and r > 1 + mask_clip_range_high) or (a < 0 and r < 1 - mask_clip_range_low)):
        return 0.0
    return -a * clip(r, 1 - clip_low, 1 + clip_high) * new


@each
def sapo(s, t, new, old, a, tau_pos=1.0, tau_neg=1.05):
    tau = tau_pos if a > 0 else tau_neg
    x = tau * (ratio(new, old) - 1)
    return -a * 4 / tau * (1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x)))


@each
def sppo(s, t, new, old, a, epsilon=0.3):
    return -a * (new - old) if 1 / (1 + epsilon) <= ratio(new, old) <= 1 + epsilon else 0.0


@each
def sft(s, t, new, old, a):
    return -new


@each
def vanilla(s, t, new, old, a):
    return -a * new


@each
def opmd(s, t, new, old, a, tau=1.0):
    return -a * new / (1 + tau)


@each
def tis(s, t, new, old, a, lower_bound=0.0, upper_bound=1.0):
    return -clip(ratio(s.still[t], old), lower_bound, upper_bound) * a * new


@each
def topr(s, t, new, old, a, positive_weight=1.0, negative_weight=1.0, advantage_threshold=0.0, sign_of="advantage"):
    sign = s.rewards[t] if sign_of == "reward" and s.rewards else a
    alpha = positive_weight if sign > advantage_threshold else negative_weight * clip(ratio(s.still[t], old), 0, 1)
    return -alpha * a * new


@each
def kimi15(s, t, new, old, a, tau=0.1):
    return -a * new + tau / 2 * (new - old) ** 2


@each
def rec(
    s, t, new, old, a,
    clip_mode="none", epsilon_low=0.2, epsilon_high=0.2, epsilon_low_prime=0.6, epsilon_high_prime=2.0,
    weight="none", temp=1.0, regularizer="none", regularizer_coef=0.0,
):  # fmt: skip
    r = ratio(s.still[t], old)
    bounded = s.geometric(s.still) if clip_mode == "gspo-one-side" else r
    if clip_mode == "none":
        kept = True
    elif clip_mode in ("one-side", "gspo-one-side"):
        kept = bounded <= 1 + epsilon_high if a > 0 else bounded >= 1 - epsilon_low
        kept = kept or a == 0
    else:
        kept = 1 - epsilon_low <= r <= 1 + epsilon_high
        if clip_mode == "ring":
            kept = kept or (a >= 0 and r <= 1 - epsilon_low_prime) or (a <= 0 and r >= 1 + epsilon_high_prime)
    w = {"none": 1.0, "importance_sampling": r, "gspo_importance_sampling": s.geometric(s.still)}.get(weight)
    w = math.exp(a / temp) if w is None else w
    extra = {"none": 0.0, "forward-kl": -new, "k2": (new - old) ** 2}[regularizer]
    return -a * w * new * kept + regularizer_coef * extra


def mixed(own, expert):
    @each
    def loss(s, t, new, old, a, **arguments):
        return expert(s, t, new, **arguments) if s.demonstration else own(s, new, old, a, **arguments)

    return loss


mix = mixed(
    lambda s, new, old, a, mu=0.1, clip_low=0.2, clip_high=0.2, dual_clip=3.0: (
        (1 - mu) * surrogate(ratio(new, old), a, clip_low, clip_high, dual_clip)
    ),
    lambda s, t, new, mu=0.1, **_: -mu * new,
)


def chord(step, mu_warmup_steps=0, mu_decay_steps=0, mu_peak=0.1, mu_valley=0.1, **_):
    if step < mu_warmup_steps:
        return mu_peak * step / mu_warmup_steps
    after = step - mu_warmup_steps
    if after < mu_decay_steps:
        return mu_valley + (mu_peak - mu_valley) * 0.5 * (1 + math.cos(math.pi * after / mu_decay_steps))
    return mu_valley


mix_chord = mixed(
    lambda s, new, old, a, clip_low=0.2, clip_high=0.2, dual_clip=3.0, **rest: (
        (1 - chord(s.step, **rest)) * surrogate(ratio(new, old), a, clip_low, clip_high, dual_clip)
    ),
    lambda s, t, new, enable_phi_function=True, **rest: (
        -chord(s.step, **rest)
        * new
        * (math.exp(s.still[t]) * (1 - math.exp(s.still[t])) if enable_phi_function else 1.0)
    ),
)


def dpo(sequences: list[Sequence], beta=0.1, label_smoothing=0.0) -> list[list[float]]:
    rows = []
    for chosen, rejected in zip(sequences[::2], sequences[1::2], strict=True):
        gaps = [sum(n - r for n, r, m in zip(s.new, s.ref, s.mask, strict=True) if m) for s in (chosen, rejected)]
        h = beta * (gaps[0] - gaps[1])

        def minus_log_sigmoid(x: float) -> float:
            return math.log1p(math.exp(-x)) if x > 0 else -x + math.log1p(math.exp(x))

        value = (1 - label_smoothing) * minus_log_sigmoid(h) + label_smoothing * minus_log_sigmoid(-h)
        rows += [[value * m for m in s.mask] for s in (chosen, rejected)]
    return rows


def outside(name: str, s: Sequence, t: int, **arguments) -> bool:
    """Return whether the ratio of a token is outside the bounds in the formula of the loss."""
    r, a, sign = ratio(s.new[t], s.old[t]), s.advantages[t], s.rewards
    low, high = arguments.get("clip_low"), arguments.get("clip_high")
    if name == "gspo" or arguments.get("ratio_type") == "sequence":
        r = s.geometric(s.new)
    if name in ("ppo", "gspo", "cispo", "mix", "mix_chord"):
        return not 1 - low <= r <= 1 + high
    if name == "tis":
        return not arguments["lower_bound"] <= r <= arguments["upper_bound"]
    if name == "topr":
        tapered = (sign[t] if arguments["sign_of"] == "reward" and sign else a) <= arguments["advantage_threshold"]
        return tapered and r > 1
    if name == "sppo":
        return not 1 / (1 + arguments["epsilon"]) <= r <= 1 + arguments["epsilon"]
    if name == "rec":
        pull = {**arguments, "weight": "none", "regularizer": "none"}
        probe = Sequence([1.0], [s.still[t]], [s.old[t]], [a], [True], None, [0.0], False, 1)
        if arguments["clip_mode"] == "gspo-one-side":
            return not (
                (a >= 0 and s.geometric(s.new) <= 1 + arguments["epsilon_high"])
                or (a <= 0 and s.geometric(s.new) >= 1 - arguments["epsilon_low"])
            )
        return a != 0 and rec([probe], **pull)[0][0] == 0
    return False


REFERENCES = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "sppo": sppo,
    "sft": sft,
    "vanilla": vanilla,
    "opmd": opmd,
    "tis": tis,
    "topr": topr,
    "kimi15": kimi15,
    "rec": rec,
    "mix": mix,
    "mix_chord": mix_chord,
    "dpo": dpo,
}

# more than the defaults, which every loss is tried with anyway
ARGUMENTS: dict[str, list[dict]] = {
    "ppo": [
        {"clip_low": 0.1, "clip_high": 0.4},
        {"clip_low": 0.0, "clip_high": 0.0, "dual_clip": 1.1},
        {"dual_clip": None},
        {"ratio_type": "sequence"},
        {"ratio_type": "sequence", "dual_clip": None, "clip_high": 0.05},
    ],
    "gspo": [{"clip_low": 0.1, "clip_high": 0.2}],
    "cispo": [
        {"clip_low": 0.1, "clip_high": 0.1},
        {"enable_mask_clip": True, "mask_clip_range_low": 0.2, "mask_clip_range_high": 0.1},
    ],
    "sapo": [{"tau_pos": 0.7, "tau_neg": 3.0}],
    "sppo": [{"epsilon": 0.05}],
    "opmd": [{"tau": 0.2}],
    "tis": [{"lower_bound": 0.5, "upper_bound": 1.4}],
    "topr": [{"positive_weight": 0.3, "negative_weight": 2.0, "advantage_threshold": 0.7}, {"sign_of": "reward"}],
    "kimi15": [{"tau": 1.0}],
    "rec": [
        *[{"clip_mode": mode} for mode in ("two-side", "one-side", "gspo-one-side", "ring")],
        *[{"weight": weight} for weight in ("importance_sampling", "gspo_importance_sampling")],
        {"weight": "advantage", "temp": 2.0},
        {"regularizer": "k2", "regularizer_coef": 0.2},
        {"regularizer": "forward-kl", "regularizer_coef": 0.2},
        {
            "clip_mode": "ring", "epsilon_low": 0.05, "epsilon_high": 0.1, "epsilon_low_prime": 0.2,
            "epsilon_high_prime": 0.3, "weight": "importance_sampling", "regularizer": "k2", "regularizer_coef": 1.0,
        },
    ],
    "mix": [{"mu": 0.6, "clip_high": 0.3, "dual_clip": None}],
    "mix_chord": [
        {"mu_warmup_steps": 10, "mu_peak": 0.9},
        {"mu_warmup_steps": 1, "mu_decay_steps": 8, "mu_peak": 0.9, "mu_valley": 0.2},
        {"enable_phi_function": False},
    ],
    "dpo": [{"beta": 2.0}, {"label_smoothing": 0.1}],
}  # fmt: skip
CASES = [(name, arguments) for name in REFERENCES for arguments in ({}, *ARGUMENTS.get(name, []))]
