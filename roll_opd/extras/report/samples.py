"""Select and shorten the samples of a report.

The samples have the recorded values of each token.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from roll_opd.extras.report.curves import mean, spread
from roll_opd.extras.report.run_files import StepLines, number
from roll_opd.extras.report.text import limited, rounded

STEPS, SAMPLES_PER_STEP = 8, 6
PROMPTS = 8  # maximum number of held-out prompts, each with answers of several steps
TOKENS = 40_000  # maximum tokens over all samples and answers; each takes about 70 bytes in the page
CHARACTERS = 3000  # maximum characters of a prompt
DIGITS = 4
STUDENT = "student"  # default of `by`, which names the model that answered a held-out prompt
CLOSE = 0.1  # nats; the two probabilities then differ by less than a tenth
_BOUNDS = (0.01, 0.1, 0.3, 1.0, 3.0)
EDGES = (-float("inf"), *(-bound for bound in reversed(_BOUNDS)), *_BOUNDS, float("inf"))


def chosen_samples(lines: StepLines) -> list[dict[str, Any]]:
    """Return recorded samples of at most `STEPS` steps.

    The steps are evenly spaced from the first to the last.
    """
    found: list[dict[str, Any]] = []
    for step in spread(lines.steps, STEPS):
        found += list(lines.rows([step]))[:SAMPLES_PER_STEP]
    return found


def answers_by_prompt(lines: StepLines) -> list[list[dict[str, Any]]]:
    """Return a list of answers for each held-out prompt.

    The student's answers at the first, the middle and the last step come first. The teachers' answers follow.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in lines.rows(spread(lines.steps, 3)):
        prompt = str(row.get("id")).rpartition("#")[0] or str(row.get("prompt"))  # without draw and sample number
        groups.setdefault(prompt, []).append(row)
    return [sorted(group, key=lambda row: row.get("by") != STUDENT) for group in list(groups.values())[:PROMPTS]]


def fair_limit(lengths: Sequence[int], budget: int = TOKENS) -> int:
    """Return the maximum number of tokens to show of each sample.

    It is the largest limit for which all shown samples together have at most `budget` tokens.
    """
    left, rest = budget, sorted(lengths)
    while rest and rest[0] * len(rest) <= left:
        left -= rest.pop(0)
    return left // len(rest) if rest else budget


def length_of(row: Mapping[str, Any]) -> int:
    """Return the number of tokens of a recorded response."""
    tokens, prompt_length = row.get("tokens"), row.get("prompt_length")
    if isinstance(tokens, list) and isinstance(prompt_length, int) and 0 <= prompt_length <= len(tokens):
        return len(tokens) - prompt_length
    return 0


