"""Warn of chat templates that end turns without a stop token: answers would run on to response_length."""

from contextlib import suppress
from itertools import islice
from pathlib import Path

from roll_opd.config.plan import DataPlan, RunPlan
from roll_opd.data.answers import parse_answered
from roll_opd.data.dataset import columns_needed
from roll_opd.data.files import open_file
from roll_opd.data.rows import BadRow, DataError
from roll_opd.data.templates import TEMPLATES
from roll_opd.models.model_info import ModelFilesError
from roll_opd.models.turn_end import StopTokens, TurnEnd, stop_tokens, turn_end

ROWS_SEEN = 64  # of each file, to find the templates in use


def turn_end_warnings(plan: RunPlan) -> list[str]:
    """Return a warning for each template of a run that ends turns without a stop token of the student."""
    path, rollout = Path(plan.student.model.path), plan.rollout
    stops = rollout.sampling.stop if rollout else ()
    try:
        tokens = stop_tokens(path, rollout.engine_args if rollout else {})
        ends = {
            name: turn_end(path, TEMPLATES[name].source) for name in sorted(_templates(plan)) if TEMPLATES[name].whole
        }
    except (ModelFilesError, OSError, KeyError, TypeError, ValueError):
        return []  # files that cannot be read are reported where they are needed
    own = {name: _sentence(end, tokens, stops, path, learns=rollout is None) for name, end in ends.items() if end}
    key = f"{plan.student.name}.model_args.model_name_or_path"
    return list(dict.fromkeys(f"{key}: template {name} {said}" for name, said in own.items() if said))


def _sentence(end: TurnEnd, tokens: StopTokens, stops: tuple[str, ...], path: Path, *, learns: bool) -> str | None:
    """Return the warning and remedy for a turn end without a stop token; else None. `learns`: a supervised run."""
    if tokens.ids.intersection(end.ids) or any(stop in end.text for stop in stops):
        return None
    if end.ids:
        file = path / "generation_config.json"
        what = (
            f"ends a turn with {end.names[0]} (id {end.ids[0]}), which is not a stop token: generation stops at"
            f" {tokens.words}"
        )
        remedy = f"add {end.ids[0]} to eos_token_id in {file}, which exports keep"
        if not learns:
            remedy += f", or write generating_args.stop_strings: ['{end.names[0]}']"
    elif end.text:
        what = f"ends a turn with the text {end.text!r}, which is not a token: generation stops at {tokens.words}"
        remedy = "use a template that ends turns with a stop token"
        remedy += "" if learns else f", or write generating_args.stop_strings: [{end.text!r}]"
    elif learns:
        what = f"writes nothing after an answer, so no end of answers is learned; generation stops at {tokens.words}"
        return f"{what}. Use a template that ends turns with a stop token"
    else:
        return None
    result = "a model trained on it does not stop" if learns else "an answer runs on to response_length"
    return f"{what}, so {result}; {remedy}"


def _templates(plan: RunPlan) -> set[str]:
    """Return the names of the templates that a run applies to conversations."""
    if plan.workflow or plan.is_agentic:
        return {"native"}
    data_sets = [plan.data, *([plan.demonstrations.data] if plan.demonstrations else [])]
    return {name for data in data_sets for name in _of_rows(data)}


def _of_rows(data: DataPlan) -> set[str]:
    found = set()
    for name in data.files:
        with suppress(DataError, OSError):  # the pass over all rows reports these and bad rows
            for _, _, value in islice(open_file(name, columns_needed(data)).scan(), ROWS_SEEN):
                with suppress(BadRow):
                    row = parse_answered(value, "", data)
                    found |= set() if row.prompt is not None else {data.tag_templates.get(row.tag, data.template)}
    return found
