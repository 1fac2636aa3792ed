"""Estimate the seconds of each part of a step from the rates of a card, before any run.

A pass takes the longer of two times: its FLOPs at the rate of the devices, and its bytes at their bandwidth. Prompts
and responses have their greatest length. A prompt is computed once for all of its answers, and decoding reads the
weights and the KV cache once per token.

These are not counted: rewards, validation, communication between devices, the optimizer, moves of roles that share
devices, recomputed layers, the driver, and queueing if the KV cache does not fit.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roll_opd.base.failures import ConfigError
from roll_opd.base.hardware import CARDS, Card
from roll_opd.config.plan import CriticPlan, FilePlan, MegatronPlan, RolloutPlan, RunPlan
from roll_opd.extras.advice.async_advice import Work
from roll_opd.models.flops import TRAINED, TRAINED_ADAPTERS, forward_flops, keys_seen, sequence_flops
from roll_opd.models.memory import BYTES
from roll_opd.models.model_info import ModelInfo, read_model

FLOPS_SHARE = 0.4  # an update on an H100 reaches 393 to 404 of 989 TFLOP/s (benchmarks/gpu_runs.md)
BANDWIDTH_SHARE = 0.6  # assumed: less than a copy, which reaches 3.0 of 3.35 TB/s on an H100 (benchmarks/gpu_runs.md)


@dataclass(frozen=True)
class Rates:
    """FLOP/s and bytes/s of a group of devices."""

    flops: float
    bandwidth: float

    def seconds(self, flops: float, moved: float) -> float:
        """Return the time of a pass with these FLOPs and bytes."""
        return max(flops / self.flops, moved / self.bandwidth)


def rates(card: Card, devices: int) -> Rates:
    """Return the rates that `devices` cards reach together."""
    return Rates(devices * card.flops * FLOPS_SHARE, devices * card.bandwidth * BANDWIDTH_SHARE)


def read_bytes(info: ModelInfo, size: int, tokens: float) -> float:
    """Return the bytes of weights that a pass over `tokens` tokens reads, with `size` bytes per weight.

    Of each layer's experts, it reads the expected number of distinct ones if every token chooses its experts at random.
    """
    each = 3 * info.hidden * info.expert_intermediate
    unread = (1 - info.experts_per_token / info.experts) ** tokens if info.experts else 0.0
    looked_up = 0 if info.tied else info.vocab * info.hidden  # of the embedding, a token reads one row
    return size * (info.parameters - looked_up - info.expert_layers * info.experts * each * unread)


def generation_seconds(
    info: ModelInfo, size: int, of_engine: Rates, tp: int, *, answers: int, runs: int, slots: int, prompt: int, new: int
) -> dict[str, float]:
    """Return the seconds of prefill and decoding on one engine.

    Args:
        size: bytes of a weight and of an element of the KV cache.
        of_engine: rates of the engine's devices.
        tp: number of the engine's devices.
        answers: number of answers that the engine samples, at most `slots` at a time.
        runs: number of answers to a prompt.
        prompt, new: numbers of tokens of a prompt and of an answer.
    """
    prompts, later = math.ceil(answers / runs), new - 1  # the last token is sampled and not read
    flops = prompts * sequence_flops(info, prompt, 1)
    prefill = of_engine.seconds(flops, read_bytes(info, size, prompts * prompt))
    windows = info.windows or (0,)
    seen = sum(keys_seen(prompt, prompt + later, window) for window in windows) / len(windows)
    state = 2 * later * info.state_elements(tp)  # read and written
    of_answer = tp * size * (info.cached_elements(tp) * seen + state)
    flops = forward_flops(info, later, lambda window: keys_seen(prompt, prompt + later, window), later)
    decode = sum(
        of_engine.seconds(running * flops, later * read_bytes(info, size, running) + running * of_answer)
        for running in (min(slots, answers - start) for start in range(0, answers, slots))
    )
    return {"generate: prefill": prefill, "generate: decode": decode}


@dataclass(frozen=True)
class Estimate:
    """The seconds of the parts of a step, and the origin of the rates."""

    heading: str
    parts: Mapping[str, Mapping[str, float]]  # cost of `--costs` -> part -> seconds; costs without a rate are missing
    costs: Mapping[str, float]  # cost of `--costs` -> seconds per step


def estimate(plan: RunPlan, card_name: str, work: Work) -> Estimate:
    """Return the estimate for the configuration's devices, if these are cards with the name `card_name`.

    Every teacher scores every sequence. Teachers without a common device compute at the same time. `work` has the slots
    of the engines. Raises ConfigError for an unknown card, a role in fp32, and a plan whose requests are not known.
    """
    if card_name not in CARDS:
        raise ConfigError([f"--card: the rates of {card_name!r} are not known; known cards: {', '.join(CARDS)}"])
    card, rollout, student, answers = CARDS[card_name], plan.rollout, plan.student, plan.sequences_per_step
    if rollout is None or plan.workflow or plan.is_agentic:
        raise ConfigError([f"--card: the requests of a step of the {plan.kind} pipeline are not known; give --costs"])
    roles: dict[str, MegatronPlan | RolloutPlan] = {**plan.megatron_roles(), rollout.name: rollout}
    if slow := [name for name, role in roles.items() if role.model.dtype == "fp32"]:
        raise ConfigError(
            [f"--card: the rates are those of bf16, but {', '.join(slow)} has model_args.dtype fp32; set bf16"]
        )
    models = {name: read_model(Path(role.model.path)) for name, role in roles.items()}
    prompt, new = plan.data.prompt_length, rollout.sampling.max_new_tokens

    def forward(role: MegatronPlan, rows: int, before: int = prompt) -> float:
        """Return the seconds of a forward pass over `rows` sequences of `before` + `new` tokens."""
        predicted = 0 if isinstance(role, CriticPlan) else new
        copies = role.layout.dp * role.layout.cp  # each of them reads the weights
        return rates(card, len(plan.serving(role).devices)).seconds(
            rows * sequence_flops(models[role.name], before + new, predicted),
            copies * read_bytes(models[role.name], BYTES[role.model.dtype], rows * (before + new) / copies),
        )

    parts = {
        "generate": generation_seconds(
            models[rollout.name],
            BYTES[rollout.model.dtype],
            rates(card, rollout.tp),
            rollout.tp,
            answers=-(-answers // plan.training_engines),
            runs=plan.answers_per_prompt,
            slots=max(1, work.slots // plan.training_engines),
            prompt=prompt,
            new=new,
        )
    }
    scorers = [(t.role, t.context.prompt_length if t.context else prompt) for t in plan.teachers if t.role]
    scorers += [(plan.reference, prompt)] if plan.reference else []
    parts["teacher"] = scoring = {role.name: forward(role, answers, before) for role, before in scorers}
    busy = Counter[int]()
    for role, _ in scorers:
        busy.update(dict.fromkeys(plan.serving(role).devices, scoring[role.name]))
    epochs, rows = plan.objective.ppo_epochs, plan.demonstrations.rows_per_step if plan.demonstrations else 0
    passes = epochs * (TRAINED_ADAPTERS if student.lora else TRAINED)
    parts["train"] = {student.name: passes * forward(student, answers + rows)}
    if plan.objective.recompute_old_logprobs or answers > student.mini_batch_sequences:
        parts["train"]["old_logprobs"] = forward(student, answers)
    if critic := plan.critic:
        parts["train"][critic.name] = (1 + critic.critic_epochs * TRAINED) * forward(critic, answers)
    sent = BYTES[student.model.dtype] * models[student.name].parameters
    parts["weight_sync"] = {"weights": rates(card, 1).seconds(0, 2 * sent)}  # read and written in a device's memory
    costs = {name: sum(found.values()) for name, found in parts.items()}
    costs["teacher"] = max(busy.values(), default=0.0)
    if not all(teacher.role or isinstance(teacher.source, FilePlan) for teacher in plan.teachers):
        del costs["teacher"]  # a server has no stated rate
    return Estimate(
        f"estimated from stated rates of {card_name} ({FLOPS_SHARE:.0%} of peak FLOP/s, {BANDWIDTH_SHARE:.0%} of"
        " bandwidth), not measured",
        parts,
        costs,
    )
