"""Attributes of a model that Trinity-RFT workflows read: name, path, default sampling, unsupported methods."""

from dataclasses import dataclass
from typing import Any

from roll_opd.config.plan import SamplingPlan

_RECORDED = "return the experiences, or derive from WorkflowWithRecording and call its update_reward"
NOT_HERE = {  # method of Trinity-RFT's ModelWrapper -> what to use instead
    "set_api_key": "use self.model.api_key, which differs for each run",
    **dict.fromkeys(("overwrite_history_experiences_async", "update_experience_reward_async"), _RECORDED),
    "clone_with_isolated_history": "use self.model.history, which belongs to one run",
    **dict.fromkeys(("get_lora_request", "get_lora_request_async"), "requests use the adapter without it"),
    **dict.fromkeys(("get_current_load", "get_available_address_async"), "use api_address, which serves all engines"),
    **dict.fromkeys(("sync_model_weights", "init_process_group", "shutdown"), "remove the call, the run does this"),
}


@dataclass(frozen=True)
class ModelFacts:
    """A model's `config`: the attributes that Trinity-RFT workflows read."""

    model_path: str
    name: str | None = None  # of an auxiliary model in the configuration


def generate_kwargs(sampling: SamplingPlan) -> dict[str, Any]:
    """Return sampling parameters under the names of OpenAI's chat completions."""
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_new_tokens}
