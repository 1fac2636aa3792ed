"""Types of keys: numbers in a range, texts, and lists for which a single value may be written."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, Strict

T = TypeVar("T")


def _number(value: Any) -> Any:
    """Convert a number that YAML reads as text, for example "1e-6". Other values are returned unchanged."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _whole(value: Any) -> Any:
    """Convert a float without a fraction, for example 1.0. Values that are not numbers are returned unchanged."""
    value = _number(value)
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError("a whole number (0, 1, 2, ...)")
        return int(value)
    return value


def _texts(value: Any) -> Any:
    """Convert a text or a list to a tuple. A text becomes a tuple of one text."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _numbers(value: Any) -> Any:
    """Convert a number, a list or a text of comma-separated numbers to a tuple."""
    if isinstance(value, str):
        value = value.split(",")
    return tuple(value) if isinstance(value, list) else (value,)


def _temperature(value: float) -> float:
    """Refuse temperatures that vLLM would replace by another value."""
    if 0 < value < COLDEST:
        raise ValueError(
            f"0 (greedy) or at least {COLDEST}, because vLLM uses {COLDEST} in place of a value between 0 and {COLDEST}"
        )
    return value


COLDEST = 0.01  # `_MAX_TEMP` in vLLM's sampling_params.py; vLLM refuses temperatures above 2
Several = Annotated[tuple[T, ...], Strict(False)]  # also accepts YAML's lists
Number = Annotated[float, BeforeValidator(_number)]
Threshold = Annotated[Number | None, BeforeValidator(lambda value: None if value == "None" else value)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
NotNegative = Annotated[float, BeforeValidator(_number), Field(ge=0)]
AboveZero = Annotated[float, BeforeValidator(_number), Field(gt=0)]
Temperature = Annotated[float, BeforeValidator(_number), Field(ge=0, le=2), AfterValidator(_temperature)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]  # engines store counts and lengths in 32 bits
Versions = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=2**31 - 1)]  # a float in ROLL's files
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Many = Annotated[int, Field(ge=1, le=10**6)]  # number of objects that are in memory at the same time
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # vLLM seeds numpy, which accepts no larger seed
Name = Annotated[str, Field(min_length=1)]
Probabilities = Annotated[tuple[NotNegative, ...], BeforeValidator(_numbers)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_texts)]
Environment = dict[Annotated[str, Field(pattern="^[^=]+$")], str | int | float]
Dtype = Literal["fp32", "bf16", "fp16"]
RoutingMode = Literal["disable", "measure", "R3"]
Level = Literal["token", "segment", "geometric", "sequence"]
