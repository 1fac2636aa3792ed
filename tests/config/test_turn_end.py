"""Turn ends of chat templates by model family, stop tokens, and the warning for a turn end without one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_assets import write_model
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from roll_opd.config.plan import RunPlan
from roll_opd.models.stop_tokens import stop_tokens, turn_end
from roll_opd.planner.load_plan import load_plan

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# a template as its family has it, the tokens behind an answer, whether eos_token (</s>) is among them
FAMILIES = {
    "Qwen": (CHATML, ["<|im_end|>"]),
    "Llama 3": (
        "{{ bos_token }}{% for m in messages %}{% set content = '<|start|>' + m.role + '\n\n' + m.content | trim %}"
        "{{ content + '<|eot_id|>' }}{% endfor %}{{ strftime_now('%Y') if false }}",
        ["<|eot_id|>"],
    ),
    "Mistral": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}"
        "{{ m.content + eos_token }}{% endif %}{% endfor %}",
        ["</s>"],
    ),
    "Phi": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        ["<|im_end|>", "</s>"],
    ),
    "no end": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", []),
    "refuses": ("{{ raise_exception('no') }}", None),
    "leaves answers out": ("{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}", None),
}


def _tokenizer(path: Path, template: Any, eos: str = "</s>") -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    core.add_special_tokens(["</s>", "<|im_start|>", "<|im_end|>"])
    core.add_tokens([AddedToken("<|eot_id|>", special=False)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)
    made.chat_template = template
    made.save_pretrained(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_turn_ends_of_model_families(tmp_path: Path, family: str) -> None:
    template, names = FAMILIES[family]
    _tokenizer(tmp_path, template)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    found = turn_end(tmp_path)
    if names is None:
        assert found is None
        return
    assert found and list(found.names) == names
    assert list(found.ids) == loaded.convert_tokens_to_ids(names)
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "xyz"}]
    assert found.text == loaded.apply_chat_template(turns, tokenize=False).rpartition("xyz")[2].strip()


def test_the_default_of_several_templates_ends_the_turn(tmp_path: Path) -> None:
    _tokenizer(tmp_path, {"default": CHATML, "tool_use": "x"})
    assert turn_end(tmp_path).names == ("<|im_end|>",)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("generation", "config", "arguments", "ids"),
    [
        ({"eos_token_id": 3}, None, {}, {2, 3}),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 9}, {}, {2, 3, 4}),
        ({}, {"eos_token_id": 9}, {}, {2}),  # as vLLM, config.json does not count beside generation_config.json
        (None, {"eos_token_id": [9, 3]}, {}, {2, 3, 9}),
        (None, None, {"override_generation_config": {"eos_token_id": 5}}, {2, 5}),
        ({"eos_token_id": 3}, None, {"generation_config": "vllm"}, {2}),
    ],
)
def test_stop_tokens_are_those_of_template_generation_and_arguments(
    tmp_path: Path, generation: Any, config: Any, arguments: dict[str, Any], ids: set[int]
) -> None:
    _tokenizer(tmp_path, CHATML)
    for name, values in (("generation_config.json", generation), ("config.json", config)):
        if values is not None:
            (tmp_path / name).write_text(json.dumps(values))
    assert stop_tokens(tmp_path, arguments).ids == ids


@pytest.fixture
def warned(plan: Callable[..., RunPlan], root: Path) -> Callable[..., list[str]]:
    """Plan a run of a student with this template; return the messages about the ends of its turns."""

    def warned(template: str, rows: list[dict], eos: Any = (), changes: dict[str, Any] | None = None) -> list[str]:
        path = write_model(root / "student")
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        tokenizer["added_tokens"] = [{"id": 4, "content": "<|end|>"}, {"id": 5, "content": "<|pad|>"}]
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        settings = {"tokenizer_class": "TokenizersBackend", "eos_token": "<|pad|>", "chat_template": template}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        if eos:
            (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}))
        for file in root.glob("*.jsonl"):
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [text for text in plan(changes or {}).warnings if "ends a turn" in text or "behind an answer" in text]

    return warned


CONVERSATION = [{"messages": [{"role": "user", "content": "a"}], "ground_truth": "b"}]
ENDS = "{% for m in messages %}{{ m.role + m.content + '<|end|>' }}{% endfor %}"
IN_TEXT = "{% for m in messages %}{{ m.role + m.content + '###' }}{% endfor %}"
NEWLINE = "{% for m in messages %}{{ m.role + m.content + '\n' }}{% endfor %}"


def test_an_end_that_is_no_stop_token(warned: Callable[..., list[str]]) -> None:
    (found,) = warned(ENDS, CONVERSATION)
    assert "template native ends a turn with <|end|> (id 4), no stop token" in found
    assert "generation stops at eos_token <|pad|> (5) of the tokenizer" in found
    assert "add 4 to eos_token_id in" in found and "generating_args.stop_strings: ['<|end|>']" in found
    (found,) = warned(IN_TEXT, CONVERSATION)
    assert "ends a turn with the text '###', which is not a token" in found


@pytest.mark.parametrize(
    ("template", "rows", "eos", "stop"),
    [
        (ENDS, CONVERSATION, (5, 4), None),
        (ENDS, CONVERSATION, (), ["<|end|>"]),
        (IN_TEXT, CONVERSATION, (), ["##"]),
        (NEWLINE, CONVERSATION, (), None),
        (ENDS, [{"prompt": "a", "ground_truth": "b"}], (), None),
        (ENDS.replace("<|end|>", "<|end|>\n<|pad|>"), CONVERSATION, (), None),
    ],
)
def test_no_false_alarm(warned: Callable[..., list[str]], template: str, rows: list, eos: tuple, stop: Any) -> None:
    changes = {} if stop is None else {"student_infer.generating_args.stop_strings": stop}
    assert warned(template, rows, eos, changes) == []


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            None,
            "ends a turn with <|end|> (id 260), no stop token: generation stops at eos_token <|system|>",
        ),
        (NEWLINE, "writes no token after an answer, so no stop is learned"),
    ],
)
def test_rows_with_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str | None, said: str) -> None:
    """The model learns a turn end that is not a stop token."""
    repository = Path(__file__).parents[2]
    monkeypatch.chdir(repository)
    model = tmp_path / "model"
    shutil.copytree(repository / "examples/demo/models/student", model)
    (model / "generation_config.json").unlink()
    for name, change in (
        ("tokenizer_config.json", {"eos_token": "<|system|>"}),
        ("config.json", {"eos_token_id": 259}),
    ):
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | change))
    if template:
        (model / "chat_template.jinja").write_text(template)
    for pipeline, role in (("sft", "sft_train"), ("dpo", "actor_train")):
        plan = load_plan("demo", pipeline, [f"{role}.model_args.model_name_or_path={model}"])
        (found,) = [text for text in plan.warnings if said in text]
        assert "stop_strings" not in found
