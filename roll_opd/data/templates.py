"""From a row to prompt tokens: the tokenizer's own chat template, or one named the way ROLL names them.

A conversation goes through the template; a row that brings a plain `prompt` has written its own text, and
that text is tokenised as it is, whatever the template.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_opd.base.frozen import thaw
from roll_opd.data.messages import tool_name
from roll_opd.data.rows import DataError, Row
from roll_opd.data.run_date import with_date
from roll_opd.data.special_tokens import token_ids
from roll_opd.data.template_check import TemplateOmission, check_answer, render_complete

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# what `AutoTokenizer` would load from tokenizer.json itself, after importing torch, which takes seconds
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EMPTY = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
# The template of DeepSeek-R1-Zero (arXiv 2501.12948, table 1), which asks for a box as rule-based rewards do
BASE = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer, whose final "
    "result stands in \\boxed{}. The reasoning process and answer are enclosed within <think> </think> and <answer> "
    "</answer> tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>. "
    "User: ",
    " Assistant:",
)


@dataclass(frozen=True)
class PromptText:
    """A text to tokenise. If it `begins` a sequence, it gets the beginning-of-sequence token, see `special_tokens`.

    `DataError` for a text that no tokenizer takes: parts of a row that only a template reads are not checked before.
    """

    text: str
    begins: bool

    def __post_init__(self) -> None:
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError("the text holds half of a surrogate pair, which no tokenizer takes") from None


class UnusableTemplate(DataError):
    """The chat template is unusable for every row."""


class NoChatTemplate(UnusableTemplate):
    """The tokenizer has no chat template and the rows need one."""


@dataclass(frozen=True)
class Template:
    """How a conversation becomes a text.

    `prompt` ends where the answer begins; `whole` takes the answer, a message, too, and where it is None an answer
    follows the prompt as it is, up to the end-of-sequence token.
    """

    prompt: Callable[["PreTrainedTokenizerBase", Row], str]
    whole: Callable[["PreTrainedTokenizerBase", Row, Mapping[str, Any]], str] | None = None
    source: str | None = None  # of the chat template; None: the tokenizer's own


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a Hugging Face model directory; its chat template gets the run's date.

    Raises `DataError` if none can be loaded.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        if _tokenizer_class(path) in GENERIC_CLASSES:
            return with_date(PreTrainedTokenizerFast.from_pretrained(path))
        from transformers import AutoTokenizer

        return with_date(AutoTokenizer.from_pretrained(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"no tokenizer could be loaded from {path}: {error}") from error


def _tokenizer_class(path: str) -> str | None:
    directory = Path(path)
    if not (directory / "tokenizer.json").is_file() or not (directory / "tokenizer_config.json").is_file():
        return None
    return json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")


def render_prompt(tokenizer: "PreTrainedTokenizerBase", row: Row, template: str = "native") -> PromptText:
    """Return the text of `row`, ending where the student's answer begins.

    `template` is one of `TEMPLATES`. Raises `DataError` for a name that is not and where the template refuses the
    conversation, `NoChatTemplate` where one is needed.
    """
    if template not in TEMPLATES:
        raise DataError(f"unknown template {template!r}; known are {', '.join(sorted(TEMPLATES))}")
    if row.prompt is None:
        text = _complete(template, row, TEMPLATES[template].prompt, tokenizer, row)
        return PromptText(text, begins=True)
    return PromptText(row.prompt, begins=True)


def render_answer(
    tokenizer: "PreTrainedTokenizerBase", row: Row, answer: Mapping[str, Any], prompt: PromptText, template: str
) -> PromptText:
    """Return the text of `answer`, from where `prompt` (of `render_prompt`) ends to where the student must stop.

    It is tokenised by itself, as the student's own answers are, so that the prompt's tokens are a prefix of the whole.
    Raises `DataError` where the prompt is no prefix of the conversation that the template writes.
    """
    end = tokenizer.eos_token or ""
    whole = TEMPLATES[template].whole
    if row.prompt is not None or whole is None:
        _complete(template, row, check_answer, answer, answer["content"])
        return PromptText(answer["content"] + end, begins=False)
    text = _complete(template, row, whole, tokenizer, row, answer)
    if not text.startswith(prompt.text):
        raise DataError(
            f"row {row.id}: the template writes an answered conversation so that its prompt is no prefix of it, and the"
            " student would be asked in another way than it has learned; use another template"
        )
    text = text[len(prompt.text) :]
    # what a template writes behind the end of a turn is never sampled
    text = text[: text.rindex(end) + len(end)] if end and end in text else text.removesuffix("\n")
    _complete(template, row, check_answer, answer, text)
    return PromptText(text, begins=False)


def _complete(template: str, row: Row, write: Callable[..., Any], *values: Any) -> Any:
    """Call `write` with `values`; raises `DataError` if the template drops a part of the row."""
    try:
        return write(*values)
    except TemplateOmission as left:
        raise DataError(f"row {row.id}: the chat template ({template}) {left}") from None


def tokenize(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[PromptText]) -> list[list[int]]:
    """Return the token ids of each text, in order; many at once are tokenised in parallel."""
    return token_ids(tokenizer, [text.text for text in texts], [text.begins for text in texts])


def _chat(chat_template: str | None = None, **variables: Any) -> Template:
    """Make a template that renders by `chat_template`, or by the tokenizer's own where that is None."""

    def render(tokenizer: "PreTrainedTokenizerBase", row: Row, *answer: Mapping[str, Any]) -> str:
        import jinja2

        if chat_template is None and not tokenizer.chat_template:
            raise NoChatTemplate(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; "
                "set the template to `chatml` or `base`, or give rows with `prompt` in place of `messages`"
            )
        values = {**variables, **row.variables}

        def write(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
            return str(
                tokenizer.apply_chat_template(
                    messages,
                    tools=tools or None,
                    chat_template=chat_template,
                    add_generation_prompt=not answer,
                    tokenize=False,
                    **values,
                )
            )

        source, variant = str(chat_template or tokenizer.chat_template), repr((sorted(values.items()), bool(answer)))
        try:
            return render_complete(write, source, variant, thaw([*row.messages, *answer]), thaw(row.tools))
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise DataError(f"row {row.id}: the chat template refuses its messages: {error}") from error

    return Template(render, render, chat_template)


def _around(before: str, after: str) -> Template:
    """Make a template that puts a fixed text around the one message of a user: for models that never saw a chat."""

    def render(tokenizer: "PreTrainedTokenizerBase", row: Row) -> str:
        if [message["role"] for message in row.messages] != ["user"]:
            raise DataError(f"row {row.id}: this template takes one message of role user and no other")
        if row.tools:
            raise TemplateOmission(f"leaves out the tool {tool_name(row.tools[0])!r}; use a template that writes tools")
        return f"{before}{row.messages[0]['content']}{after}"

    return Template(render)


TEMPLATES: dict[str, Template] = {
    "native": _chat(),
    "native_nonthinking": _chat(enable_thinking=False),
    "qwen2_5": _chat(),
    "qwen3": _chat(enable_thinking=True),
    "qwen3_nothink": _chat(enable_thinking=False),
    "chatml": _chat(CHATML),
    "base": _around(*BASE),
    "empty": _around(*EMPTY),
}
