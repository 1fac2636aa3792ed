"""IFEval's instructions: texts that follow one, mutations that do not, rows that name instructions, and bad rows."""

import inspect
import json
import random
from typing import Any

import pytest

from roll_opd.extras.graders.instructions.functions import FUNCTIONS
from roll_opd.extras.graders.instructions.rules import INSTRUCTIONS, count_capital_words, count_sentences, count_words
from roll_opd.extras.graders.rewards.ifeval import IFEval
from roll_opd.rewards.interface import RewardError, RewardSample, Score
from roll_opd.rewards.reward_registry import resolve

# instruction -> arguments, a text that follows it, and texts that do not
TABLE: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "keywords:existence": ({"keywords": ["alpha", "beta"]}, "Alpha, then BETA.", ["alpha only", "alphabet"]),
    "keywords:frequency": (
        {"keyword": "cat", "frequency": 2, "relation": "at least"},
        "A cat. A Cat.",
        ["A cat.", "A dog."],
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["bad", "c++"]}, "Badly done in C.", ["BAD idea", "in C++."]),
    "keywords:letter_frequency": (
        {"letter": "Z", "let_frequency": 2, "let_relation": "less than"},
        "Zoo.",
        ["pizza", "Z z"],
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "less than"},
        "Dr. Smith paid 3.50 dollars",
        ["One. Two.", "One? Two! Three."],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2},
        "One.\n***\nTwo.",
        ["One.\n\nTwo.", "One.\n***\n***\nTwo.", "1\n***\n2\n***\n3"],
    ),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "at least"},
        "one two three",
        ["one two", "one-two"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        'Hello.\n\n"Weekend, at last.',
        ["Hello.\n\nA weekend.", "Weekend.\n\nHello.", "Hello.\n\nWeekend.\n\nMore.", "Weekend"],
    ),
    "detectable_content:number_placeholders": (
        {"num_placeholders": 2},
        "[name] and [address]",
        ["[name]", "[a\nb] [c]"],
    ),
    "detectable_content:postscript": ({"postscript_marker": "P.P.S"}, "Bye.\n\nP. P. S. One more.", ["Bye. P.S. One."]),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2},
        "Items:\n* one\n  - two",
        ["* one", "* one\n* two\n* three", "**one**\n* two"],
    ),
    "detectable_format:constrained_response": ({}, "My answer is maybe.", ["Maybe.", "my answer is yes"]),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        "*one* and **two**",
        ["*one*", "** ** and *\n*", "2 * 3 = 6"],
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\nHi\nSECTION 2\nBye",
        ["SECTION 1", "SECTION\nSECTION", "Section 1 Section 2"],
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": [1]}\n```', ["{'a': 1}", '{"a": 1} done', "[" * 5000]),
    "detectable_format:title": ({}, "<<Joy>>\nA poem.", ["<< >>", "<<Joy\n>>", "<Joy>"]),
    "combination:two_responses": ({}, "One.\n******\nTwo.", ["One.", "One.******One.", "1******2******3"]),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hi. "}, "say hi.\nHi!", ["Hi!", "Well: say hi."]),
    "startend:end_checker": ({"end_phrase": "That is all."}, '"Yes. that is all."', ["That is all. Bye.", "Yes."]),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 3, "capital_relation": "at least"},
        "NASA and COVID-19 and U.S. papers",
        ["NASA and Nato", "nasa"],
    ),
    "change_case:english_capital": ({}, "ALL OF IT, 100%.", ["All of it.", "100%", "ВСЕ ЭТО"]),
    "change_case:english_lowercase": ({}, "all of it, 100%.", ["All of it.", "100%", "все это"]),
    "punctuation:no_comma": ({}, "No such sign.", ["One, two."]),
    "startend:quotation": ({}, ' "All of it." ', ['"All of it.', '"', "'All'"]),
}
# Tulu 3's functions, as its rows have them: every argument of every function, null where it is not meant
FUNCTION_TABLE: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "verify_keywords": ({"keyword_list": ["a b", "c"]}, "A B c", ["a b"]),
    "verify_keyword_frequency": ({"word": "cat", "N": 2}, "Cat and cat", ["cat", "cats and cats", "cat cat cat"]),
    "validate_forbidden_words": ({"forbidden_words": ["bad"]}, "good", ["bad"]),
    "verify_letter_frequency": ({"letter": "a", "N": 2}, "abA a", ["a", "aaa"]),
    "verify_paragraph_count": ({"N": 2}, "One\n* * *\nTwo", ["One", "One\n* * *\n", "1 * * * 2 * * * 3"]),
    "validate_word_constraint": ({"N": 20, "quantifier": "around"}, "word " * 18, ["word " * 17, "word " * 23]),
    "verify_sentence_constraint": ({"N": 2, "quantifier": "at most"}, "One. Two.", ["One. Two. Three."]),
    "validate_paragraphs": (
        {"N": 2, "first_word": "Second", "i": 2},
        "First.\n\nSecond one.",
        ["Second.\n\nFirst.", "First.\n\nSecond.\n\nThird.", "Second"],
    ),
    "verify_postscript": ({"postscript_marker": "P.S."}, "Bye. P.S. More.", ["Bye. P.S.", "Bye."]),
    "validate_placeholders": ({"N": 1}, "[name]", ["name"]),
    "verify_bullet_points": ({"N": 1}, "- one", ["one", "- one\n- two"]),
    "validate_title": ({}, "<<Joy>>", ["Joy"]),
    "validate_choice": ({"options": ["yes", "no"]}, "Yes.", ["e", "", "yes and no"]),
    "validate_highlighted_sections": ({"N": 1}, "*one*", ["one"]),
    "validate_sections": ({"N": 2, "section_splitter": "Part"}, "Part 1 a Part 2 b", ["Part 1", "Part Part Part"]),
    "validate_json_format": ({}, "{}", ["yes"]),
    "validate_repeat_prompt": ({"original_prompt": "Say hi."}, "Say hi. Hi", ["Hi"]),
    "validate_two_responses": ({}, "a******b", ["a******a"]),
    "validate_uppercase": ({}, "YES", ["Yes", ""]),
    "validate_lowercase": ({}, "yes", ["Yes"]),
    "validate_frequency_capital_words": ({"N": 1, "quantifier": "at most"}, "one TWO", ["ONE TWO"]),
    "validate_end": ({"end_phrase": "Bye."}, "Hi. Bye.", ["Bye. Hi."]),
    "validate_quotation": ({}, '"Hi"', ["Hi"]),
    "validate_no_commas": ({}, "Hi", ["Hi,"]),
}
LANGUAGE = {"language:response_language", "validate_response_language"}
EVERY_ARGUMENT = {name for function in FUNCTIONS.values() for name in inspect.signature(function).parameters} - {"text"}


