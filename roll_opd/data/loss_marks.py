"""Loss weights of rows and turns (0: excluded), in the spellings of OpenAI, axolotl, ms-swift, verl and slime."""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

# keys of a turn or of a row: 0 or false excludes it from the loss
MARKS = ("weight", "loss", "loss_mask", "step_loss_mask", "trainable", "train", "training", "loss_weight", "loss_scale")
# keys with weights of spans or tokens, which are not supported
SPANS = ("train_detail", "training_detail", "completion_mask", "assistant_masks")
_WORDS = {"true": True, "yes": True, "1": True, "1.0": True, "false": False, "no": False, "0": False, "0.0": False}


def loss_mark(marked: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Return the key of the loss weight of a turn or a row, and whether it is learned; None without such a key.

    A key that excludes takes precedence over one that includes.
    """
    found = [(name, learned) for name in MARKS if (learned := _learned(marked.get(name))) is not None]
    return min(found, key=lambda mark: mark[1], default=None)


def unread_marks(marked: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys whose values are not supported: weights other than 0 and 1, and weights of spans or tokens."""
    for name in MARKS:
        value = marked.get(name)
        number = isinstance(value, int | float | Decimal) and value not in (0, 1)
        if number or (isinstance(value, Sequence) and not isinstance(value, str) and len(value)):
            yield name
    yield from (name for name in SPANS if marked.get(name))


def without_marks(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without its loss weights, which no template reads."""
    return {key: value for key, value in message.items() if key not in MARKS and key not in SPANS}


def _learned(value: Any) -> bool | None:
    if isinstance(value, str):
        return _WORDS.get(value.strip().casefold())
    return bool(value) if isinstance(value, bool | int | float | Decimal) else None
