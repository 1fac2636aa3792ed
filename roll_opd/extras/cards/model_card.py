"""The model card (README.md) of a trained model.

The card begins with the YAML front matter for model hubs. It then describes the origin of the model, its data,
objective and results, and shows how to load the model and prompt it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from roll_opd import __version__
from roll_opd.commands.plan_text import objective_text
from roll_opd.config.plan import RunPlan, SamplingPlan
from roll_opd.extras.cards.card_settings import public, settings_table, steps_text
from roll_opd.extras.cards.origin import base_model, cached, model_name
from roll_opd.models.tokenizer_files import has_chat_template
from roll_opd.pipelines.run_hooks import RunHook
from roll_opd.pipelines.sample_texts import NEUTRAL
from roll_opd.pipelines.settings_history import RunPart
from roll_opd.tracking.results_table import before_after_table, loading
from roll_opd.tracking.summary import versions


class CardOfModel(RunHook):
    """Writes the card next to the model of every checkpoint, and the chat template of the run's prompts."""

    def model_files(self, step: int, summary: Mapping[str, Any], parts: Sequence[RunPart]) -> Mapping[str, str]:
        """Return the card, and the files of the chat template."""
        from roll_opd.extras.cards.chat_template_files import chat_template_files  # a step does not use it

        return {"README.md": model_card(self.plan, summary, step, parts), **chat_template_files(self.plan)}


def model_card(plan: RunPlan, summary: Mapping[str, Any], step: int, parts: Sequence[RunPart] = ()) -> str:
    """Return the card of the student after `step`.

    Paths, hosts and environment variables are left out.

    Args:
        summary: content of `summary.json`, with the results.
        parts: parts of the run with their settings.
    """
    head = yaml.safe_dump(_metadata(plan), sort_keys=False, allow_unicode=True)
    span = steps_text(parts[-1].first, step) if len(parts) > 1 else ""
    last = span and f" of {span}"
    is_chat = has_chat_template(Path(plan.student.model.path))
    # the example prompt is neutral: a card may be published, but rows may be private
    sections = {
        f"{plan.exp_name}, step {step}": (
            f"`{model_name(plan.student.model.path)}`, trained by {plan.title} with roll_opd {__version__}."
        ),
        "How it was made" + (span and f" ({span})"): _table({**_made_from(plan), "steps": _steps(plan, step, parts)}),
        "Settings": settings_table(parts),
        f"Objective{last}": _code(objective_text(plan)),
        "Figures": _code(table) if (table := before_after_table(summary)) else "None were measured.",
        "How to load it": _code("\n".join(loading(".", NEUTRAL, is_chat=is_chat)), "python"),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions().items() if version),
    }
    shown = {title: text for title, text in sections.items() if text}
    body = "\n\n".join(f"{'##' if n else '#'} {title}\n\n{text}" for n, (title, text) in enumerate(shown.items()))
    return f"---\n{head}---\n\n{body}\n"


def _metadata(plan: RunPlan) -> dict[str, Any]:
    """Return the YAML front matter for model hubs. Unknown facts are left out."""
    tags = ["roll_opd"]
    if plan.teachers:
        tags += ["on-policy-distillation", "knowledge-distillation"]
    if plan.rollout and not plan.rewards_are_monitored:
        tags.append("reinforcement-learning")
    if not plan.rollout:
        tags.append(plan.mode)
    base, datasets = base_model(Path(plan.student.model.path)), _datasets(plan)
    return {
        **({"base_model": base} if base else {}),
        **({"datasets": datasets} if datasets else {}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags,
    }


def _datasets(plan: RunPlan) -> list[str]:
    """Return the hub names of the data files that are in the hub's cache."""
    files = (*plan.data.files, *(plan.demonstrations.data.files if plan.demonstrations else ()))
    return list(dict.fromkeys(name for file in files if (name := cached(file, "datasets"))))


def _made_from(plan: RunPlan) -> dict[str, str]:
    files = ", ".join(f"`{Path(file).name}`" for file in plan.data.files)
    made = {"base model": f"`{model_name(plan.student.model.path)}`"}
    for teacher in plan.teachers:
        tags = "" if teacher.tags is None else f", of samples tagged {', '.join(teacher.tags)}"
        name = model_name(teacher.model.path) if teacher.model else teacher.source.name
        made[f"teacher `{teacher.name}`"] = f"`{name}`, weight {teacher.opd_kl_coef:g}{tags}"
    if plan.reference:
        made["reference policy"] = f"`{model_name(plan.reference.model.path)}`"
    made |= _rewards(plan)
    for tag in plan.data.environments:
        made[f"environment `{tag}`"] = _environment(plan, tag)
    if files:
        made["data"] = files
    if plan.demonstrations:
        made["demonstrations"] = ", ".join(f"`{Path(file).name}`" for file in plan.demonstrations.data.files)
    if plan.rollout:
        made["sampling"] = _sampling(plan.rollout.sampling) + (" a turn" if plan.is_agentic else "")
    return {**made, "precision": plan.student.model.dtype, "seed": str(plan.seed)}


def _rewards(plan: RunPlan) -> dict[str, str]:
    """Return the rows of the card about the workflow and the rewards.

    The row of a reward names its source: the environment, the workflow or the configuration.
    """
    purpose = " (measured, not trained on)" if plan.rewards_are_monitored else ""
    if plan.is_agentic:
        return {"reward": f"of the environment{purpose}"}
    terms = {
        reward.domain: " + ".join(f"{term.weight:g} × `{public(term.worker)}`" for term in reward.terms)
        for reward in plan.rewards
    }
    if not plan.workflow:
        return {f"reward `{domain}`": text + purpose for domain, text in terms.items()}
    made = {f"reward `{domain}`": f"set by the workflow, else {text}{purpose}" for domain, text in terms.items()}
    by = f", by `{public(plan.workflow.workflow_reward)}`" if plan.workflow.workflow_reward else ""
    return {"workflow": f"`{public(plan.workflow.workflow)}`"} | (
        made or {"reward": f"set by the workflow{by}{purpose}"}
    )


def _environment(plan: RunPlan, tag: str) -> str:
    """Return the type of an environment and the limits of an episode."""
    played = plan.workflow.workflow_args["environments"][tag] if plan.workflow else {}
    return f"`{public(played['env_type'])}`, at most {played['max_steps']} turns"


def _sampling(sampling: SamplingPlan) -> str:
    top_k = "" if sampling.top_k == -1 else f", top_k {sampling.top_k}"
    return f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}{top_k}, {sampling.max_new_tokens} tokens"


def _steps(plan: RunPlan, step: int, parts: Sequence[RunPart]) -> str:
    of_parts = f", in {len(parts)} parts with different settings" if len(parts) > 1 else ""
    return f"{step} of {plan.max_steps}, {_batch(plan)}{of_parts}"


def _batch(plan: RunPlan) -> str:
    if plan.is_agentic:
        return f"of {plan.sequences_per_step} trajectories, {plan.answers_per_prompt} from each initial state"
    what = f"prompts × {plan.answers_per_prompt} responses" if plan.rollout else "rows with answers"
    return f"of {plan.rollout_batch_size} {what} each"


def _table(cells: Mapping[str, str]) -> str:
    rows = [f"| {name} | {' '.join(text.split()).replace('|', chr(92) + '|')} |" for name, text in cells.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _code(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}\n```"