def sample(response: str, truth: Any = None, **row: Any) -> RewardSample:
    return RewardSample("r", response, truth if truth is None else json.dumps(truth), "ifeval", row)


def value(response: str, names: list[str], arguments: list[Any], **options: bool) -> float | None:
    (score,) = IFEval(**options).score([sample(response, instruction_id_list=names, kwargs=arguments)])
    return score.value


def test_the_tables_hold_every_instruction() -> None:
    assert set(TABLE) | LANGUAGE == set(INSTRUCTIONS) | LANGUAGE
    assert set(FUNCTION_TABLE) | LANGUAGE == set(FUNCTIONS) | LANGUAGE
    assert (len(INSTRUCTIONS), len(FUNCTIONS)) == (25, 25)


@pytest.mark.parametrize("name", TABLE)
def test_an_instruction_is_followed_or_not(name: str) -> None:
    arguments, follows, others = TABLE[name]
    assert value(follows, [name], [arguments]) == 1.0
    assert value(f"<think>{others[0]}</think>\n{follows}", [name], [arguments]) == 1.0
    for other in [*others, " \n"]:
        assert value(other, [name], [arguments]) == 0.0, other


@pytest.mark.parametrize("name", FUNCTION_TABLE)
def test_a_function_of_tulus_rows_is_followed_or_not(name: str) -> None:
    arguments, follows, others = FUNCTION_TABLE[name]
    truth = {"func_name": name, **dict.fromkeys(EVERY_ARGUMENT), **arguments}
    scores = IFEval().score([sample(text, truth) for text in (follows, *others)])
    assert [score.value for score in scores] == [1.0] + [0.0] * len(others)


