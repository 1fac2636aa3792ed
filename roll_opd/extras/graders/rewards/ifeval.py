"""`ifeval`: the reward is 1.0 if a response follows all instructions of its row, else 0.0.

The instructions can be verified by a program. A row has one of two forms:

- IFEval: `instruction_id_list` and `kwargs`, in the row or in a JSON `ground_truth`.
- Tulu 3 and ROLL: `func_name` and its arguments, in a JSON `ground_truth`.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from roll_opd.extras.graders.instructions.functions import FUNCTIONS
from roll_opd.extras.graders.instructions.rules import INSTRUCTIONS, Relation
from roll_opd.extras.graders.short_answers import after_thinking
from roll_opd.rewards.interface import RewardSample, Score, flag
from roll_opd.rewards.reward_registry import register

Check = Callable[[str], bool]


class Unjudgeable(ValueError):
    """A row has no instruction, an unknown instruction, or an instruction with missing arguments."""


@register("ifeval")
class IFEval:
    """Reward for responses that follow the instructions in their row.

    The part `followed` is always the fraction of followed instructions. Text before `</think>` is ignored.

    Args:
        loose: whether instructions are checked as for the loose accuracy of the paper.
        partial: whether the score is the fraction of followed instructions.
    """

    def __init__(self, loose: bool = False, partial: bool = False) -> None:
        self.views = loose_views if flag("ifeval", "loose", loose) else strict_view
        self.partial = flag("ifeval", "partial", partial)

    def score(self, samples: Sequence[RewardSample]) -> list[Score]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: RewardSample) -> Score:
        try:
            checks = read_checks(sample.ground_truth, sample.extra)
            views = self.views(after_thinking(sample.response))
            followed = sum(any(check(view) for view in views) for check in checks) / len(checks)
        except Unjudgeable as unjudgeable:
            return Score(None, reason=str(unjudgeable))
        value = followed if self.partial else float(followed == 1.0)
        return Score(value, {"followed": followed}, "followed" if followed == 1.0 else "not followed")


def strict_view(text: str) -> list[str]:
    """Return a list whose only entry is the text.

    The list is empty for blank text, because blank text follows no instruction.
    """
    return [text] if text.strip() else []


def loose_views(text: str) -> list[str]:
    """Return the versions of a text that count for the loose accuracy.

    They are the whole text, and the text without its first line, its last line or both. Each of them is returned with
    and without asterisks. An instruction counts as followed if one of the versions follows it.
    """
    lines = text.split("\n")
    parts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [view for part in parts for view in (part, part.replace("*", "")) if view.strip()]


def read_checks(ground_truth: str | None, row: Mapping[str, Any]) -> list[Check]:
    """Return the instructions of a row as functions that check a text.

    Raises `Unjudgeable` if an instruction is invalid.
    """
    if "instruction_id_list" in row:
        return _instructions(row["instruction_id_list"], row.get("kwargs"))
    try:
        truth = json.loads(ground_truth or "")
    except (ValueError, RecursionError):
        raise Unjudgeable("no instruction") from None
    if isinstance(truth, list) and len(truth) == 1:
        truth = truth[0]
    if not isinstance(truth, dict):
        raise Unjudgeable("no instruction")
    if "func_name" in truth:
        return [_bound(FUNCTIONS, truth["func_name"], truth)]
    # "instruction_id" is in newer rows of Tulu 3's authors
    return _instructions(truth.get("instruction_id_list", truth.get("instruction_id")), truth.get("kwargs"))


def _instructions(names: Any, arguments: Any) -> list[Check]:
    names, arguments = _list(names), _list(arguments)
    if not names or len(arguments) not in (0, len(names)):
        raise Unjudgeable("no instruction")
    arguments = arguments or [{}] * len(names)
    return [_bound(INSTRUCTIONS, name, given or {}) for name, given in zip(names, arguments, strict=True)]


def _list(value: Any) -> Sequence[Any]:
    """Return `value` if it is a list; if it is JSON text of a list, return that list.

    The result is empty for other values.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    return value if isinstance(value, list | tuple) else ()


def _bound(table: Mapping[str, Callable[..., bool]], name: Any, given: Mapping[str, Any]) -> Check:
    """Return the rule for an instruction, with converted arguments bound to it.

    Args:
        table: rules by name.
        name: name of the rule.
        given: the arguments as written in the row.
    """
    if not isinstance(name, str) or not isinstance(given, Mapping):
        raise Unjudgeable("no instruction")
    if name not in table:
        raise Unjudgeable(f"unknown instruction {name}")
    rule = table[name]
    parameters = list(inspect.signature(rule).parameters.values())[1:]
    try:
        return partial(rule, **{one.name: _argument(given.get(one.name), one.annotation) for one in parameters})
    except (ValueError, OverflowError):
        raise Unjudgeable(f"bad arguments of {name}") from None


def _argument(value: Any, kind: Any) -> Any:
    """Convert a value to the type of a rule's argument; raise ValueError if that is impossible."""
    if kind is int and isinstance(value, int | float | str) and not isinstance(value, bool):
        return int(value)
    if kind is str and isinstance(value, str) and value:
        return value
    if kind is Relation and value in get_args(Relation):
        return value
    if kind == list[str] and isinstance(value, str) and value:
        return [one.strip() for one in value.split(",")]
    if kind == list[str] and value and isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return value
    raise ValueError
