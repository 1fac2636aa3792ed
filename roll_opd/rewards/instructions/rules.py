"""Checks of IFEval's 25 instructions (Zhou et al. 2023, arXiv 2311.07911) by name.

A check takes the text and the arguments of the instruction under the names in the rows.
"""

import json
import re
from collections.abc import Callable
from typing import Literal

from roll_opd.rewards.instructions.language import is_language
from roll_opd.rewards.instructions.wording import count_capital_words, count_sentences, count_words

Relation = Literal["less than", "at least", "at most", "around"]
ENGLISH_SHARE = 0.9  # minimum share of a-z among the letters of an English text
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_HIGHLIGHT = re.compile(r"\*[^\n*]*\*")
_STRONG = re.compile(r"\*\*[^\n*]*\*\*")
_FENCE = re.compile(r"\A```(?:json)?", re.IGNORECASE)
_PARAGRAPH = re.compile(r"\s?\*\*\*\s?")


def holds(count: int, relation: Relation, wanted: int, slack: int = 0) -> bool:
    """Return whether a count satisfies a relation to a number; "around" allows a difference of `slack`."""
    if relation == "around":
        return abs(count - wanted) <= slack
    return {"less than": count < wanted, "at least": count >= wanted, "at most": count <= wanted}[relation]


def keywords_existence(text: str, keywords: list[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keywords)


def keywords_frequency(text: str, keyword: str, frequency: int, relation: Relation) -> bool:
    return holds(text.lower().count(keyword.lower()), relation, frequency)


def no_forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(count_word(text, word) for word in forbidden_words)


def count_word(text: str, word: str) -> int:
    """Count `word` in `text` as a separate word, ignoring case."""
    return len(re.findall(rf"(?<!\w){re.escape(word.lower())}(?!\w)", text.lower()))


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: Relation) -> bool:
    return holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(text: str, language: str) -> bool:
    return is_language(text, language)


def number_sentences(text: str, num_sentences: int, relation: Relation) -> bool:
    return holds(count_sentences(text), relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Number of paragraphs, separated by `***`; an empty first or last one does not count."""
    paragraphs = [paragraph.strip() for paragraph in _PARAGRAPH.split(text)]
    return all(paragraphs[1:-1]) and sum(map(bool, paragraphs)) == num_paragraphs


def number_words(text: str, num_words: int, relation: Relation) -> bool:
    return holds(count_words(text), relation, num_words)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """First word of a paragraph; paragraphs are separated by two newlines, empty ones keep their index."""
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
    if not 1 <= nth_paragraph <= len(paragraphs) or not paragraphs[nth_paragraph - 1]:
        return False
    first = re.split(r"[.,?!'\"]", paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"'), maxsplit=1)[0]
    return sum(map(bool, paragraphs)) == num_paragraphs and first.lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    return sum(map(count_placeholders, text.split("\n"))) >= num_placeholders


def count_placeholders(line: str) -> int:
    """Count the parts of a line in square brackets, such as [name]."""
    count, end = 0, -1
    while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start)) >= 0:
        count += 1
    return count


def postscript(text: str, postscript_marker: str) -> bool:
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return (
        re.search(known.get(postscript_marker, re.escape(postscript_marker.strip().lower())), text.lower()) is not None
    )


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    lines = [line.lstrip() for line in text.split("\n")]
    return (
        sum(line.startswith("-") or (line[:1] == "*" and line[1:2] not in ("*", "")) for line in lines) == num_bullets
    )


def constrained_response(text: str) -> bool:
    return any(answer in text for answer in CONSTRAINED)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    found = _HIGHLIGHT.findall(text) + _STRONG.findall(text)
    return sum(bool(part.strip("*").strip()) for part in found) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """Number of sections that start with the splitter and a number, such as `SECTION 1`."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    try:
        json.loads(_FENCE.sub("", text.strip()).removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    return any(map(_has_title, text.split("\n")))


def _has_title(line: str) -> bool:
    start, end = line.find("<<"), line.rfind(">>")
    return 0 <= start < end and bool(line[start:end].strip("<>").strip())


def two_responses(text: str) -> bool:
    """Exactly two different responses, separated by `******`, with nothing before or after."""
    responses = [response.strip() for response in text.split("******")]
    given = [response for response in responses if response]
    return all(responses[1:-1]) and len(given) == 2 and given[0] != given[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: Relation) -> bool:
    return holds(count_capital_words(text), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    return text.isupper() and in_english_letters(text)


def english_lowercase(text: str) -> bool:
    return text.islower() and in_english_letters(text)


def in_english_letters(text: str) -> bool:
    letters = [letter for letter in text if letter.isalpha()]
    return sum(map(str.isascii, letters)) >= ENGLISH_SHARE * len(letters)


def no_comma(text: str) -> bool:
    return "," not in text


def quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": keywords_existence,
    "keywords:frequency": keywords_frequency,
    "keywords:forbidden_words": no_forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
    "startend:quotation": quotation,
}
