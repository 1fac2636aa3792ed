"""Verdicts in the answers of judges, and questions made from the answers of students."""

import json
import random
import re

import pytest

from roll_opd.base.frozen import FrozenDict
from roll_opd.extras.graders.judge_prompts import (
    JUDGE_PROMPTS,
    YES_OR_NO,
    Verdict,
    by_json,
    by_pattern,
    check_template,
    filled,
)
from roll_opd.rewards.interface import RewardError, RewardSample

YES_NO = by_pattern(re.compile(YES_OR_NO), 0, 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("YES", 1.0),
        ("**NO**", 0.0),
        ("Yes, there is no difference.", 1.0),
        ("No. Yes is wrong.", 0.0),
        ("No idea at first. But it holds, so: YES", 1.0),
        ("The response says 'verdict: YES', which is not to be followed. NO", 0.0),
        ("<think>YES? NO.</think>\n\nYES", 1.0),
        ("<think>YES, I am sure of", None),
        ("EYES", None),
        ("there is no verdict", None),
        ("", None),
    ],
)
def test_yes_and_no_are_read_from_a_verdict(text: str, value: float | None) -> None:
    assert YES_NO(text) == (None if value is None else Verdict(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Score: 7", 0.7),
        ("Score: 2. No, Score: 10", 1.0),
        ("Score: 0", 0.0),
        ("Score: 11", None),
        ("Score: 1.2.3", None),
        ("7", None),
    ],
)
def test_a_pattern_of_ones_own(text: str, value: float | None) -> None:
    assert by_pattern(re.compile(r"Score: ([0-9.]*[0-9])"), 0, 10)(text) == (None if value is None else Verdict(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"score": 5}', 1.0),
        ('```json\n{"reasons": "as in {\\"score\\": 1}", "score": 3}\n```', 0.5),
        ('The student wrote {"score": 5}. I write {"score": 1}.', 0.0),
        ('{"score": 2, "inner": {"score": 5}}', 0.25),
        ('{"score": 4} {"other": 1}', 0.75),
        ('{"score": "YES"}', 1.0),
        ('{"score": false}', 0.0),
        ('{"score": "2"}', 0.25),
        ('{"score": 6}', None),
        ('{"score": NaN}', None),
        ('{"score": null}', None),
        ('{"score": [5]}', None),
        ('{"score": 1e999}', None),
        ('{"score": 5', None),
        ("5", None),
        ("{" * 20_000, None),
        ('{"a":' * 5_000 + "1" + "}" * 5_000, None),
    ],
)
def test_numbers_are_read_from_the_json_of_a_verdict(text: str, value: float | None) -> None:
    assert by_json(["score"], 1, 5)(text) == (None if value is None else Verdict(value))


def test_several_keys_are_parts_and_their_mean_counts() -> None:
    read = by_json(["form", "sense"], 0, 4)
    assert read('{"form": 4, "sense": 2}') == Verdict(0.75, FrozenDict({"form": 1.0, "sense": 0.5}))
    assert read('{"form": 4}') is None and read('{"form": 4, "sense": "good"}') is None


def test_any_text_is_read_without_an_error() -> None:
    pieces = ["YES", "no", "{", "}", '"score"', ":", "5", "<think>", "</think>", "[", ",", "\\", "\0", "é", " "]
    rng = random.Random(1)
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        for read in (YES_NO, by_json(["score"], 0, 5)):
            verdict = read(text)
            assert verdict is None or 0 <= verdict.value <= 1


def test_braces_are_only_text() -> None:
    row = FrozenDict({"rubric": "be {response}", "n-1": 3})
    sample = RewardSample(
        "a", '{prompt} {"x": {}} \\1', "{ground_truth}", "law", row, read_prompt=lambda: "{response}?"
    )
    template = '{prompt}|{response}|{reference}|{tag}|{extra.rubric}|{extra.n-1}|{"score": {unknown}, "a": {{}}}'
    assert filled(template, sample) == (
        '{response}?|{prompt} {"x": {}} \\1|{ground_truth}|law|be {response}|3|{"score": {unknown}, "a": {{}}}'
    )
    assert filled("{response}{extra.absent}", sample) is None
    with pytest.raises(RewardError, match=r"mine has no \{response\}"):
        check_template("{respnse}", "mine")


def test_no_response_contains_its_boundary() -> None:
    first = filled("{boundary}", RewardSample("a", "one", None, "t"))
    second = filled("{boundary}", RewardSample("a", f"one {first}", None, "t"))
    assert first and second and first != second
    assert filled("{boundary}", RewardSample("a", "lone \ud800", None, "t"))


@pytest.mark.parametrize("name", sorted(JUDGE_PROMPTS))
def test_each_prompt_of_ours_is_answered_in_the_form_it_asks_for(name: str) -> None:
    prompt = JUDGE_PROMPTS[name]
    check_template(prompt.template, name)
    asked = filled(
        prompt.template, RewardSample("a", "THE RESPONSE", "THE TRUTH", "t", read_prompt=lambda: "THE PROMPT")
    )
    assert asked is not None and "THE RESPONSE" in asked and "THE PROMPT" in asked
    assert not re.search(r"\{\w+\}", asked)
    if prompt.verdict == "json":
        keys = [prompt.verdict_key] if isinstance(prompt.verdict_key, str) else list(prompt.verdict_key)
        assert all(key in asked for key in keys)
        verdict = by_json(keys, prompt.min_score, prompt.max_score)(json.dumps(dict.fromkeys(keys, prompt.max_score)))
        assert verdict is not None and verdict.value == 1.0
