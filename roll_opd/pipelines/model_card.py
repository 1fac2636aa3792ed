"""The README.md of a trained model: what it was made from, on and for, how good it is, and how to load it.

Its head is the YAML that model hubs read.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from roll_opd import __version__
from roll_opd.pipelines.describe import objective_text
from roll_opd.plan import RunPlan, SamplingPlan
from roll_opd.tracking.results import before_after_table, loading
from roll_opd.tracking.summary import versions

CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")  # a model's directory in the cache of huggingface_hub
OF_THE_LICENCE = ("license", "license_name", "license_link", "language")  # taken over from the base model's card


def model_card(plan: RunPlan, summary: Mapping[str, Any], step: int) -> str:
    """Return the card of the student of `plan` after `step`, with the figures of a `summary.json`."""
    head = yaml.safe_dump(_metadata(plan), sort_keys=False, allow_unicode=True)
    sections = {
        f"{plan.exp_name}, step {step}": (
            f"`{model_name(plan.student.model.path)}`, trained by {plan.title} with roll_opd {__version__}."
        ),
        "How it was made": _table({**_made_from(plan), "steps": f"{step} of {plan.max_steps}, {_batch(plan)}"}),
        "Objective": _code(objective_text(plan)),
        "Figures": _figures(summary),
        "How to load it": _code("\n".join(loading("."))),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions().items() if version),
    }
    body = "\n\n".join(f"{'##' if n else '#'} {title}\n\n{text}" for n, (title, text) in enumerate(sections.items()))
    return f"---\n{head}---\n\n{body}\n"


def model_name(path: str) -> str:
    """Return the hub's name of a model in the hub's cache, else that of its directory, which says no more."""
    cached = CACHED.search(path)
    return "/".join(cached.groups()) if cached else Path(path).resolve().name


def _metadata(plan: RunPlan) -> dict[str, Any]:
    tags = ["roll_opd"]
    if plan.teachers:
        tags += ["on-policy-distillation", "knowledge-distillation"]
    if plan.rollout and not plan.rewards_are_monitored:
        tags.append("reinforcement-learning")
    if not plan.rollout:
        tags.append(plan.mode)
    return {
        "base_model": re.sub(r"[^\w./-]", "-", model_name(plan.student.model.path)),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags,
        **_licence(Path(plan.student.model.path)),
    }


def _licence(base: Path) -> dict[str, Any]:
    """Return what the base model's card says of its licence and languages; nothing where it has no readable card."""
    try:
        head = yaml.safe_load((base / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    except (OSError, UnicodeError, IndexError, yaml.YAMLError):
        return {}
    return {key: head[key] for key in OF_THE_LICENCE if key in head} if isinstance(head, dict) else {}


def _made_from(plan: RunPlan) -> dict[str, str]:
    files = ", ".join(f"`{Path(file).name}`" for file in plan.data.files)
    made = {"base model": f"`{model_name(plan.student.model.path)}`"}
    for teacher in plan.teachers:
        tags = "" if teacher.tags is None else f", of samples tagged {', '.join(teacher.tags)}"
        name = model_name(teacher.worker.model.path)
        made[f"teacher `{teacher.name}`"] = f"`{name}`, weight {teacher.opd_kl_coef:g}{tags}"
    if plan.reference:
        made["reference policy"] = f"`{model_name(plan.reference.model.path)}`"
    for reward in plan.rewards:
        purpose = " (measured, not learned from)" if plan.rewards_are_monitored else ""
        terms = " + ".join(f"{term.weight:g} × `{term.worker}`" for term in reward.terms)
        made[f"reward `{reward.domain}`"] = terms + purpose
    made["data"] = files
    if plan.demonstrations:
        made["demonstrations"] = ", ".join(f"`{Path(file).name}`" for file in plan.demonstrations.data.files)
    if plan.rollout:
        made["sampling"] = _sampling(plan.rollout.sampling)
    return {**made, "precision": plan.student.model.dtype, "seed": str(plan.seed)}


def _sampling(sampling: SamplingPlan) -> str:
    top_k = "" if sampling.top_k == -1 else f", top_k {sampling.top_k}"
    return f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}{top_k}, {sampling.max_new_tokens} tokens"


def _batch(plan: RunPlan) -> str:
    what = f"prompts × {plan.answers_per_prompt} responses" if plan.rollout else "rows with answers"
    return f"of {plan.rollout_batch_size} {what} each"


def _figures(summary: Mapping[str, Any]) -> str:
    table = before_after_table(summary)
    return _code(table) if table else "None were measured."


def _table(cells: Mapping[str, str]) -> str:
    rows = [f"| {name} | {' '.join(text.split()).replace('|', chr(92) + '|')} |" for name, text in cells.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _code(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
