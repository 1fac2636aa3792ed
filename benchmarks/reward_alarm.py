"""Error rates of the alarm for a lost gain, by simulation: false alarms, detection, and the most powerful test.

    python benchmarks/reward_alarm.py [--runs N]  # tables of false alarms, and of detection with the bounds
    python benchmarks/reward_alarm.py --limit    # the evidence that healthy runs reach: `least_evidence` lies above

A reward is 0 or 1. A prompt's probability of a 1 is drawn from Beta(p, 1 - p), where p is the curve's value, so that
the samples of a prompt are correlated. The bound is the power of the Neyman-Pearson test that knows the curve, the step
at which to test and the noise: the distance of the losing curve from the nearest rising or level one (isotonic
regression), in standard errors, less the 1 % quantile.
"""

import argparse
import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from roll_opd.extras.alarm.significance import is_due, least_evidence, lost_gain

FALSE_ALARMS = 0.01
SAMPLES = 4
BATCH = 250  # runs, for memory

HEALTHY: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # of the step number
    "level": lambda n: 0.25 + 0.0 * n,
    "rising": lambda n: 0.25 + 0.2 * n / len(n),
    "a small gain, level": lambda n: 0.25 + 0.1 * np.minimum(n / 20, 1),
    "a gain, level": lambda n: 0.25 + 0.2 * np.minimum(n / 20, 1),
    "a slow gain, level": lambda n: 0.25 + 0.2 * np.minimum(n / 100, 1),
    "a large gain, level": lambda n: 0.25 + 0.4 * np.minimum(n / 20, 1),
    "saturating": lambda n: 0.95 - 0.7 * np.exp(-8 * n / len(n)),
}


def losing(steps: int, gain: float, form: str, start: float = 0.25, risen: float = 0.3) -> np.ndarray:
    """Return [T] a curve that rises in the first `risen` of the run, is level until half of the run, and then loses
    half of the gain."""
    share = np.arange(steps) / steps
    fallen = {"suddenly": share >= 0.5, "in a quarter": np.clip((share - 0.5) * 4, 0, 1), "slowly": (share - 0.5) * 2}
    return start + gain * (np.minimum(share / risen, 1) - 0.5 * np.maximum(fallen[form], 0))


def rewards(rng: np.random.Generator, curve: np.ndarray, runs: int, prompts: int) -> np.ndarray:
    """Return f64 [runs, T] mean rewards of `prompts` x `SAMPLES`: beta-binomial draws."""
    p = np.clip(curve, 1e-9, 1 - 1e-9)[:, None]
    hits = np.arange(SAMPLES + 1)
    rising = np.cumprod(np.concatenate([np.ones_like(p), p + hits[:-1]], 1), 1)
    falling = np.cumprod(np.concatenate([np.ones_like(p), 1 - p + hits[:-1]], 1), 1)[:, ::-1]
    factorials = np.array([math.factorial(int(k)) for k in hits])
    chances = rising * falling / (factorials * factorials[::-1])
    drawn = rng.multinomial(prompts, chances / chances.sum(1, keepdims=True), (runs, len(curve)))
    return drawn @ hits / (prompts * SAMPLES)


def evidence(values: np.ndarray) -> dict[int, np.ndarray]:
    """Return, for the number of steps at each test, the evidence [R] of a lost gain in the runs [R, T]."""
    batches = [values[at : at + BATCH] for at in range(0, len(values), BATCH)]
    due = filter(is_due, range(values.shape[1] + 1))
    return {steps: np.concatenate([lost_gain(batch[:, :steps]).evidence for batch in batches]) for steps in due}


def sounded(values: np.ndarray) -> float:
    """Return the share of the runs [R, T] with an alarm."""
    found = [array > least_evidence(steps) for steps, array in evidence(values).items()]
    return float(np.any(found, axis=0).mean())


def bound(curve: np.ndarray, prompts: int) -> float:
    """Return the power of the most powerful test of `curve` [T] against rising and level curves."""
    weights = prompts / (curve * (1 - curve) * (1 / 2 + 1 / (2 * SAMPLES)))  # 1 / variance of a step
    distance = math.sqrt((weights * (curve - isotonic(curve, weights)) ** 2).sum())
    return NormalDist().cdf(distance - NormalDist().inv_cdf(1 - FALSE_ALARMS))


def isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return [T] the nearest curve that never falls, by weighted least squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, steps
    for block in zip(values, weights, (1,) * len(values), strict=True):
        blocks.append(block)
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (mean, weight, steps), (mean2, weight2, steps2) = blocks.pop(), blocks.pop()
            total = weight + weight2
            blocks.append(((mean * weight + mean2 * weight2) / total, total, steps + steps2))
    return np.concatenate([np.full(steps, mean) for mean, _, steps in blocks])


def print_limit(rng: np.random.Generator, runs: int) -> None:
    """Print, for healthy runs of 500 steps, the evidence that 0.1, 0.2 and 0.4 % of them exceed in each doubling."""
    for prompts in (16, 64):
        for name, curve in HEALTHY.items():
            found = evidence(rewards(rng, curve(np.arange(500)), runs, prompts))
            for first, last in ((0, 48), (48, 96), (96, 192), (192, 500)):
                most = np.max([array for steps, array in found.items() if first < steps <= last], axis=0)
                most = np.maximum(most, -9)  # -inf if no fall was found
                shown = " ".join(f"{np.quantile(most, 1 - share):6.2f}" for share in (0.001, 0.002, 0.004))
                print(f"{prompts:3} x {SAMPLES}  {name:20} steps {first:3} to {last}: {shown}", flush=True)


def print_tables(rng: np.random.Generator, runs: int) -> None:
    """Print the share of healthy runs with an alarm, and of losing runs, with the bound."""
    print("| healthy run | prompts | " + " | ".join(f"{steps} steps" for steps in (30, 60, 100, 200, 500)) + " |")
    for name, curve in HEALTHY.items():
        for prompts in (16, 64):
            shares = [sounded(rewards(rng, curve(np.arange(n)), runs, prompts)) for n in (30, 60, 100, 200, 500)]
            print(f"| {name} | {prompts} | " + " | ".join(f"{share:.2%}" for share in shares) + " |", flush=True)
    print("| prompts | steps | gain | " + " | ".join(("suddenly", "in a quarter", "slowly")) + " |")
    for prompts in (16, 64):
        for steps in (60, 100, 200, 400):
            for gain in (0.2, 0.4, 0.7):
                curves = [losing(steps, gain, form) for form in ("suddenly", "in a quarter", "slowly")]
                cells = [
                    f"{sounded(rewards(rng, c, runs // 4, prompts)):.2f} of {bound(c, prompts):.2f}" for c in curves
                ]
                print(f"| {prompts} | {steps} | {gain} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", action="store_true", help="derive the limits")
    parser.add_argument("--runs", type=int, default=1000, help="simulated runs of each kind")
    args = parser.parse_args()
    (print_limit if args.limit else print_tables)(np.random.default_rng(0), args.runs)


if __name__ == "__main__":
    main()
