"""Prompt templates of environments, and ROLL's environment managers that select them.

A template renders one turn of a game as a user message. The class path of a manager selects the manager. A manager
makes either one sample per action or one sample per conversation.
"""

import re
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Any

from roll_opd.base.failures import did_you_mean

# fields of a template with example values: within a conversation, and for single-turn prompts of a StepEnvManager
CONVERSATION_FIELDS = {"observation": "", "turn_idx": 1, "suffix": "", "actions_left": 1, "max_response_length": 1}
SINGLE_TURN_FIELDS = {
    "env_instruction": "",
    "history": "",
    "history_length": 0,
    "step_count": 0,
    "current_step": 1,
    "current_observation": "",
    "max_response_length": 1,
}


def filled(settings: Mapping[str, Any], **values: Any) -> str:
    """Return the user message of one turn of a game.

    Args:
        settings: settings of the environment, with the templates. The keys are fields of `EnvironmentKeys`.
        values: values of the fields in the templates.
    """
    before, after = settings["pre_step_template"], settings["next_step_template"]
    if before is None and after is None:
        return str(settings["agent_template"]).format_map(values)
    observation = values.get("observation", values.get("current_observation"))
    return f"{(before or '').format_map(values)}{observation}{(after or '').format_map(values)}"


def template_problems(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for each template in `settings` that `filled` could not render."""
    known = dict(_known(settings), max_response_length=settings["max_tokens_per_step"])
    for key in _keys(settings):
        template = settings[key] or ""
        try:
            unknown = [field for field in _fields(template) if _name(field) not in known]
            if not unknown:
                template.format_map(known)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            remedy = "correct the template, and write literal braces as {{ }}"
            yield key, f"cannot be rendered: {type(error).__name__}: {error}; {remedy}"
            continue
        if unknown:
            hint = did_you_mean(_name(unknown[0]), known, "write literal braces as {{ }}.")
            names = ", ".join(f"{{{name}}}" for name in known)
            kind = settings["env_manager_cls"] or "an environment"
            yield key, f"{{{unknown[0]}}} is not a field of a turn; {hint} Fields with {kind}: {names}"


def missing_observation_field(settings: Mapping[str, Any]) -> str | None:
    """Return the observation field that the template lacks, or None.

    Without this field, the model would not see the observation.
    """
    needed = "current_observation" if makes_steps(settings["env_manager_cls"]) else "observation"
    shown = "agent_template" not in _keys(settings) or needed in map(_name, _fields(settings["agent_template"]))
    return None if shown else needed


def _known(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return SINGLE_TURN_FIELDS if makes_steps(settings["env_manager_cls"]) else CONVERSATION_FIELDS


def _keys(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of the templates that `filled` uses."""
    around = tuple(key for key in ("pre_step_template", "next_step_template") if settings[key] is not None)
    return around or ("agent_template",)


def _fields(template: str) -> list[str]:
    return [field for _, field, _, _ in Formatter().parse(template) if field is not None]


def _name(field: str) -> str:
    """Return the field name at the start of a field expression, for example `observation` for `observation[0]`."""
    return re.split(r"[.\[]", field, maxsplit=1)[0]


STEP_WISE = ("StepEnvManager", "StepConcatEnvManager", "AgentNativeStepEnvManager")  # one sample per action
CONVERSATION = "TrajEnvManager"  # ROLL's default
TYPO_SIMILARITY = 0.9  # high, because the names of all managers have the same suffix
PACKAGE = "roll.pipeline.agentic.env_manager"


def makes_steps(env_manager_cls: str | None) -> bool:
    """Return whether the environment manager with this class path makes one sample per action.

    ROLL's default manager makes one sample per conversation.
    """
    return _class_of(env_manager_cls) in STEP_WISE


def manager_problem(env_manager_cls: str | None) -> str | None:
    """Return the problem of a manager's class path, or None if the manager is supported."""
    if env_manager_cls is None:
        return None
    name, known = _class_of(env_manager_cls), (CONVERSATION, *STEP_WISE)
    of_roll = env_manager_cls == name or env_manager_cls.startswith("roll.")
    if of_roll and name in known:
        return None
    others = {manager for manager in known if manager != name}
    hint = did_you_mean(name, others, "remove the key, or write a supported manager.", TYPO_SIMILARITY)
    return (
        f"{env_manager_cls} is not a supported ROLL manager, and custom managers are not supported; {hint}"
        f" Supported in {PACKAGE}: {', '.join(known)}"
    )


def _class_of(env_manager_cls: str | None) -> str:
    return (env_manager_cls or CONVERSATION).rpartition(".")[2]
