"""A model in vLLM engines of the run's own, asked as one at an endpoint is: for a language model that judges here."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any
from zlib import crc32

import numpy as np
import ray

from roll_opd.actors.sampler import Request
from roll_opd.config.plan import RolloutPlan
from roll_opd.data.templates import load_tokenizer, token_ids
from roll_opd.rewards.reward_interface import RewardError
from roll_opd.samples.buffer_pickle import Compact


class LocalModel:
    """A `roll_opd.rewards.endpoint.Complete`: messages to the text of the answer."""

    def __init__(self, plan: RolloutPlan, engines: Sequence[ray.actor.ActorHandle]) -> None:
        """`engines` are `RolloutWorker`s of `plan`, whose sampling settings hold; they take turns."""
        self._plan = plan
        self._tokenizer: Any = load_tokenizer(plan.model.path)
        if not self._tokenizer.chat_template:
            raise RewardError(
                f"{plan.name}: the tokenizer of {plan.model.path} has no chat template, so it cannot be asked; judge"
                " with a model that was made for chats"
            )
        self._turns = cycle(engines)

    async def __call__(self, messages: Sequence[Mapping[str, str]], errors: Counter[str]) -> str:
        """Return the answer to `messages`.

        Raises what the engine does, such as ValueError for a question that is too long for it, without the process it
        happened in. RewardError, which ends the run, where the engine is gone.
        """
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        tokens = np.array(token_ids(self._tokenizer, [text], [True])[0])
        request = Request(0, tokens, seed=crc32(text.encode()) & 0x7FFFFFFF)  # the same question, the same answer
        generate: Any = next(self._turns).generate
        stream = generate.options(num_returns="streaming").remote(Compact([request]), self._plan.sampling)
        try:
            async for answers in stream:
                ((_, completion),) = await answers
                return self._tokenizer.decode(completion.tokens, skip_special_tokens=True)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayActorError as error:
            raise RewardError(f"{self._plan.name}: the judge's engine has died: {error}") from None
        raise RuntimeError(f"the engine of {self._plan.name} ended without an answer")
