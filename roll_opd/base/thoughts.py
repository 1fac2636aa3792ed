"""Find the thoughts in a response.

A thought is text between `<think>` and `</think>`, or between the corresponding tags of other models.
"""

import re
from collections.abc import Iterator

_MARK = re.compile(
    r"<(?P<close>/?)(?:think|thinking|thought|reasoning|seed:think)>|\[(?P<close_mistral>/?)THINK\]", re.ASCII
)


def thought_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) positions of each thought, in order. A thought includes its tags.

    If a closing tag has no opening tag, the chat template may have written the opening tag. The thought then starts at
    the end of the previous thought. Without a previous thought, it starts at the beginning of the text. A thought
    without a closing tag extends to the end of the text.
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
    """Return whether a response to `prompt` starts inside a thought.

    This is the case if the prompt ends with an opening tag, because chat templates may write this tag.
    """
    last = None
    for mark in _MARK.finditer(prompt):
        last = mark
    if last is None or last["close"] or last["close_mistral"]:
        return False
    return not prompt[last.end() :].strip()


def after_thoughts(text: str) -> str:
    """Return the text after the last closing tag. If there is no closing tag, return the whole text."""
    ends = [mark.end() for mark in _MARK.finditer(text) if mark["close"] or mark["close_mistral"]]
    return text[ends[-1] :] if ends else text
