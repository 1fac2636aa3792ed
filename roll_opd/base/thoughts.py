"""Find the thoughts in a response: text between `<think>` and `</think>`, or between other models' tags."""

import re
from collections.abc import Iterator

_MARK = re.compile(
    r"<(?P<close>/?)(?:think|thinking|thought|reasoning|seed:think)>|\[(?P<close_mistral>/?)THINK\]", re.ASCII
)


def thought_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) positions of each thought, in order. A thought includes its tags.

    Chat templates may write the opening tag. A closing tag without an opening tag therefore ends a thought that started
    at the end of the previous thought or, if there is none, at the end of the prompt. A thought without a closing tag
    extends to the end of the text.
    """
    start, outside = None, 0
    for mark in _MARK.finditer(text):
        if mark["close"] or mark["close_mistral"]:
            yield outside if start is None else start, mark.end()
            start, outside = None, mark.end()
        elif start is None:
            start = mark.start()
    if start is not None:
        yield start, len(text)


def opens_a_thought(prompt: str) -> bool:
    """Whether a response to `prompt` starts inside a thought that the chat template has opened."""
    last = None
    for mark in _MARK.finditer(prompt):
        last = mark
    if last is None or last["close"] or last["close_mistral"]:
        return False
    return not prompt[last.end() :].strip()


def after_thoughts(text: str) -> str:
    """Return the text after the last closing tag. If there is no closing tag, return all of the text."""
    ends = [mark.end() for mark in _MARK.finditer(text) if mark["close"] or mark["close_mistral"]]
    return text[ends[-1] :] if ends else text
