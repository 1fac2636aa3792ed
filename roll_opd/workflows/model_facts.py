"""What workflows of Trinity-RFT read of a model beside what they ask it: names, and how an OpenAI client is to ask."""

from dataclasses import dataclass
from typing import Any

from roll_opd.plan import SamplingPlan


@dataclass(frozen=True)
class ModelFacts:
    """A model's `config`, as far as their workflows read it."""

    model_path: str
    name: str | None = None  # of an auxiliary model, as the configuration calls it


def generate_kwargs(sampling: SamplingPlan) -> dict[str, Any]:
    """Return how a model samples, in the words of OpenAI's chat completions."""
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_new_tokens}
