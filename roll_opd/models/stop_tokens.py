"""Find the tokens that a chat template writes after an answer, and the stop tokens of a model, without transformers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from roll_opd.models.model_files import ModelFilesError, read_json
from roll_opd.models.tokenizer_files import chat_template_of, read_tokenizer, special_tokens

_QUESTION, _ANSWER = "roll-opd-question", "roll-opd-answer"


@dataclass(frozen=True)
class TurnEnd:
    """The text and the special tokens that follow an answer in a conversation."""

    text: str  # without blanks at both ends; may be ""
    blanks: str  # the text, if it has nothing but blanks
    ids: tuple[int, ...]  # ids of its special tokens, in order, or of the single ordinary token
    names: tuple[str, ...]  # tokens with these ids


@dataclass(frozen=True)
class StopTokens:
    """Stop tokens of generation, and a text that names their sources."""

    ids: frozenset[int]
    words: str


class _Generation(Extension):
    """The {% generation %} tag of transformers, which does not change the text."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def turn_end(path: Path, template: str | None = None) -> TurnEnd | None:
    """Return the text and the tokens that a chat template writes after an answer.

    `template` is by default the template of the tokenizer. Returns None if there is no template, if the template cannot
    be rendered, if it drops the answer, or if the vocabulary cannot be read.
    """
    source = chat_template_of(path) if template is None else template
    if isinstance(source, list):  # several, by name
        source = {str(one.get("name")): one.get("template") for one in source if isinstance(one, dict)}
    source = source.get("default") if isinstance(source, dict) else source
    if not isinstance(source, str):
        return None
    turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = (
            _environment()
            .from_string(source)
            .render(messages=turns, tools=None, documents=None, add_generation_prompt=False, **special_tokens(path))
        )
        known = read_tokenizer(path)
    except (jinja2.TemplateError, ModelFilesError, TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return None
    _, found, after = text.rpartition(_ANSWER)
    if not found or known is None:
        return None
    return _read(after, {token: number for number, token in known.by_id.items()}, added_tokens(path))


def _read(after: str, tokens: Mapping[str, int], added: Mapping[str, int]) -> TurnEnd:
    names: list[str] = []
    place = 0
    while place < len(after):
        here = max((token for token in added if after.startswith(token, place)), key=len, default="")
        names += [here] if here else []
        place += len(here) or 1
    text = after.strip()
    if not names and text in tokens:
        names = [text]
    ids = tuple(added.get(name, tokens.get(name, -1)) for name in names)
    return TurnEnd(text, "" if text else after, ids, tuple(names))


def added_tokens(path: Path) -> dict[str, int]:
    """Return token -> id for a tokenizer's added tokens, such as chat-template tokens."""
    reading = read_tokenizer(path)
    return {token: number for token, number in reading.added.items() if token.strip()} if reading else {}


def stop_tokens(path: Path, engine_args: Mapping[str, Any]) -> StopTokens:
    """Return the stop tokens that a vLLM engine with `engine_args` uses.

    The stop tokens are the tokenizer's eos_token, and the eos_token_id of generation_config.json. If this file does not
    exist, the eos_token_id of config.json is used. An eos_token_id in `override_generation_config` is added.
    """
    ids: set[int] = set()
    words: list[str] = []
    reading = read_tokenizer(path)
    tokens = {token: number for number, token in reading.by_id.items()} if reading else {}
    if (eos := special_tokens(path).get("eos_token")) in tokens:
        ids.add(tokens[eos])
        words.append(f"eos_token {eos} ({tokens[eos]}) of the tokenizer")
    files = [name for name in ("generation_config.json", "config.json") if (path / name).is_file()]
    given = engine_args.get("override_generation_config") or {}
    sources = [("override_generation_config", given.get("eos_token_id"))]
    if files and engine_args.get("generation_config") in (None, "auto"):
        sources.append((files[0], read_json(path / files[0]).get("eos_token_id")))
    for name, value in sources:
        if found := [number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)]:
            ids.update(found)
            words.append(f"eos_token_id {', '.join(map(str, found))} of {name}")
    return StopTokens(frozenset(ids), " and ".join(words) or "no token at all")


def _environment() -> ImmutableSandboxedEnvironment:
    """Return transformers' jinja2 environment for chat templates."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda text: text}
    return environment
