"""The chat template of a trained model, with which other programs render prompts as its run did."""

import json
from pathlib import Path

from roll_opd.base.frozen import thaw
from roll_opd.config.plan import RunPlan
from roll_opd.data.templates import TEMPLATES
from roll_opd.models.model_files import read_json
from roll_opd.models.tokenizer_files import CONFIG, chat_template_of


def chat_template_files(plan: RunPlan) -> dict[str, str]:
    """Return the files that replace the chat template of the initial model.

    There are none if the run uses that template without variables, or several templates.
    """
    path = Path(plan.student.model.path)
    names = {plan.data.template, *plan.data.tag_templates.values()}
    if len(names) > 1:
        return {}
    template, own = TEMPLATES[plan.data.template], chat_template_of(path)
    text = template.exported or own
    if not isinstance(text, str):  # the model has none, or several by name
        return {}
    values = {**thaw(plan.chat_template_kwargs), **template.variables}
    # a caller's own value takes precedence, as that of a row does
    heads = [f"{{% set {name} = {name} | default({_literal(value)}) %}}" for name, value in values.items()]
    text = "".join(head for name, head in zip(values, heads, strict=True) if name in text and head not in text) + text
    if text == own:
        return {}
    files = {"chat_template.jinja": text}
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    if config.pop("chat_template", None):  # some programs would prefer it to the file
        files[CONFIG] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return files


def _literal(value: object) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
