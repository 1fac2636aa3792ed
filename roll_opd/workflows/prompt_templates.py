"""How a game is told to the model: the user's turn, which a template makes of what is known of the game."""

import re
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Any

from roll_opd.base.hints import nearest
from roll_opd.workflows.roll_managers import makes_steps

# what a template may name, with a value of its kind: of a conversation, and of an action that is a sample of its own
IN_CONVERSATION = {"observation": "", "turn_idx": 1, "suffix": "", "actions_left": 1, "max_response_length": 1}
ANEW = {
    "env_instruction": "",
    "history": "",
    "history_length": 0,
    "step_count": 0,
    "current_step": 1,
    "current_observation": "",
    "max_response_length": 1,
}


def filled(settings: Mapping[str, Any], **values: Any) -> str:
    """Return a turn of a game with the `settings` of `EnvironmentKeys`; `values` are all of those above."""
    before, behind = settings["pre_step_template"], settings["next_step_template"]
    if before is None and behind is None:
        return str(settings["agent_template"]).format_map(values)
    told = values.get("observation", values.get("current_observation"))
    return f"{(before or '').format_map(values)}{told}{(behind or '').format_map(values)}"


def template_problems(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong with it) for the templates of `settings` that `filled` could not fill in."""
    known = dict(_known(settings), max_response_length=settings["max_tokens_per_step"])
    for key in _keys(settings):
        template = settings[key] or ""
        try:
            unknown = [field for field in _fields(template) if _name(field) not in known]
            if not unknown:
                template.format_map(known)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            yield key, f"cannot be filled in: {type(error).__name__}: {error}; correct it, braces are written {{{{ }}}}"
            continue
        if unknown:
            near = nearest(_name(unknown[0]), known)
            hint = f"did you mean {{{near}}}?" if near else "braces that name nothing are written {{ }}."
            names = ", ".join(f"{{{name}}}" for name in known)
            kind = settings["env_manager_cls"] or "an environment"
            yield key, f"{{{unknown[0]}}} is nothing that is known of a turn; {hint} Known with {kind}: {names}"


def hides_the_game(settings: Mapping[str, Any]) -> str | None:
    """Return the field that would tell the model what it sees, where the template has no such field."""
    needed = "current_observation" if makes_steps(settings["env_manager_cls"]) else "observation"
    shown = "agent_template" not in _keys(settings) or needed in map(_name, _fields(settings["agent_template"]))
    return None if shown else needed


def _known(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return ANEW if makes_steps(settings["env_manager_cls"]) else IN_CONVERSATION


def _keys(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of the templates that `filled` reads."""
    around = tuple(key for key in ("pre_step_template", "next_step_template") if settings[key] is not None)
    return around or ("agent_template",)


def _fields(template: str) -> list[str]:
    return [field for _, field, _, _ in Formatter().parse(template) if field is not None]


def _name(field: str) -> str:
    """Return the name of which a field says a part: `observation` of `observation[0]`."""
    return re.split(r"[.\[]", field, maxsplit=1)[0]
