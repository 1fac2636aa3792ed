"""From a row to prompt tokens: the tokenizer's own chat template, or one named the way ROLL names them.

A conversation goes through the template; a row that brings a plain `prompt` has written its own text, and
that text is tokenised as it is, whatever the template.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from roll_opd.data.rows import DataError, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Encoder = Callable[["PreTrainedTokenizerBase", Row], list[int]]


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a Hugging Face model directory; `DataError` where there is none that loads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"no tokenizer could be loaded from {path}: {error}") from error


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", row: Row, template: str = "native") -> list[int]:
    """The prompt tokens of `row`, ending where the student's answer begins.

    `template` is one of `TEMPLATES`. Raises `DataError` for a name that is not, for a tokenizer without a
    chat template where one is needed, and where the template refuses the conversation.
    """
    encoder = TEMPLATES.get(template)
    if encoder is None:
        raise DataError(f"unknown template {template!r}; known are {', '.join(sorted(TEMPLATES))}")
    if row.prompt is not None:
        return _tokenize(tokenizer, row.prompt)
    return encoder(tokenizer, row)


def _chat(chat_template: str | None = None, **variables: Any) -> Encoder:
    """An encoder through `chat_template`, or through the tokenizer's own where that is None."""

    def encode(tokenizer: "PreTrainedTokenizerBase", row: Row) -> list[int]:
        import jinja2

        if chat_template is None and not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; "
                "set the template to `chatml` or `base`, or give rows with `prompt` in place of `messages`"
            )
        try:
            tokens = tokenizer.apply_chat_template(
                [dict(message) for message in row.messages],
                chat_template=chat_template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,  # else transformers 5 returns a BatchEncoding
                **variables,
            )
        except jinja2.TemplateError as error:
            raise DataError(f"row {row.id}: the chat template refuses its messages: {error}") from error
        return list(tokens)

    return encode


def _plain(tokenizer: "PreTrainedTokenizerBase", row: Row) -> list[int]:
    """The contents of the messages, one a line, and nothing else: for models that never saw a chat."""
    return _tokenize(tokenizer, "\n".join(message["content"] for message in row.messages))


def _tokenize(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    # A text that already begins with the beginning-of-sequence token must not get a second one
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return list(tokenizer(text, add_special_tokens=not has_bos)["input_ids"])


TEMPLATES: dict[str, Encoder] = {
    "native": _chat(),
    "native_nonthinking": _chat(enable_thinking=False),
    "qwen2_5": _chat(),
    "qwen3": _chat(enable_thinking=True),
    "qwen3_nothink": _chat(enable_thinking=False),
    "chatml": _chat(CHATML),
    "base": _plain,
    "empty": _plain,
}
