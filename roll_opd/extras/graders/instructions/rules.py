"""Checks for the 25 instructions of IFEval (Zhou et al. 2023, arXiv 2311.07911), by name.

The first argument of a check is the text. The other arguments are the instruction's arguments, with their names in the
rows. Words and sentences are counted in time linear in the text. Languages are detected by langdetect, as in IFEval.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

from langdetect import detector_factory
from langdetect.lang_detect_exception import LangDetectException

# langdetect has quadratic patterns, so only both ends of a long text are searched
SEARCHED = 2_000  # number of characters at each end
SEED = 0  # langdetect samples; a seed makes it deterministic

_LOADING = threading.Lock()


def is_language(text: str, language: str) -> bool:
    """Return whether a text is in a language.

    The result is False if the language of the text cannot be detected.

    Args:
        language: ISO 639-1 code; "zh" means Chinese in any script.
    """
    with _LOADING:
        detector_factory.init_factory()
    factory: Any = detector_factory._factory  # set by `init_factory`
    detector = factory.create()
    detector.seed = SEED
    detector.append(text if len(text) <= 2 * SEARCHED else f"{text[:SEARCHED]} {text[-SEARCHED:]}")
    try:
        found = detector.detect()
    except LangDetectException:  # no letters
        return False
    return language in (found, found.partition("-")[0])


_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"[^\W_]+(?:[.'’_-][^\W_]+)*")  # a hyphenated word or contraction counts as one word
# end marks of sentences with closing quotes and brackets; after Chinese and Japanese marks, no space is needed
_POINT = re.compile(r"(?<![.!?…])[.!?…]+[\"'”’)\]*_]*(?=\s|\Z)|[。！？]+[”’」』）]*")
_BEFORE_POINT = re.compile(r"[^\s(\[\"'“‘]{1,20}\Z")
_LIST_NUMBER = re.compile(r"(?:^|\n)[ \t]{0,8}(?:\d{1,3}|[A-Za-z])\Z")
_LOOK_BACK = 24  # characters; no abbreviation is longer
# abbreviations that never end a sentence
_TITLES = frozenset("mr mrs ms dr prof st mt gen sen rep lt col capt vs fig cf e.g i.e approx".split())  # noqa: SIM905
# abbreviations that end a sentence before a capital letter
_SHORTENED = frozenset("etc al inc ltd co corp jr sr est dept vol ave".split())  # noqa: SIM905


def count_words(text: str) -> int:
    r"""Return the number of words, as in IFEval.

    A word is a sequence of letters, digits and underscores (`\w+`), so "don't" counts as two words.
    """
    return sum(1 for _ in _WORD.finditer(text))


def count_capital_words(text: str) -> int:
    """Return the number of words whose letters are all capital, such as "NASA", "COVID-19", "I" and "U.S."."""
    return sum(token[0].isupper() for token in _TOKEN.finditer(text))


def count_sentences(text: str) -> int:
    """Return the number of sentences.

    A sentence ends at `.`, `!`, `?` or `…` before a space, at `。！？`, or at the end of the text. There are two
    exceptions:

    - No sentence ends after a title or an initial ("Dr. A. Smith"), after "e.g.", or after the number of a list item.
    - After another abbreviation ("U.S.", "etc."), an ellipsis or a closing quote, no sentence ends if a lower-case
      letter follows.

    Line breaks do not end sentences.
    """
    return sum(any(map(str.isalnum, sentence)) for sentence in _sentences(text))


def _sentences(text: str) -> Iterator[str]:
    start, text = 0, text.rstrip()
    for point in _POINT.finditer(text):
        if _ends_a_sentence(text, point.start(), point.end()):
            yield text[start : point.end()]
            start = point.end()
    yield text[start:]


def _ends_a_sentence(text: str, point: int, after: int) -> bool:
    continues = text[after : after + 8].lstrip()[:1].islower()
    mark = text[point:after]
    if mark[0] in "。！？" or mark in ("!", "?"):
        return True
    if mark != ".":  # ends in a closing quote or bracket, or in an ellipsis
        return not continues
    before = text[max(0, point - _LOOK_BACK) : point]
    if _LIST_NUMBER.search(before if point <= _LOOK_BACK else "x" + before):
        return False
    word = _BEFORE_POINT.search(before)
    if word is None or after == len(text):
        return True
    last = word[0].lower()
    if last in _TITLES or (len(last) == 1 and word[0].isupper() and last != "i"):
        return False
    if last in _SHORTENED or re.fullmatch(r"(?:[a-z]\.)+[a-z]", last):
        return not continues
    return True


Relation = Literal["less than", "at least", "at most", "around"]
ENGLISH_SHARE = 0.9  # minimum fraction of a-z among the letters of an English text
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_HIGHLIGHT = re.compile(r"\*[^\n*]*\*")
_STRONG = re.compile(r"\*\*[^\n*]*\*\*")
_FENCE = re.compile(r"\A```(?:json)?", re.IGNORECASE)
_PARAGRAPH = re.compile(r"\s?\*\*\*\s?")


def holds(count: int, relation: Relation, wanted: int, slack: int = 0) -> bool:
    """Return whether a count has the required relation to a number, for example "at least".

    Args:
        wanted: the number.
        slack: difference that the relation "around" allows.
    """
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
    """Return how often `word` occurs in the text as a separate word, ignoring case."""
    return len(re.findall(rf"(?<!\w){re.escape(word.lower())}(?!\w)", text.lower()))


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: Relation) -> bool:
    return holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(text: str, language: str) -> bool:
    return is_language(text, language)


def number_sentences(text: str, num_sentences: int, relation: Relation) -> bool:
    return holds(count_sentences(text), relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Check the number of paragraphs, which are separated by `***`.

    The first and the last paragraph may be empty; they then do not count. No other paragraph may be empty.
    """
    paragraphs = [paragraph.strip() for paragraph in _PARAGRAPH.split(text)]
    return all(paragraphs[1:-1]) and sum(map(bool, paragraphs)) == num_paragraphs


def number_words(text: str, num_words: int, relation: Relation) -> bool:
    return holds(count_words(text), relation, num_words)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Check the number of paragraphs, and the first word of one paragraph.

    Paragraphs are separated by two newlines. Empty paragraphs count for the position `nth_paragraph`, but not for
    `num_paragraphs`.
    """
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
    if not 1 <= nth_paragraph <= len(paragraphs) or not paragraphs[nth_paragraph - 1]:
        return False
    first = re.split(r"[.,?!'\"]", paragraphs[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"'), maxsplit=1)[0]
    return sum(map(bool, paragraphs)) == num_paragraphs and first.lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    return sum(map(count_placeholders, text.split("\n"))) >= num_placeholders


def count_placeholders(line: str) -> int:
    """Return the number of placeholders in a line: parts in square brackets, such as [name]."""
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
    """Check that the text has at least `num_sections` sections.

    A section starts with the splitter and a number, such as `SECTION 1`.
    """
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
    """Check for exactly two different responses, separated by `******`.

    A separator before the first response or after the second one is allowed, but no other text.
    """
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