def test_numbers_are_counted_as_a_naive_count_does() -> None:
    rng = random.Random(0)
    for _ in range(200):
        words = [rng.choice(["cat", "Dog", "NASA", "an"]) for _ in range(rng.randint(1, 12))]
        sentences = rng.randint(1, 6)
        text = " ".join(words) + "." + " Then it rained!" * (sentences - 1)
        letters = sum(letter == "t" for letter in text.lower())
        assert (count_words(text), count_sentences(text)) == (len(words) + 3 * (sentences - 1), sentences)
        assert count_capital_words(text) == words.count("NASA")
        for wanted, relation, name, arguments in [
            (letters, "at least", "keywords:letter_frequency", ("letter", "let_frequency", "let_relation")),
            (
                len(words) + 3 * sentences - 3,
                "at least",
                "length_constraints:number_words",
                (None, "num_words", "relation"),
            ),
            (sentences, "at least", "length_constraints:number_sentences", (None, "num_sentences", "relation")),
        ]:
            subject, number, how = arguments
            given = {number: wanted, how: relation} | ({subject: "t"} if subject else {})
            assert value(text, [name], [given]) == 1.0
            assert value(text, [name], [given | {number: wanted + 1}]) == 0.0
            assert value(text, [name], [given | {how: "less than"}]) == 0.0


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", 0),
        ("...", 0),
        ("No point at all", 1),
        ("Mr. J. Smith met Dr. Who at 3.15 p.m. on Monday. He left.", 2),
        ("Fruit, e.g. apples, etc. are sold. Good!", 2),
        ("He lives in the U.S. She does not.", 2),
        ("He lives in the U.S. and works.", 1),
        ("1. First thing.\n2. Second thing.", 2),
        ('"Really?" he asked. (Yes.) Wait... What?!', 4),
        ("A heading\nand its line", 1),
        ("今天很好。明天呢？很好！", 3),
        ("It is I. Go.", 2),
    ],
)
def test_sentences_are_counted_by_the_rule(text: str, sentences: int) -> None:
    assert count_sentences(text) == sentences


def test_all_a_share_or_loosely() -> None:
    names, arguments = ["punctuation:no_comma", "startend:quotation"], [{}, {}]
    assert value("plain", names, arguments) == 0.0
    assert value("plain", names, arguments, partial=True) == 0.5
    (score,) = IFEval().score([sample("plain", instruction_id_list=names, kwargs=arguments)])
    assert score == Score(0.0, {"followed": 0.5}, "not followed")
    framed = 'Sure, here it is:\n**"plain"**\nEnjoy, all.'
    assert value(framed, names, arguments) == 0.0
    assert value(framed, names, arguments, loose=True) == 1.0
    assert value("Sure, no", names, arguments, loose=True) == 0.0


def test_rows_as_data_sets_have_them() -> None:
    instruction, function = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"N": None}]}, "validate_title"
    rows = [
        sample("a", instruction),
        sample("a", [{"instruction_id": ["punctuation:no_comma"], "kwargs": [None]}]),
        sample("a", instruction_id_list=("punctuation:no_comma",)),
        sample("a", instruction_id_list='["punctuation:no_comma"]', kwargs="[{}]"),
        sample("<<a>>", {"func_name": function}),
        sample("a b", {"func_name": "validate_word_constraint", "N": 2.0, "quantifier": "at least"}),
        sample("c)", {"func_name": "validate_choice", "options": "a), b), c)"}),
    ]
    assert [score.value for score in IFEval().score(rows)] == [1.0] * len(rows)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (sample("a"), "no instruction"),
        (RewardSample("r", "a", "not JSON", "t"), "no instruction"),
        (RewardSample("r", "a", "[" * 100_000, "t"), "no instruction"),
        (sample("a", 7), "no instruction"),
        (sample("a", {}), "no instruction"),
        (sample("a", instruction_id_list=[], kwargs=[]), "no instruction"),
        (sample("a", instruction_id_list=["punctuation:no_comma"], kwargs=[{}, {}]), "no instruction"),
        (sample("a", instruction_id_list=[7], kwargs=[{}]), "no instruction"),
        (sample("a", instruction_id_list=["punctuation:none"], kwargs=[{}]), "unknown instruction punctuation:none"),
        (sample("a", {"func_name": "exec"}), "unknown instruction exec"),
        (sample("a", {"func_name": "validate_end"}), "bad arguments of validate_end"),
        (sample("a", {"func_name": "verify_bullet_points", "N": "many"}), "bad arguments of verify_bullet_points"),
        (
            sample("a", {"func_name": "verify_bullet_points", "N": float("inf")}),
            "bad arguments of verify_bullet_points",
        ),
        (
            sample("a", {"func_name": "validate_word_constraint", "N": 1, "quantifier": "some"}),
            "bad arguments of validate_word_constraint",
        ),
    ],
)
def test_a_row_that_cannot_be_judged_has_no_value(row: RewardSample, reason: str) -> None:
    assert IFEval().score([row]) == [Score(None, reason=reason)]


def test_the_language_of_a_response() -> None:
    french = "Le chat dort sur la table parce qu'il fait froid dehors."
    for language, right in (("fr", 1.0), ("de", 0.0)):
        assert value(french, ["language:response_language"], [{"language": language}]) == right
    assert value("今天的天气很好，我们去公园散步吧。", ["language:response_language"], [{"language": "zh"}]) == 1.0
    assert value("123 !", ["language:response_language"], [{"language": "en"}]) == 0.0


def test_its_arguments_are_flags() -> None:
    with pytest.raises(RewardError, match="reward ifeval: loose is 'no'; write true or false"):
        resolve("ifeval", {"loose": "no"})
