"""What workflows of Trinity-RFT read of a model beside what they ask it: names, and how an OpenAI client is to ask."""

from dataclasses import dataclass
from typing import Any

from roll_opd.plan import SamplingPlan

_RECORDED = "return the experiences, or derive from WorkflowWithRecording and call its update_reward"
NOT_HERE = {  # methods of Trinity-RFT's ModelWrapper, and what does their work here
    "set_api_key": "each run has a key of its own, self.model.api_key",
    **dict.fromkeys(("overwrite_history_experiences_async", "update_experience_reward_async"), _RECORDED),
    "clone_with_isolated_history": "each run has a history of its own, self.model.history",
    **dict.fromkeys(("get_lora_request", "get_lora_request_async"), "the engines have the adapter"),
    **dict.fromkeys(("get_current_load", "get_available_address_async"), "read api_address; engines are behind it"),
    **dict.fromkeys(("sync_model_weights", "init_process_group", "shutdown"), "the run does this itself"),
}


@dataclass(frozen=True)
class ModelFacts:
    """A model's `config`, as far as their workflows read it."""

    model_path: str
    name: str | None = None  # of an auxiliary model, as the configuration calls it


def generate_kwargs(sampling: SamplingPlan) -> dict[str, Any]:
    """Return how a model samples, in the words of OpenAI's chat completions."""
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_new_tokens}
