"""The chat template of a trained model: transformers renders with it as the run rendered."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.plan import RunPlan
from roll_opd.data.row_formats import Row
from roll_opd.data.templates import TEMPLATES, load_plain_tokenizer, render_prompt
from roll_opd.extras.cards.chat_template_files import chat_template_files
from roll_opd.planner.load_plan import load_plan

MESSAGES = (FrozenDict({"role": "user", "content": 'What is "2" {{+}} 3?'}),)
THINKING = (
    "{%- for message in messages -%}{{- '<|user|>' + message.content + mark -}}{%- endfor -%}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think></think>' -}}{%- endif -%}"
)


def trained(place: Path, own: str | None, *, in_config: bool, name: str, **values: Any) -> tuple[RunPlan, Path]:
    """Return the plan of a run of a model with the chat template `own`, and the model that the run leaves."""
    before, after = place / "before", place / "after"
    shutil.copytree("examples/demo/models/student", before)
    (before / "chat_template.jinja").unlink()
    if own and in_config:
        config = json.loads((before / "tokenizer_config.json").read_text())
        (before / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": own}))
    elif own:
        (before / "chat_template.jinja").write_text(own)
    plan = load_plan("demo", "onpolicy_distill")
    plan = replace(
        plan,
        student=replace(plan.student, model=replace(plan.student.model, path=str(before))),
        data=replace(plan.data, template=name),
        chat_template_kwargs=FrozenDict(values),
    )
    shutil.copytree(before, after)
    for file, text in chat_template_files(plan).items():
        (after / file).write_text(text)
    return plan, after


def rendered(path: Path, messages: Any = MESSAGES, **values: Any) -> str:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    given = [dict(message) for message in messages]
    return str(tokenizer.apply_chat_template(given, add_generation_prompt=True, tokenize=False, **values))


def test_transformers_renders_as_the_run_for_every_template(tmp_path: Path) -> None:
    for number, (name, own) in enumerate((name, own) for name in TEMPLATES for own in (THINKING, None)):
        has_own_text = TEMPLATES[name].exported is not None
        if own is None and not has_own_text:
            continue
        plan, after = trained(tmp_path / str(number), own, in_config=number % 4 < 2, name=name, mark="!")
        before = load_plain_tokenizer(plan.student.model.path)
        if not has_own_text:
            before.apply_chat_template = lambda *a, of=before.apply_chat_template, **k: of(*a, **{"mark": "!", **k})
        assert rendered(after) == render_prompt(before, Row("0", "math", messages=MESSAGES), name).text, name
        assert "chat_template" not in json.loads((after / "tokenizer_config.json").read_text())
        if name in ("base", "empty"):
            with pytest.raises(TemplateError, match="only one message"):
                rendered(after, [*MESSAGES, {"role": "assistant", "content": "5"}])
        if name == "qwen3_nothink" and own:
            assert rendered(after).endswith("!<think></think>")
            assert not rendered(after, enable_thinking=True).endswith("</think>"), "a caller's value takes precedence"


def test_a_template_that_the_run_does_not_change_stays_as_the_model_has_it(tmp_path: Path) -> None:
    plan, after = trained(tmp_path, "{{ messages }}", in_config=True, name="qwen3_nothink")
    assert chat_template_files(plan) == {} and not (after / "chat_template.jinja").exists()
    several = replace(plan, data=replace(plan.data, tag_templates=FrozenDict({"math": "chatml"})))
    assert chat_template_files(several) == {}
