"""Checks for the instructions of Tulu 3's RLVR-IFeval rows (arXiv 2411.15124), which ROLL's ifeval domain uses.

The instructions are the instructions of IFEval, with other names and arguments. Most of them require exact counts.
"""

from collections.abc import Callable

from roll_opd.extras.graders.instructions import rules
from roll_opd.extras.graders.instructions.rules import Relation, count_capital_words, count_sentences


def keywords(text: str, keyword_list: list[str]) -> bool:
    return rules.keywords_existence(text, keyword_list)


def keyword_frequency(text: str, word: str, N: int) -> bool:
    return rules.count_word(text, word) == N


def letter_frequency(text: str, letter: str, N: int) -> bool:
    """Check that a letter occurs exactly N times; upper and lower case are different letters."""
    return text.count(letter) == N


def paragraph_count(text: str, N: int) -> bool:
    """Check that the text has exactly N paragraphs, separated by `* * *`.

    No paragraph may be empty.
    """
    paragraphs = text.split("* * *")
    return len(paragraphs) == N and all(map(str.strip, paragraphs))


def word_constraint(text: str, N: int, quantifier: Relation) -> bool:
    """Check the number of words, which are separated by spaces.

    With the quantifier "around", the number may differ from N by N / 10, or by 1 if that is larger.
    """
    return rules.holds(len(text.split()), quantifier, N, slack=max(round(N * 0.1), 1))


def sentence_constraint(text: str, N: int, quantifier: Relation) -> bool:
    return rules.holds(count_sentences(text), quantifier, N, slack=1)


def paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    found = text.split("\n\n")
    return len(found) == N and 1 <= i <= N and found[i - 1].strip().startswith(first_word)


def postscript(text: str, postscript_marker: str) -> bool:
    """Check that the text has the marker, and more text after the marker."""
    return bool(text.partition(postscript_marker)[2].strip())


def placeholders(text: str, N: int) -> bool:
    return rules.number_placeholders(text, N)


def bullet_points(text: str, N: int) -> bool:
    return rules.number_bullet_lists(text, N)


def one_of(text: str, options: list[str]) -> bool:
    """Check that the text is one of the options; case and a final period are ignored."""
    return text.strip().rstrip(".").lower() in {option.strip().rstrip(".").lower() for option in options}


def highlighted_sections(text: str, N: int) -> bool:
    return rules.number_highlighted_sections(text, N)


def sections(text: str, N: int, section_splitter: str) -> bool:
    return text.count(section_splitter) == N


def repeat_prompt(text: str, original_prompt: str) -> bool:
    return rules.repeat_prompt(text, original_prompt)


def capital_words(text: str, N: int, quantifier: Relation) -> bool:
    return rules.holds(count_capital_words(text), quantifier, N)


FUNCTIONS: dict[str, Callable[..., bool]] = {
    "verify_keywords": keywords,
    "verify_keyword_frequency": keyword_frequency,
    "validate_forbidden_words": rules.no_forbidden_words,
    "verify_letter_frequency": letter_frequency,
    "validate_response_language": rules.response_language,
    "verify_paragraph_count": paragraph_count,
    "validate_word_constraint": word_constraint,
    "verify_sentence_constraint": sentence_constraint,
    "validate_paragraphs": paragraphs,
    "verify_postscript": postscript,
    "validate_placeholders": placeholders,
    "verify_bullet_points": bullet_points,
    "validate_title": rules.title,
    "validate_choice": one_of,
    "validate_highlighted_sections": highlighted_sections,
    "validate_sections": sections,
    "validate_json_format": rules.json_format,
    "validate_repeat_prompt": repeat_prompt,
    "validate_two_responses": rules.two_responses,
    "validate_uppercase": rules.english_capital,
    "validate_lowercase": rules.english_lowercase,
    "validate_frequency_capital_words": capital_words,
    "validate_end": rules.end_checker,
    "validate_quotation": rules.quotation,
    "validate_no_commas": rules.no_comma,
}
