"""Words of the package and its pages: docstrings, comments, messages and prose use the field's terms.

A pattern is a word or a phrase that a reader has to translate, with the usual ways to say it.
"""

import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "roll_opd"

# pattern -> what to write
PATTERNS = {
    # verbs of speech for logging, configuration, calls and output
    r"tells?|told|telling": "report, log, pass, configure",
    r"said|says": "states, has, reads, prints",
    r"asked": "called, requested, configured",
    # persons in place of processes, callers and users
    r"nobody|somebody|anybody": "no process, the caller, a user",
    r"who(so)?ever|whosever|whose own": "the caller, the user",
    r"who (asks|holds|needs|reads|wants)": "the caller, the reader",
    r"behind (its|his|a|the) \w+'s back|business": "implicit, unrelated",
    r"without a word": "without a message",
    r"let go": "release",
    r"forgets?|forgotten": "drop, omit",
    # relative clauses in place of nouns
    r"those (that|which)": "the noun",
    r"what (is|was|were) (not )?(\w+ed|done|drawn|given|held|kept|left|lost|made|meant|read|run|sent)": "the noun",
    r"what (is|was|were) (not )?(shown|taken|to|written)": "the noun",
    r"what (it|they) (say|ask|tell|hold|speak)s?": "the noun",
    r"of (which|whom)": "a sentence of its own with the noun as its subject",
    r"which (it is|they are)": "the name, the kind",
    r"where there (is|are)": "if, with",
    r"there is to|it is that": "the verb",
    # pronouns that send the reader back
    r"(of|than|for|to) the (former|latter)": "the noun",
    r"of (its|their|one's) own(?! [`\w])|an own": "separate, private, or nothing",
    r"the like": "the list",
    # quaint words
    r"(?<!--)beside": "next to, in parallel with, in addition to",
    r"anew|afresh": "again",
    r"at once": "immediately, together",
    r"under way": "running, in progress",
    r"once more": "again",
    r"goes on": "continues, resumes",
    r"(is|are|was|were|be) gone": "has ended, was removed",
    r"(has|have) come": "has arrived, was received",
    r"comes? behind": "follows",
    r"the very": "the",
    r"the whole of": "the whole, all",
    r"or not at all": "or not",
    r"as (it|they) (is|are)": "unchanged",
    r"alone(?=[.:,;])": "only",
    r"by (itself|themselves)": "automatically, separately",
    r"in vain": "without effect",
    r"likewise": "also",
    r"hence|thence|whence": "so, from",
    r"where(of|in|upon|from|by)|there(of|in|upon|from)|herein": "in which, of it",
    r"ought to|shall": "must, should",
    r"lest|whilst|amongst|upon|naught|nought": "so that not, while, among, on, zero",
    r"many a|every one|but for": "many, each, except",
    r"(is|are) to be": "must be, is",
    # verbs that need a second reading
    r"hand(s|ed|ing)? over": "pass, transfer",
    r"(gives?|takes?) (its|their|the) \w+ back": "release, acquire",
    r"(sets?|puts?) (it |them )?aside|set aside": "move, reserve",
    r"learn(s|ed)? from": "train on",
    r"(the )?other way (a)?round": "reversed",
    r"of (Ray|vLLM|Megatron|Trinity-RFT|ROLL|CUDA|Hugging Face|OpenAI|TRL|verl|Python)'s(?! ?[`\w])": "of Ray",
}
FORBIDDEN = re.compile("|".join(rf"(?P<p{n}>\b(?:{pattern})\b)" for n, pattern in enumerate(PATTERNS)), re.IGNORECASE)
# the same without groups: twenty times faster, and most texts match none
ANY = re.compile(rf"\b(?:{'|'.join(PATTERNS)})\b".lower())
INSTEAD = list(PATTERNS.values())
# (file, matched text) that is the right word there
RIGHT = {
    # prompts to a model, which are part of published results or of a game's rules
    ("roll_opd/extras/games/guess_number.py", "told"),
    ("roll_opd/extras/graders/rewards/llm_judge.py", "asked"),
    ("roll_opd/extras/graders/judge_prompts.py", "says"),
    ("roll_opd/extras/graders/judge_prompts.py", "what it says"),
    ("roll_opd/extras/games/workflows/environment_workflow.py", "asked"),
}


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the comments, docstrings and messages in Python source."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (
            token.type in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)) and " " in token.string
        ):
            is_f_string = token.type == tokenize.STRING and "f" in token.string.partition(token.string[-1])[0].lower()
            yield token.start[0], re.sub(r"\{[^{}]*\}", "{}", token.string) if is_f_string else token.string


def prose(page: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a page without its blocks of code."""
    is_code = False
    for number, line in enumerate(page.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, re.sub(r"`[^`]*`", "``", line)


def hits(found: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """Yield (line, matched text, what to write) of the forbidden words."""
    for line, text in found:
        for match in FORBIDDEN.finditer(text) if ANY.search(text.lower()) else ():
            if match[0] != "is None":
                instead = INSTEAD[int(str(match.lastgroup)[1:])]
                yield line + text[: match.start()].count("\n"), match[0], instead


def all_hits() -> dict[str, list[str]]:
    """Return room -> messages about its forbidden words; all pages are the room `docs`."""
    found = defaultdict(list)
    pages = [*sorted((REPOSITORY / "docs").rglob("*.md")), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"]
    for path in (*sorted(PACKAGE.rglob("*.py")), *pages):
        name = path.relative_to(REPOSITORY).as_posix()
        text = path.read_text(encoding="utf-8")
        room = "docs" if path.suffix == ".md" else path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for line, words, instead in hits(texts(text) if path.suffix == ".py" else prose(text)):
            if (name, words.lower()) not in RIGHT:
                found[room].append(f"{name}:{line}: {words!r}; write {instead}")
    return found


def test_forbidden_words_are_found_in_comments_docstrings_and_messages_only() -> None:
    source = '''
def told(beside):
    """Return what is sent."""  # asked at once
    raise ValueError(f"{beside} is said to be {told}")
    return {"told": beside}
'''
    found = [words for _, words, _ in hits(texts(source))]
    assert Counter(found) == Counter(["what is sent", "asked", "at once", "said"])
    page = "It says `told`.\n```\nbeside\n```\nA page of its own.\n"
    assert [(line, words) for line, words, _ in hits(prose(page))] == [(1, "says"), (5, "of its own")]


def test_there_are_at_least_forty_patterns_and_each_finds_its_word() -> None:
    assert len(PATTERNS) >= 40
    assert all(not re.search(rf"\b(?:{pattern})\b", "", re.IGNORECASE) for pattern in PATTERNS)


@pytest.mark.slow
def test_the_package_and_its_pages_have_no_forbidden_words() -> None:
    assert all_hits() == {}
