"""No rule takes long for any text: 100 kB of texts on which patterns could backtrack at every character."""

import inspect
import json
import random
import time
from typing import Any

import pytest
from langdetect import detector_factory

from roll_opd.extras.graders.instructions.functions import FUNCTIONS
from roll_opd.extras.graders.instructions.rules import INSTRUCTIONS
from roll_opd.rewards.interface import RewardSample
from roll_opd.rewards.reward_registry import resolve
from tests.cover import cover, tiered

LENGTH = 100_000  # characters
SECONDS = 1.0  # for one of them
WORDS = r"""
    a A 1 . ... * ** ****** [ ] << >> { } \boxed{ \text{ \ $ ` ``` " ' - -- 1, -1. (A A' A- _ é 答案是 。 # ? !
    <think> </think> <answer> SECTION P.S. Mr. e.g. A.B. answer not
"""
PIECES = WORDS.split()
PIECES += [
    "\n",
    "\n\n",
    " ",
    "\t",
    "\x00",
    "\ud800",
    "* * *",
    "the answer is ",
    "answer: A ",
    "A or ",
    "A and ",
    "A ",
    "word ",
]
ARGUMENTS: dict[str, Any] = {
    "keywords": ["a", "zz"],
    "forbidden_words": ["aaa", "zz"],
    "keyword_list": ["a"],
    "options": ["a"],
    **dict.fromkeys(("relation", "let_relation", "capital_relation", "quantifier"), "at least"),
    **dict.fromkeys(("keyword", "letter", "first_word", "end_phrase", "word", "language"), "a"),
    **dict.fromkeys(("section_spliter", "section_splitter", "prompt_to_repeat", "original_prompt"), "SECTION"),
    "postscript_marker": "P.P.S",
}


def repeated() -> list[tuple[str, str]]:
    """Each piece again and again: alone and in a box."""
    runs = [(piece * LENGTH)[: LENGTH - 12] for piece in PIECES]
    return [(run + "x!", rf"\boxed{{{run}}}") for run in runs]


def mixed() -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(PIECES, k=LENGTH // 4))[:LENGTH] for _ in range(5)]


TEXTS = [*(text for both in repeated() for text in both), *mixed()]
# every second piece, alone and in a box in turns; the others, and each in the other way, nightly
SOME = [*(both[place // 2 % 2] for place, both in enumerate(repeated()) if place % 2 == 0), *mixed()[:2]]


def arguments_of(rule: Any) -> dict[str, Any]:
    return {name: ARGUMENTS.get(name, 3) for name in list(inspect.signature(rule).parameters)[1:]}


def ifeval_rows() -> list[tuple[str | None, dict[str, Any]]]:
    """Rows that name every rule but the language's, which has its own test."""
    instructions = {name: arguments_of(rule) for name, rule in INSTRUCTIONS.items() if "language" not in name}
    functions = [
        {"func_name": name, **arguments_of(rule)} for name, rule in FUNCTIONS.items() if "language" not in name
    ]
    everything = {"instruction_id_list": list(instructions), "kwargs": list(instructions.values())}
    return [(None, everything), *((json.dumps(truth), {}) for truth in functions)]


CASES: list[tuple[str, dict[str, Any], list[tuple[str | None, dict[str, Any]]]]] = [
    ("ifeval", {"loose": True}, ifeval_rows()),
    ("multiple_choice", {}, [("B", {"options": ["Rome", "Paris", "aaa"]})]),
    ("crossthinkqa", {}, [("Paris", {})]),
    ("general_rule", {"rule": "exact"}, [("Paris", {})]),
    ("general_rule", {"rule": "contains"}, [("a b", {})]),
    ("general_rule", {"rule": "f1"}, [("a b c", {})]),
    ("general_rule", {"rule": "number"}, [("12", {})]),
    ("general_rule", {"rule": "regex"}, [("(a|aa)+$", {})]),
    ("format", {}, [(None, {})]),
    ("format", {"pattern": "(a|aa)+$"}, [(None, {})]),
]


@pytest.mark.slow
@pytest.mark.parametrize("texts", tiered([SOME, TEXTS], [SOME]), ids=["some", "all"])
@pytest.mark.parametrize(
    ("worker", "options", "rows"),
    tiered(CASES, cover(CASES, of=lambda case: (case[0],))),
    ids=lambda value: str(value)[:40],
)
def test_it_is_scored_in_time(
    worker: str, options: dict[str, Any], rows: list[tuple[str | None, dict[str, Any]]], texts: list[str]
) -> None:
    reward = resolve(worker, options)
    for text in texts:
        for truth, row in rows:
            began = time.thread_time()  # of this thread, so that a busy machine does not count
            reward([RewardSample("r", text, truth, "t", row)])
            assert time.thread_time() - began < SECONDS, (text[:20], truth)


def test_the_language_of_it_is_found_in_time() -> None:
    detector_factory.init_factory()  # reads its profiles once
    row = {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "en"}]}
    reward = resolve("ifeval")
    for text in TEXTS:
        began = time.thread_time()
        reward([RewardSample("r", text, None, "t", row)])
        assert time.thread_time() - began < SECONDS, text[:20]
