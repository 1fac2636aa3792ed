"""With a teacher that seldom ends its answers the student's answers grow to the limit; an alarm is given before."""

import random
from collections.abc import Mapping
from functools import partial
from statistics import median

import torch
from lab import Arm, Method, Step
from loop import Loop, policy_loss
from make_chains import BATCH, Task, chain, held_out_questions, make_batch, questions, right_answer
from results import Panel, Runs
from torch import Tensor

from roll_opd.extras.alarm.divergence_alarm import LENGTH, REWARD, TRUNCATED, DivergenceAlarm

DIGITS, LIMIT, STEPS = 4, 16, 150  # of an answer; tokens of a longest answer; of a run
SAMPLES = 64  # of a step
START_STEPS = 200  # of supervised training before a run
ENDED = 5  # one in so many batches of the teacher's training ends after `DIGITS`; the others go on without an end


def learn_ends(engine: Loop, task: Task, every: int, wraps_known: bool) -> None:
    """Train the student, from the teacher's weights, on chains; one in `every` batches ends after `DIGITS` digits."""
    rng = random.Random(task.seed)
    engine.student.load_state_dict(engine.teacher.state_dict())
    for step in range(START_STEPS):
        length, end = (LIMIT, "") if step % every else (DIGITS, engine.tokenizer.eos_token)
        chains = [chain(task, length, rng, wraps_known) for _ in range(BATCH)]
        rate = 3e-3 * (1 - step / START_STEPS)
        engine.fit([question for question, _ in chains], [answer + end for _, answer in chains], rate)


def answered(engine: Loop, task: Task, asked: list[str], greedy: bool) -> tuple[Tensor, Tensor]:
    """Sample answers; return which tokens are part of them, bool [B, A], and which answers are right, f32 [B].

    An answer is right if it has all digits of the chain and then an end.
    """
    end = engine.tokenizer.eos_token
    texts = engine.sample(asked, LIMIT, greedy)
    pairs = zip(texts, asked, strict=True)
    right = [text.startswith(right_answer(task, question, DIGITS) + end) for text, question in pairs]
    end_BA = engine.rollout.answers_BA == engine.tokenizer.eos_token_id
    return end_BA.cumsum(1) - end_BA.int() == 0, torch.tensor(right, dtype=torch.float32)


def measured(engine: Loop, task: Task, arm: Arm) -> dict[str, float]:
    """Measure the accuracy of answers that end."""
    return {"accuracy": round(float(answered(engine, task, held_out_questions(task), greedy=True)[1].mean()), 4)}


def distilled(reference: float = 0.0, mixture: bool = False) -> Method:
    """Return the method of OPD from a teacher that seldom ends its answers.

    Args:
        reference: coefficient of the KL to the first student.
        mixture: whether a half of the samples are right answers with an end, for supervised fine-tuning.
    """

    def begin(engine: Loop, task: Task, arm: Arm, drawn: random.Random) -> Step:
        engine.start_from("seldom ends", partial(learn_ends, engine, task, ENDED, True))
        teacher = engine.model_of(engine.start)
        engine.start_from("always ends", partial(learn_ends, engine, task, 1, False))
        first, rates = engine.model_of(engine.start), arm.rates()
        alarm, warnings = DivergenceAlarm(is_itself=False), list[str]()

        def step() -> dict[str, float]:
            given = SAMPLES // 2 if mixture else 0
            asked = questions(task, SAMPLES, drawn.randrange(10**9))
            mask_BA, right_B = answered(engine, task, asked[given:], greedy=False)
            student_BA = engine.logprobs(engine.student)
            with torch.no_grad():
                teacher_BA, first_BA = engine.logprobs(teacher), engine.logprobs(first)
            now_BA = student_BA.detach()
            advantages_BA = teacher_BA - now_BA - reference * (now_BA - first_BA)
            # the loss is a mean over all places, so this makes it a mean over the answers' tokens
            loss = policy_loss(student_BA, advantages_BA * mask_BA * (mask_BA.numel() / mask_BA.sum()))
            if given:
                end = engine.tokenizer.eos_token
                rows = [(question, right_answer(task, question, DIGITS) + end) for question in asked[:given]]
                ids, labels = make_batch(engine.tokenizer, rows)
                loss = (loss + engine.student(input_ids=ids, labels=labels).loss) / 2
            engine.minimise(loss, next(rates))
            length = float(mask_BA.sum(1).float().mean())
            ended_BA = engine.rollout.answers_BA == engine.tokenizer.eos_token_id
            cut, reward = 1 - float(ended_BA.any(1).float().mean()), float(right_B.mean())
            warnings.extend(
                text
                for text in alarm.after({REWARD: reward, LENGTH: length, TRUNCATED: cut})
                if text.startswith((LENGTH, TRUNCATED))
            )
            tokens = int(mask_BA.sum()) + given * (DIGITS + 1)
            after = float(bool(warnings))  # the mean over steps is the share of the steps after the first alarm
            return {"samples": SAMPLES, "tokens": tokens, "length": length, "truncated": cut, "alarm": after}

        return step

    return begin


METHODS = {"plain": distilled(), "both": distilled(reference=1.0, mixture=True)}
ARMS = {
    name: Arm(method, STEPS, DIGITS, bar=2.0, learning_rate=5e-4, measure=measured) for name, method in METHODS.items()
}
PANELS = {
    "right answers that end": Panel(tuple(ARMS)),
    "share of samples": Panel(tuple(ARMS), y="truncated"),
}


def first_above(runs: Runs, arm: str, share: float) -> list[int]:
    """Return the first validation since whose predecessor a larger share was truncated, or one more than the last."""
    rows = ([row for row in run["curve"] if "truncated" in row] for run in runs.of(arm))
    return [next((row["step"] for row in run if row["truncated"] > share), run[-1]["step"] + 1) for run in rows]


def figures(runs: Runs) -> dict[str, float]:
    """Return medians over the seeds: last accuracy, truncated share and length, and the steps of alarm and collapse."""
    found: dict[str, float] = {}
    for arm in ARMS:
        found[f"{arm} accuracy"] = median(runs.last(arm))
        found[f"{arm} best accuracy"] = median(runs.best(arm))
        found[f"{arm} truncated"] = round(median(runs.last(arm, "truncated")), 3)
        found[f"{arm} length"] = round(median(runs.last(arm, "length")), 1)
        found[f"{arm} alarm"] = median(runs.alarm_steps(arm))
        found[f"{arm} above a half"] = median(first_above(runs, arm, 0.5))
    found["alarms before a half"] = sum(
        alarm < above for alarm, above in zip(runs.alarm_steps("plain"), first_above(runs, "plain", 0.5), strict=True)
    )
    return found


def holds(found: Mapping[str, float]) -> dict[str, bool]:
    """Return the inequalities of the claim."""
    return {
        "plain: more than a half of the answers are truncated": found["plain truncated"] > 0.5,
        "plain: the alarm is given before, with each seed": found["alarms before a half"] >= 3,
        "both: less than a tenth of the answers are truncated": found["both truncated"] < 0.1,
        "both: no alarm": found["both alarm"] > STEPS,
        "both: the accuracy is higher than with plain": found["both accuracy"] > found["plain accuracy"],
    }