def shaped(row: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Return a recorded sample as data for the page.

    A sample with more than `limit` tokens is shortened to its beginning and its end. `values` in the result has the
    log-probs (`student`, `rollout`, `reference`, `teacher/NAME`) and the `advantage` of each token; a missing value is
    null. A sample without recorded token ends becomes one piece of text without values.
    """
    length, response = length_of(row), str(row.get("response") or "")
    ends = _ends(row.get("token_ends"), length, response)
    head = limit - limit // 3 if length > limit else length
    if ends is None:
        pieces, kept = [limited(response, CHARACTERS)], []
    else:
        kept = [*range(head), *range(length - (min(length, limit) - head), length)]
        pieces = [limited(response[ends[place - 1] if place else 0 : ends[place]]) for place in kept]
    columns = {name: [_short(values[place]) for place in kept] for name, values in _columns(row, length).items()}
    acted, sampled = _acted(row, length), listed(row.get("tokens"))[-length:]
    reward = number(row.get("reward"))
    return {
        "step": row.get("step"),
        "by": limited(row.get("by") or STUDENT),
        "id": limited(row.get("id")),
        "tag": limited(row.get("tag")),
        "prompt": limited(row.get("prompt"), CHARACTERS),
        "truth": limited(row.get("ground_truth"), CHARACTERS),
        "reward": None if reward is None else rounded(reward, DIGITS),
        "reason": limited(row.get("reward_reason")),
        "finish": limited(row.get("finish_reason")),
        "behind": _behind(row),
        "length": length,
        "acted": sum(acted),
        "turn_rewards": _turn_rewards(row, acted),
        "turns": _turns(acted, kept),
        "pieces": pieces,
        "ids": [token if isinstance(token := sampled[place], int) else None for place in kept],
        "values": columns if kept else {},
        "cuts": {limited(name): _cut(cut, length, kept) for name, cut in _dict(row.get("teacher_cuts")).items()},
        "masked": _masked(row, length, kept),
        "observed": [shown for shown, place in enumerate(kept) if not acted[place]],
        "cut": {"at": head, "count": length - limit} if ends is not None and length > limit else None,
    }


def reverse_kl(row: Mapping[str, Any]) -> list[float]:
    """Return log p(student) - log p(teacher) of each action token.

    The result is for all teachers of the sample, one after the other.
    """
    columns = _columns(row, length_of(row))
    student = columns.get("student", [])
    return [
        own - other
        for name, teacher in columns.items()
        if name.startswith("teacher/")
        for own, other in zip(student, teacher, strict=False)
        if own is not None and other is not None
    ]


def agreement(lines: StepLines, steps: Sequence[int]) -> dict[str, Any] | None:
    """Return statistics of the reverse KL over the tokens recorded in `steps`.

    The result is None if no teacher log-probs were recorded.
    """
    rows = list(lines.rows(spread(list(steps), 25)))
    gaps = [gap for row in rows for gap in reverse_kl(row)]
    if not gaps:
        return None
    hits = [hit for row in rows for hit in _hits(row)]
    counts = [sum(low <= gap < high for gap in gaps) for low, high in itertools.pairwise(EDGES)]
    return {
        "from": min(steps),
        "to": max(steps),
        "tokens": len(gaps),
        "mean": rounded(mean(gaps), DIGITS),
        "close": rounded(sum(abs(gap) < CLOSE for gap in gaps) / len(gaps), DIGITS),
        "bins": [rounded(count / len(gaps), DIGITS) for count in counts],
        "topk": rounded(sum(map(bool, hits)) / len(hits), DIGITS) if hits else None,
    }


def _columns(row: Mapping[str, Any], length: int) -> dict[str, list[float | None]]:
    """Return the recorded columns of a sample, with one value for each response token.

    The value of an observed token is None.
    """
    sampled, trained = row.get("rollout_logprobs"), row.get("student_logprobs")
    by = limited(row.get("by") or STUDENT)  # the model whose log-probs the sampler recorded
    given = {
        **({"student": trained, "rollout": sampled} if trained else {by: sampled}),
        **{f"teacher/{limited(name)}": values for name, values in _dict(row.get("teacher_logprobs")).items()},
        "reference": row.get("ref_logprobs"),
        "advantage": row.get("advantages"),
    }
    complete = {name: values for name, values in given.items() if isinstance(values, list) and len(values) == length}
    acted = _acted(row, length)
    return {
        name: [number(value) if acts else None for value, acts in zip(values, acted, strict=True)]
        for name, values in complete.items()
        if values
    }


def _acted(row: Mapping[str, Any], length: int) -> list[bool]:
    """Return the mask of the action tokens in the response.

    If no mask was recorded, all tokens are action tokens.
    """
    mask = listed(row.get("action_mask"))
    return [bool(acts) for acts in mask] if len(mask) == length else [True] * length


def _hits(row: Mapping[str, Any]) -> list[Any]:
    """Return, for each action token, whether it is in the teacher's top-k.

    The result is for all teachers of the sample, one after the other.
    """
    length = length_of(row)
    acted = _acted(row, length)
    columns = [listed(column) for column in _dict(row.get("teacher_topk_hits")).values()]
    return [hit for column in columns if len(column) == length for hit in itertools.compress(column, acted)]


def _turns(acted: Sequence[bool], kept: Sequence[int]) -> list[list[int]]:
    """Return [first token, kind, turn number] for each sequence of shown tokens that belong together.

    Such a sequence has tokens of one kind and no gap. The kind is 1 for action tokens and 0 for observed tokens.
    """
    turns: list[list[int]] = []
    number = 0
    shown = {place: at for at, place in enumerate(kept)}
    for place, acts in enumerate(acted):
        begins = not place or acted[place - 1] != acts
        number += begins and acts
        if place in shown and (begins or place - 1 not in shown):
            turns.append([shown[place], int(acts), number])
    return turns


def _turn_rewards(row: Mapping[str, Any], acted: Sequence[bool]) -> list[float | None]:
    """Return the reward of each turn.

    The result is empty if the number of rewards is not the number of turns.
    """
    rewards = listed(row.get("turn_rewards"))
    turns = sum(acts and not before for before, acts in itertools.pairwise([False, *acted]))
    return [_short(number(reward)) for reward in rewards] if len(rewards) == turns else []


def _ends(given: Any, length: int, response: str) -> list[int] | None:
    """Return the end offset of each token in the response text.

    The result is None if the offsets were not recorded or do not fit the text.
    """
    if not isinstance(given, list) or len(given) != length or not all(isinstance(end, int) for end in given):
        return None
    if given != sorted(given) or (given and (given[0] < 0 or given[-1] != len(response))):
        return None
    return given


def _masked(
    row: Mapping[str, Any], length: int, kept: Sequence[int], names: Sequence[str] = ("action_mask", "loss_mask")
) -> list[int]:
    """Return the indices of shown tokens that the loss excludes.

    Args:
        kept: positions of the shown tokens in the response.
    """
    masks = [mask for name in names if len(mask := listed(row.get(name))) == length]
    return [shown for shown, place in enumerate(kept) if not all(mask[place] for mask in masks)]


def _cut(given: Any, length: int, kept: Sequence[int]) -> list[list[Any] | None]:
    """Return the chunk of each shown token; None for a token that belongs to no chunk.

    A chunk stores how many student tokens it covers, and the text of each teacher token.
    """
    by_token: dict[int, list[Any]] = {}
    for chunk in listed(given):
        if isinstance(chunk, list) and len(chunk) == 3 and all(isinstance(one, int) for one in chunk[:2]):
            first, count, pieces = chunk
            texts = [limited(piece) for piece in listed(pieces)]
            by_token |= {place: [count, texts] for place in range(max(first, 0), min(first + count, length))}
    return [by_token.get(place) for place in kept]


def _behind(row: Mapping[str, Any]) -> int | None:
    """Return the age of the oldest weights that sampled a training row, in updates; None if unknown."""
    step = row.get("step")
    runs = [run for run in listed(row.get("versions")) if isinstance(run, list) and run]
    versions = [run[0] for run in runs if isinstance(run[0], int)]
    return step - 1 - min(versions) if "by" not in row and isinstance(step, int) and versions else None


def _short(value: float | None) -> float | None:
    return None if value is None else rounded(value, DIGITS)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    """Return a value that is a list; an empty list for other values."""
    return value if isinstance(value, list) else []
