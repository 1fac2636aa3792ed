"""Choose the view of a teacher from its plan and from the tokenizer files of student and teacher."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from roll_opd.config.plan import ModelPlan, TeacherPlan
from roll_opd.data.templates import TEMPLATES, load_tokenizer
from roll_opd.models.model_files import ModelFilesError
from roll_opd.models.model_info import read_model
from roll_opd.models.stop_tokens import stop_tokens, turn_end
from roll_opd.models.token_bytes import ByteEncoder
from roll_opd.models.tokenizer_files import special_tokens
from roll_opd.teachers.other_tokenizer import OtherTokenizer
from roll_opd.teachers.prefix_logprobs import PrefixLogprobs
from roll_opd.teachers.turn_markup import NO_MARKUP, TurnMarkup, turn_markup
from roll_opd.teachers.views import SameTokens, TeacherView


def view_of(teacher: TeacherPlan, student: ModelPlan) -> TeacherView:
    """Return the view of a teacher. Raises ModelFilesError if the tokenizers cannot be aligned."""
    if teacher.tokenizer is None:
        return SameTokens(teacher.name)
    template = TEMPLATES[teacher.context.template].source if teacher.context and teacher.context.template else None
    path, other = Path(student.path), Path(teacher.tokenizer)
    own = ByteEncoder(tokenizer_content(path), read_model(path).vocab)
    encoder = ByteEncoder(tokenizer_content(other))
    end = turn_end_token(other, encoder, template)
    ours = turn_end_token(path, own)
    ended = stop_tokens(path, {}).ids | (set() if ours is None else {ours})
    return OtherTokenizer(
        teacher.name,
        own.table,
        encoder,
        {} if end is None else dict.fromkeys(ended, end),
        _markup(path, None, ours, own.table.by_id),
        _markup(other, template, end, encoder.table.by_id),
        None if teacher.model is None else read_model(Path(teacher.model.path)).max_positions,
        PrefixLogprobs(own, encoder.table, teacher.prefix_topk) if teacher.prefix_topk else None,
    )


def tokenizer_content(path: Path) -> dict[str, Any]:
    """Return the loaded tokenizer as the content of a tokenizer.json.

    The class of a tokenizer may replace steps of its file, and add tokens. Raises ModelFilesError for a tokenizer that
    is written in Python.
    """
    loaded: Any = load_tokenizer(str(path))
    if not hasattr(loaded, "backend_tokenizer"):
        raise ModelFilesError(
            f"the tokenizer of {path} is the Python class {type(loaded).__name__}, so its tokens cannot be aligned with"
            " another tokenizer's; save it as a tokenizer.json"
        )
    return json.loads(loaded.backend_tokenizer.to_str())


def turn_end_token(path: Path, encoder: ByteEncoder, template: str | None = None) -> int | None:
    """Return the token that ends a turn in the chat template.

    If the template has no such token but writes blanks after an answer, such as a newline, and these blanks are one
    token, this token is returned. Otherwise the end-of-sequence token is returned, or None if it is missing too.

    Args:
        path: model directory with the tokenizer and its template.
        encoder: the encoder of this tokenizer.
        template: replaces the template of the tokenizer.
    """
    found = turn_end(path, template)
    if found and found.ids and found.ids[0] >= 0:
        return found.ids[0]
    blanks = encoder.encode_markup(found.blanks) if found else []
    if len(blanks) == 1:
        return blanks[0]
    text = special_tokens(path).get("eos_token")
    if not text:
        return None
    table = encoder.table
    in_vocabulary = table.by_id.index(text.encode()) if text.encode() in table.by_id else None
    return table.added.get(text, in_vocabulary)


def _markup(path: Path, template: str | None, end: int | None, tokens: tuple[bytes, ...]) -> TurnMarkup:
    tokenizer: Any = load_tokenizer(str(path))
    if not (template or tokenizer.chat_template):
        return NO_MARKUP
    render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True, chat_template=template)
    return turn_markup(render, "" if end is None else tokens[end].decode())
