"""Thoughts in a response: the text between `<think>` and `</think>`, and the same marks of other models."""

import re
from collections.abc import Iterator

_MARK = re.compile(
    r"<(?P<close>/?)(?:think|thinking|thought|reasoning|seed:think)>|\[(?P<close_mistral>/?)THINK\]", re.ASCII
)


def thought_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the thoughts with their marks, in order.

    A closing mark without an opening one ends a thought that began where the one before ended: chat templates write the
    opening mark. A thought without a closing mark goes to the end of the text.
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
    """Return whether a response to `prompt` begins within a thought, which the chat template has opened."""
    last = None
    for mark in _MARK.finditer(prompt):
        last = mark
    if last is None or last["close"] or last["close_mistral"]:
        return False
    return not prompt[last.end() :].strip()


def after_thoughts(text: str) -> str:
    """Return what follows the last closing mark; the whole text where there is none."""
    ends = [mark.end() for mark in _MARK.finditer(text) if mark["close"] or mark["close_mistral"]]
    return text[ends[-1] :] if ends else text
