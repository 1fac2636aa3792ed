"""One step's batch: enough groups that pass the filters, from as many prompts as that takes."""

from dataclasses import dataclass, field
from typing import Any

from roll_opd.data.experience import Experience
from roll_opd.data.source import Prompt, PromptSource
from roll_opd.rollout.scheduler import roll_out
from roll_opd.rollout.selection import Keeps
from roll_opd.workers.errors import RunError

MOST_REJECTED = 20  # times the batch, and at least FEW_REJECTED: a filter that rejects more will not be satisfied
FEW_REJECTED = 1000


@dataclass(frozen=True)
class Batch:
    """What a step learns from, and the prompts whose groups did not pass."""

    prompts: list[Prompt]
    experiences: list[Experience]  # the samples of each prompt, in the prompts' order
    filtered: list[Prompt]
    generated_tokens: int  # of both
    demonstrations: list[Prompt] = field(default_factory=list)  # rows with answers


async def fill_batch(source: PromptSource, wanted: int, *, extra: int, keeps: Keeps | None, **rollout: Any) -> Batch:
    """Draw prompts and roll them out until `wanted` groups pass `keeps`.

    Where there is a filter, `extra` prompts more are answered at the same time, in case some do not pass. What turns
    out not to be needed is aborted, and its prompts are still the next ones of `source`. `rollout` goes to `roll_out`.
    RunError where hardly any group passes.
    """
    prompts: list[Prompt] = []
    experiences: list[Experience] = []
    filtered: list[Prompt] = []
    generated_tokens = 0
    while len(prompts) < wanted:
        missing, first_draw = wanted - len(prompts), source.position
        candidates = source.peek(missing + (extra if keeps else 0))
        selection = await roll_out(candidates, first_draw=first_draw, wanted=missing, keeps=keeps, **rollout)
        source.skip(selection.used)
        chosen = set(selection.chosen)
        experiences += selection.experiences()
        generated_tokens += selection.generated_tokens
        for group in range(selection.used):
            (prompts if group in chosen else filtered).append(candidates[group])
        if len(prompts) < wanted and len(filtered) > max(MOST_REJECTED * wanted, FEW_REJECTED):
            raise RunError(
                f"the filters rejected the samples of {len(filtered)} prompts and kept those of {len(prompts)}, in one "
                f"step of {wanted}; loosen query_filter_config or response_filter_config, or give other prompts"
            )
    return Batch(prompts, experiences, filtered, generated_tokens)
