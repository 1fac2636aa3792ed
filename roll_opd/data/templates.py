"""Render rows with a chat template, and tokenise them, or text in the middle of a sequence (`MidText`).

The template is the tokenizer's, or one of the templates that ROLL names. It renders conversations; a plain `prompt` is
tokenised unchanged. A sequence gets a beginning-of-sequence token (BOS) if the tokenizer adds one. No other special
token is added.

If a template writes the date, it writes the date on which the run started, in every process and also after a resume.

Tokenizers in SentencePiece's format write a mark of a word boundary (`▁`) before the first word of a text, and some of
them after each added token. A text that continues other text has no such mark.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from roll_opd.base.frozen import thaw
from roll_opd.base.installed import GENERIC_TOKENIZERS
from roll_opd.data.messages import tool_name
from roll_opd.data.row_formats import DataError, Row
from roll_opd.data.template_check import TemplateOmission, check_answer, render_complete

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@lru_cache(maxsize=16)
def mid_text(tokenizer: Any) -> "MidText | None":
    """Return the encoder of text after other text; None if `tokenizer` encodes such text as the start of a sequence."""
    found = MidText(tokenizer)
    return found if found.differs else None


class MidText:
    """Encodes text after other text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_python = backend is None
        self._inside = backend and _without_start(backend)
        # the others are found only where the normalised text has them, for example as `▁<tag>`
        added = {n: one for n, one in tokenizer.added_tokens_decoder.items() if not _is_changed(one, backend)}
        self._added = {str(token): number for number, token in added.items()}
        self._greedy = {str(token) for token in added.values() if token.rstrip}
        longest_first = sorted(added.values(), key=lambda token: len(str(token)), reverse=True)
        patterns = [(r"\s*" if token.lstrip else "") + re.escape(str(token)) for token in longest_first]
        self._token = re.compile("|".join(patterns) or "(?!)")
        self.differs = bool(self._is_python or self._inside or self._greedy)

    def ids(self, text: str, before: str) -> list[int]:
        """Return the token ids of `text` after the text `before`.

        The tokens of `before` are unchanged, so no token contains parts of both texts.
        """
        if self._is_python:
            start, whole = self._alone(before), self._alone(before + text)
            return whole[len(start) :] if whole[: len(start)] == start else self._alone(text)
        last = self._last_added(before)
        if last is not None:
            ids = self._alone(last + text)
            if ids[:1] == [self._added[last]]:
                return ids[1:]
        if self._inside is None:
            return self._alone(text)
        found = self._token.search(text)
        end = found.start() if found else len(text)  # an added token and the text after it are encoded as usual
        return [*self._inside.encode(text[:end], add_special_tokens=False).ids, *self._alone(text[end:])]

    def _alone(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _last_added(self, before: str) -> str | None:
        """Return the added token at the end of `before`, which may be followed by blanks that it includes."""
        blank = before.rstrip()
        ends = [name for name in self._added if (blank if name in self._greedy else before).endswith(name)]
        return max(ends, key=len, default=None)


def _is_changed(token: Any, backend: Tokenizer | None) -> bool:
    """Return whether the tokenizer normalises the text of an added token to another text."""
    text = str(token)
    return bool(backend and backend.normalizer and token.normalized and backend.normalizer.normalize_str(text) != text)


def _without_start(backend: Tokenizer) -> Tokenizer | None:
    """Return the tokenizer without the steps for the start of a text; None if it has no such steps."""
    content = json.loads(backend.to_str())
    changed = content | {name: _inside(content[name]) for name in ("normalizer", "pre_tokenizer")}
    if changed == content:
        return None
    for one in changed["added_tokens"]:
        if one["normalized"] and backend.normalizer:
            one["content"] = backend.normalizer.normalize_str(one["content"])
    return Tokenizer.from_str(json.dumps(changed | {"truncation": None, "padding": None}))


def _inside(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer without its steps for the start of a text."""
    if part is None or part["type"] == "Prepend":
        return None
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            return {**part, name: [step for step in map(_inside, part[name]) if step is not None]}
    changes = {"prepend_scheme": "never", "add_prefix_space": False, "strip_left": False}
    return part | {key: value for key, value in changes.items() if key in part}


_PROBE = "a"  # any text


def token_ids(tokenizer: Any, texts: Sequence[str], befores: Sequence[str | None]) -> list[list[int]]:
    """Return the token ids of each text.

    `befores` has the text of the sequence before each text, or None for a text that begins a sequence. Such a text gets
    the BOS that the tokenizer adds. A text that already starts with the BOS (possibly after blanks) gets no second BOS.
    """
    if not texts:
        return []
    found: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    if any(befores) and (inside := mid_text(tokenizer)):
        found = [
            inside.ids(text, before) if before else ids for text, before, ids in zip(texts, befores, found, strict=True)
        ]
    bos = added_bos(tokenizer) if None in befores else None
    if bos is None:
        return found
    written = tokenizer.convert_ids_to_tokens(bos)
    return [
        [bos, *ids] if before is None and ids[:1] != [bos] and not text.lstrip().startswith(written) else ids
        for text, before, ids in zip(texts, befores, found, strict=True)
    ]


def added_bos(tokenizer: Any) -> int | None:
    """Return the id of the BOS that `tokenizer` adds before a text, or None if it adds no BOS."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    plain, whole = (tokenizer(_PROBE, add_special_tokens=special)["input_ids"] for special in (False, True))
    places = range(len(whole) - len(plain) + 1)
    start = next((place for place in places if whole[place : place + len(plain)] == plain), 0)
    return bos if bos in whole[:start] else None


VARIABLE = "ROLL_OPD_RUN_START"  # environment variable of processes that render: local time in ISO 8601


CHAT = "ROLL_OPD_CHAT_TEMPLATE_KWARGS"  # environment variable of the same processes: JSON of the run's variables


def set_date(moment: datetime) -> None:
    """Set the run's date to `moment`, in this process and in processes that inherit its environment."""
    os.environ[VARIABLE] = moment.isoformat()


def set_chat_variables(values: Mapping[str, Any]) -> None:
    """Set the run's variables of chat templates, in this process and in processes that inherit its environment."""
    os.environ[CHAT] = json.dumps(thaw(values))


def variables() -> dict[str, str]:
    """Return the environment variables that pass the run's date and chat variables to another process."""
    return {name: os.environ[name] for name in (VARIABLE, CHAT) if name in os.environ}


def writes_date(tokenizer: Any) -> bool:
    """Whether a chat template of `tokenizer` writes the date."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))


def with_date(tokenizer: Any, moment: datetime | None = None) -> Any:
    """Return `tokenizer` with `moment` as the date that its chat template writes.

    If `moment` is None, the template writes the run's date, or the current date if the run's date is not set.
    """
    if writes_date(tokenizer):
        moment = moment or (datetime.fromisoformat(os.environ[VARIABLE]) if VARIABLE in os.environ else datetime.now())
        tokenizer.apply_chat_template = partial(
            tokenizer.apply_chat_template, strftime_now=partial(datetime.strftime, moment)
        )
    return tokenizer


CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EMPTY = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
# The template of DeepSeek-R1-Zero (arXiv 2501.12948, table 1), with \boxed{}, which rule-based rewards search for
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
    """Text to tokenise.

    `before` is the text of the sequence before it. If it is None, the text begins a sequence and gets the BOS that the
    tokenizer adds (see `token_ids`).

    Raises `DataError` for text that is not valid UTF-8. Parts of a row that only a template reads are checked here for
    the first time.
    """

    text: str
    before: str | None = None

    def __post_init__(self) -> None:
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError("the text has half of a surrogate pair, which no tokenizer accepts") from None


class UnusableTemplate(DataError):
    """Raised if a chat template cannot render any row."""


class NoChatTemplate(UnusableTemplate):
    """Raised if the tokenizer lacks the chat template that the rows need."""


@dataclass(frozen=True)
class Template:
    """Renders a conversation as text.

    - `prompt`: function that renders the part before the answer.
    - `whole`: function that renders the conversation with an answer. If it is None, the text of the answer follows the
      prompt unchanged and ends with the end-of-sequence token.
    """

    prompt: Callable[["PreTrainedTokenizerBase", Row], str]
    whole: Callable[["PreTrainedTokenizerBase", Row, Mapping[str, Any]], str] | None = None
    source: str | None = None  # source of the chat template; None: the tokenizer's template
    variables: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template that it sets
    exported: str | None = (
        None  # the same prompts as a chat template for other programs; None: the tokenizer's template
    )

    @property
    def is_of_tokenizer(self) -> bool:
        """Whether this template renders with the chat template of the tokenizer."""
        return self.whole is not None and self.source is None


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model of the run: of the student, or of a teacher. Raises `DataError` on failure.

    Its chat template gets the run's date and the run's `chat_template_kwargs`.
    """
    tokenizer: Any = load_plain_tokenizer(path)
    if values := json.loads(os.environ.get(CHAT, "{}")):
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **values)
    return tokenizer


def load_plain_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model that gets no `chat_template_kwargs`, such as a judge. Raises `DataError`."""
    from transformers import PreTrainedTokenizerFast

    try:
        if _tokenizer_class(path) in GENERIC_TOKENIZERS:  # `AutoTokenizer` imports torch and takes seconds
            return with_date(PreTrainedTokenizerFast.from_pretrained(path))
        from transformers import AutoTokenizer

        return with_date(AutoTokenizer.from_pretrained(path, trust_remote_code=False))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"no tokenizer could be loaded from {path}: {error}") from error


def _tokenizer_class(path: str) -> str | None:
    directory = Path(path)
    if not (directory / "tokenizer.json").is_file() or not (directory / "tokenizer_config.json").is_file():
        return None
    return json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")


def render_prompt(tokenizer: "PreTrainedTokenizerBase", row: Row, template: str = "native") -> PromptText:
    """Return the prompt text of `row`, up to the start of the answer.

    `template` is one of `TEMPLATES`. Raises `DataError` if the name is unknown or if the template refuses the
    conversation. Raises `NoChatTemplate` if the tokenizer has no template.
    """
    if template not in TEMPLATES:
        raise DataError(f"unknown template {template!r}; known are {', '.join(sorted(TEMPLATES))}")
    if row.prompt is None:
        text = _complete(template, row, TEMPLATES[template].prompt, tokenizer, row)
        return PromptText(text)
    return PromptText(row.prompt)


def render_answer(
    tokenizer: "PreTrainedTokenizerBase", row: Row, answer: Mapping[str, Any], prompt: PromptText, template: str
) -> PromptText:
    """Return the rendered text of `answer`, up to and including the end-of-sequence token.

    `prompt` is the result of `render_prompt`; the answer follows it. The answer is tokenised separately, like sampled
    responses, so that the tokens of the prompt are a prefix of the tokens of the conversation. Raises `DataError` if
    the prompt is not a prefix of the rendered conversation.
    """
    end = tokenizer.eos_token or ""
    whole = TEMPLATES[template].whole
    if row.prompt is not None or whole is None:
        _complete(template, row, check_answer, answer, answer["content"])
        return PromptText(answer["content"] + end, prompt.text)
    text = _complete(template, row, whole, tokenizer, row, answer)
    if not text.startswith(prompt.text):
        raise DataError(
            f"row {row.id}: the template renders the prompt differently if its answer follows, so training and"
            " sampling would use different prompts; use another template"
        )
    text = text[len(prompt.text) :]
    # the student never samples text after the end-of-sequence token
    text = text[: text.rindex(end) + len(end)] if end and end in text else text.removesuffix("\n")
    _complete(template, row, check_answer, answer, text)
    return PromptText(text, prompt.text)


def _complete(template: str, row: Row, write: Callable[..., Any], *values: Any) -> Any:
    """Return the text that `write(*values)` renders. Raises `DataError` if the template drops a part of the row."""
    try:
        return write(*values)
    except TemplateOmission as left:
        raise DataError(f"row {row.id}: the chat template ({template}) {left}") from None


def tokenize(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[PromptText]) -> list[list[int]]:
    """Return the token ids of each text, in order. The texts are tokenised in parallel."""
    return token_ids(tokenizer, [text.text for text in texts], [text.before for text in texts])


def _chat(chat_template: str | None = None, **variables: Any) -> Template:
    """Return a template that renders with `chat_template`. If it is None, the tokenizer's template is used."""

    def render(tokenizer: "PreTrainedTokenizerBase", row: Row, *answer: Mapping[str, Any]) -> str:
        import jinja2

        if chat_template is None and not tokenizer.chat_template:
            raise NoChatTemplate(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template; set the template to"
                " `chatml` or `base`, or use rows with `prompt` instead of `messages`"
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

    return Template(render, render, chat_template, variables, chat_template)


def _around(before: str, after: str) -> Template:
    """Return a template that puts fixed text around a single user message. For models without chat training."""

    def render(tokenizer: "PreTrainedTokenizerBase", row: Row) -> str:
        if [message["role"] for message in row.messages] != ["user"]:
            raise DataError(f"row {row.id}: this template accepts only one message, of role user")
        if row.tools:
            raise TemplateOmission(f"leaves out the tool {tool_name(row.tools[0])!r}; use a template that writes tools")
        return f"{before}{row.messages[0]['content']}{after}"

    refusal = "{{ raise_exception('this template accepts only one message, of role user') }}"
    is_other = "messages | length != 1 or messages[0]['role'] != 'user'"
    text = f"{json.dumps(before)} + messages[0]['content'] + {json.dumps(after)}"
    return Template(render, exported=f"{{% if {is_other} %}}{refusal}{{% endif %}}{{{{ {text} }}}}")


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
