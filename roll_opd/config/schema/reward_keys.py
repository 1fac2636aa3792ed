"""Keys of `rewards.<domain>`, and of the filters that select samples by reward."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from roll_opd.config import roll_keys as roll
from roll_opd.config.schema.key_types import AboveZero, Many, Name, Number, Texts, Threshold
from roll_opd.config.schema.section import Section, key, ours


@dataclass(frozen=True, kw_only=True)
class Filter(Section):
    """`query_filter_config` and `response_filter_config`."""

    type: str = key("no_filter", "no_filter, mean_filter or std_filter")
    filter_args: dict[str, Threshold] = key(
        {}, "thresholds of the filter: threshold_up and threshold_down (mean_filter), or std_threshold (std_filter)"
    )


@dataclass(frozen=True, kw_only=True)
class Term(Section):
    """`rewards.<domain>.terms.<name>`: a term of a reward. Other keys are arguments of the term."""

    free = "args"

    worker_cls: str | None = key(
        None, "a built-in reward, ROLL's class path, or a dotted path; default: the domain's name"
    )
    weight: Number = ours(1.0, "weight of this term in the domain's reward, which is the weighted sum of its terms")
    timeout: AboveZero | None = ours(None, "time limit per sample, s")
    args: dict[str, Any] = ours({}, "further arguments")


@dataclass(frozen=True, kw_only=True)
class RewardKeys(Section):
    """Processes that compute a domain's rewards."""

    world_size: Annotated[int, Field(ge=1, le=4096)] = key(1, "processes")
    on_error: Literal["zero", "drop", "replace", "stop"] = ours(
        "stop",
        "what to do with a sample whose reward fails; zero: the reward is 0; drop: drop the sample; replace:"
        " drop the group of the sample and take another prompt; stop: end the run",
    )


@dataclass(frozen=True, kw_only=True)
class Reward(Term, RewardKeys):
    """`rewards.<domain>`."""

    ignored = roll.IGNORED_REWARD
    tag_included: Texts | None = key(None, "tags of the rows to score; default: all")
    infer_batch_size: Many = key(16, "maximum number of samples in a call of the reward")
    max_concurrency: Many | None = key(None, "number of concurrent calls in a process")
    terms: dict[Name, Term] = ours({}, "further rewards (name: section), added to the domain's reward")
    query_filter_config: Filter = key(Filter(), "filter of groups of samples")
    response_filter_config: Filter = key(
        Filter(),
        "filter of single samples; if a sample is rejected, all samples with the same baseline are removed too",
    )
