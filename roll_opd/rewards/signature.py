"""Detect reward functions with the signature of verl or TRL, and generate their adapters."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

# field of `RewardSample` -> names of the argument in verl, TRL and others
_FIELDS = {
    "response": "response solution_str completion answer prediction predict_str output model_output generated",
    "ground_truth": "ground_truth gt reference label target gold",
    "tag": "data_source task",
    "extra": "extra_info",
    "prompt": "prompt question query prompt_str",
}
_FIELD_OF = {name: field for field, names in _FIELDS.items() for name in names.split()}
# the same for functions of batches
_BATCH_OF = {
    "completions": "response",
    "responses": "response",
    "solution_strs": "response",
    "ground_truths": "ground_truth",
    "data_sources": "tag",
    "extra_infos": "extra",
    "prompts": "prompt",
    "queries": "prompt",
}
_NEVER_SAMPLES = {"completions", "prompts", "data_source", "data_sources", "solution_str", "solution_strs"}


def is_foreign(reward: Callable[..., Any], arguments: Collection[str] = ()) -> bool:
    """Return whether a function has another system's signature; `arguments` come from the configuration."""
    taken = [parameter for parameter in _named(reward) if parameter.name not in arguments]
    if not taken or taken[0].name in ("sample", "samples"):
        return False
    needed = [parameter for parameter in taken if parameter.default is parameter.empty]
    known = [parameter for parameter in needed if parameter.name in _FIELD_OF or parameter.name in _BATCH_OF]
    return taken[0].name in _NEVER_SAMPLES or (len(needed) > 1 and bool(known))


def adapter(reward: Callable[..., Any]) -> str:
    """Return the source of a reward function that calls `reward`, a function with a foreign signature."""
    name, parameters = reward.__name__, _named(reward)
    in_lists = any(parameter.name in _BATCH_OF for parameter in parameters)
    fields = _BATCH_OF if in_lists else _FIELD_OF
    given = []
    for parameter in parameters:
        if parameter.name in fields or parameter.default is parameter.empty:
            value = f"s.{fields[parameter.name]}" if parameter.name in fields else f"s.extra[{parameter.name!r}]"
            value = f"[{value} for s in samples]" if in_lists else value
            given.append(f"{parameter.name}={value}")
    call = f"{name}({', '.join(given)})"
    return f"def score(samples):\n    return {call if in_lists else f'[{call} for s in samples]'}"


def _named(reward: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(reward).parameters.values()
    return [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
