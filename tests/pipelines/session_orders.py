"""Random orders of a session's calls, and what each call returns."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roll_opd.api import Batch, Session

# call -> weight; calls that accumulate a gradient (`reinforce`: with rewards) and calls that use the devices in between
# are frequent
CALLS = {
    "sample": 4,
    "score": 4,
    "logprobs": 2,
    "reward": 1,
    "forward_backward": 6,
    "reinforce": 2,
    "optim_step": 2,
    "update": 3,
    "save": 1,
    "load": 1,
}
# objective, adapter or teacher -> settings beside those of a session with sampled tokens
VARIANTS = {
    "sampled": (),
    "topk": ("opd_objective=topk", "opd_topk=4"),
    "topk of the student": ("opd_objective=topk", "opd_topk=4", "opd_topk_source=student"),
    "full": ("opd_objective=full",),
    "lora": ("+student_train.model_args.lora_target=all-linear", "+student_train.model_args.lora_rank=4"),
    "follower": (
        "teacher.model_args.model_name_or_path=examples/demo/models/student",
        "+teacher.hint='{ground_truth}'",
        "+teacher.follows_student={ema_decay: 0.75}",
    ),
}
DISCARDED = "sampler.update first"  # end of the error of engines without weights


def order_of(seed: int) -> list[str]:
    """Return 4 to 12 calls."""
    drawn = random.Random(seed)
    return drawn.choices(list(CALLS), list(CALLS.values()), k=drawn.randint(4, 12))


class Caller:
    """Makes calls of a session, one after another, with the newest batch."""

    def __init__(self, session: Session, directory: Path) -> None:
        self._session, self._directory, self.batch = session, directory, Batch((), (), session.id)

    def result(self, call: str) -> Any:
        """Return the result of a call in a form that can be compared, or the error's type and text."""
        try:
            return getattr(self, f"_{call}")()
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            return type(error).__name__, str(error).replace(str(self._directory), "")

    def _sample(self) -> Any:
        self.batch = self._session.sampler.sample(self._session.prompts(2), n=2)
        return [sample.tokens.tolist() for sample in self.batch.samples]

    def _with(self, batch: Batch) -> list[Any]:
        self.batch = batch
        return [(s.reward, {name: array.tobytes() for name, array in s.columns.items()}) for s in batch.samples]

    def _score(self) -> Any:
        return self._with(self._session.teacher.score(self.batch))

    def _logprobs(self) -> Any:
        return self._with(self._session.student.logprobs(self.batch))

    def _reward(self) -> Any:
        rewarded = self._session.reward(self.batch)
        return rewarded.rewards  # the batch keeps no rewards: a pure configuration ignores them

    def _forward_backward(self) -> Any:
        return self._session.student.forward_backward(self.batch)

    def _reinforce(self) -> Any:
        rewarded = self.batch.with_rewards(float(len(text) % 3) for text in self.batch.texts)
        return self._session.student.forward_backward(rewarded, adv_estimator="reinforce")

    def _optim_step(self) -> Any:
        return self._session.student.optim_step()

    def _update(self) -> Any:
        return self._session.sampler.update()

    def _save(self) -> Any:
        return self._session.student.save(self._directory).name

    def _load(self) -> Any:
        return self._session.student.load(self._directory)


def assert_orders_agree(
    shares: Session, alone: Session, seeds: Sequence[int], directory: Path, done: Callable[[int], None] = lambda _: None
) -> None:
    """Make the same calls in a session that offloads and in one that does not, and compare every result.

    A call that only the first session refuses, because its engines have discarded their weights, is left out of the
    second.
    """
    callers = [Caller(shares, directory / "shares"), Caller(alone, directory / "alone")]
    for seed in seeds:
        for number, call in enumerate(order_of(seed)):
            found = callers[0].result(call)
            if call == "sample" and found[0] == "ValueError" and found[1].endswith(DISCARDED):
                alone.prompts(2)  # the first session has drawn them
                continue
            wanted = callers[1].result(call)
            assert _same(found, wanted), (seed, number, order_of(seed), found, wanted)
        done(seed)


def assert_reads_keep_the_gradient(session: Session, seeds: Sequence[int], directory: Path) -> None:
    """Compare gradients that are accumulated with other calls in between to a multiple of the gradient of one call.

    The learning rate is 0, so that all gradients are gradients of the same weights.
    """
    prompts = session.prompts(2)

    def sampled() -> Batch:
        session.sampler.update()
        return session.teacher.score(session.sampler.sample(prompts, n=1, temperature=0))

    session.student.forward_backward(sampled())
    once = session.student.optim_step(0.0)["actor/grad_norm"]
    for seed in seeds:
        between = [call for call in order_of(seed) if call not in ("optim_step", "load", "reinforce")]
        order = ["forward_backward", *between, "forward_backward"]
        caller, batch = Caller(session, directory), sampled()
        for call in order:
            caller.batch = batch
            caller.result(call)
        found = session.student.optim_step(0.0)["actor/grad_norm"]
        assert np.isclose(found, order.count("forward_backward") * once, rtol=1e-5), (seed, order)


def broken_loss(batch: Any) -> Any:
    """Raise an error, as a user's loss on the ranks may do."""
    raise ArithmeticError("this loss is broken")


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, dict):
        return found.keys() == wanted.keys() and all(
            found[name] == wanted[name] or (np.isnan(found[name]) and np.isnan(wanted[name])) for name in found
        )
    return bool(found == wanted)
