"""Outputs are held in the engine core until their request ends: none is lost or sent twice.

Tests import vLLM themselves: that takes seconds in each process that collects this file.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roll_opd.inference.coalesce_outputs import coalesces_outputs, ends_version, sends_versions

WHOLE, SEARCHED, STREAMED = "whole", "searched", "streamed"  # how a request is read


def params_of(kind: str) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    output_kind = RequestOutputKind.DELTA if kind == STREAMED else RequestOutputKind.FINAL_ONLY
    stop = ["x"] if kind == SEARCHED else None
    return SamplingParams(output_kind=output_kind, detokenize=kind == SEARCHED, stop=stop)


def row(token: int) -> Any:
    from vllm.v1.outputs import LogprobsLists

    return LogprobsLists(np.array([[token]]), np.array([[-token / 10]], np.float32), np.array([token + 1]))


def output(name: str, token: int, last: bool = False) -> Any:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    reason = FinishReason.LENGTH if last else None
    return EngineCoreOutput(name, [token], new_logprobs=row(token), finish_reason=reason)


class Steps:
    """A scheduler with given steps: its outputs for client 0 after each step."""

    def __init__(self, **kinds: str) -> None:
        self.requests = {name: SimpleNamespace(sampling_params=params_of(kind)) for name, kind in kinds.items()}

    def update_from_output(self, scheduled: Any, outputs: list[Any]) -> dict[int, Any]:
        from vllm.v1.engine import EngineCoreOutputs

        for ended in outputs:
            if ended.finished:
                del self.requests[ended.request_id]
        return {0: EngineCoreOutputs(outputs=outputs)} if outputs else {}

    def step(self, *outputs: Any) -> list[tuple[str, list[int], str | None]]:
        scheduled = SimpleNamespace(num_scheduled_tokens=dict.fromkeys((o.request_id for o in outputs), 1))
        self.sent = coalesces_outputs(Steps.update_from_output)(self, scheduled, list(outputs))
        return [
            (o.request_id, o.new_token_ids, getattr(o.finish_reason, "name", None))
            for step in self.sent.values()
            for o in step.outputs
        ]


def test_a_request_has_one_output_with_everything_in_it() -> None:
    steps = Steps(a=WHOLE, b=WHOLE)
    assert steps.step(output("a", 3)) == [] and steps.sent == {}  # not even an empty message
    assert steps.step(output("a", 5), output("b", 1)) == []
    assert steps.step(output("a", 7, last=True), output("b", 2)) == [("a", [3, 5, 7], "LENGTH")]
    logprobs = steps.sent[0].outputs[0].new_logprobs
    assert logprobs.logprob_token_ids.tolist() == [[3], [5], [7]] and logprobs.sampled_token_ranks.tolist() == [4, 6, 8]
    np.testing.assert_array_equal(logprobs.logprobs, np.array([[-0.3], [-0.5], [-0.7]], np.float32))
    assert steps.step(output("b", 4, last=True)) == [("b", [1, 2, 4], "LENGTH")]


def test_a_request_with_one_output_is_unchanged() -> None:
    assert Steps(a=WHOLE).step(output("a", 3, last=True)) == [("a", [3], "LENGTH")]


@pytest.mark.parametrize("kind", [SEARCHED, STREAMED], ids=["params0", "params1"])
def test_requests_read_token_by_token_are_unchanged(kind: str) -> None:
    steps = Steps(a=kind, b=WHOLE)
    assert steps.step(output("a", 3), output("b", 1)) == [("a", [3], None)]
    assert steps.step(output("a", 4, last=True)) == [("a", [4], "LENGTH")]


def test_held_outputs_of_an_aborted_request_are_dropped() -> None:
    steps = Steps(a=WHOLE)
    steps.step(output("a", 3))
    del steps.requests["a"]
    assert steps.step() == []
    steps.requests["a"] = SimpleNamespace(sampling_params=params_of(WHOLE))  # another request may have its name
    assert steps.step(output("a", 9, last=True)) == [("a", [9], "LENGTH")]


def test_facts_of_the_first_token_are_kept() -> None:
    steps = Steps(a=WHOLE)
    first = output("a", 3)
    first.events, first.new_prompt_logprobs_tensors = ["queued"], "prompt"  # type: ignore[assignment, list-item]
    steps.step(first)
    steps.step(output("a", 4, last=True))
    whole = steps.sent[0].outputs[0]
    assert whole.events == ["queued"] and whole.new_prompt_logprobs_tensors == "prompt"


class Core:
    """An engine core with these steps: its messages, each with its version and the tokens of its requests."""

    def __init__(self, version: str, **kinds: str) -> None:
        self.scheduler, self.version = Steps(**kinds), version
        self.messages: list[Any] = []
        self.output_queue = SimpleNamespace(put_nowait=lambda message: self.messages.append(message[1]))

    def get_weight_version(self) -> str:
        return self.version

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def update(self, version: str) -> None:
        ends_version(Core.set_weight_version)(self, version)
        assert self.version == version

    def attach(self, sent: dict[int, Any]) -> None:
        for step in sent.values():
            step.weight_version = self.version

    def step(self, *outputs: Any) -> list[tuple[str, dict[str, list[int]]]]:
        self.scheduler.step(*outputs)
        self.messages.clear()
        sends_versions(Core.attach)(self, self.scheduler.sent)
        sent = [*self.messages, *self.scheduler.sent.values()]
        return [(m.weight_version, {o.request_id: o.new_token_ids for o in m.outputs}) for m in sent]


def test_outputs_of_each_version_are_sent_in_their_order_when_the_request_ends() -> None:
    core = Core("3", a=WHOLE, b=WHOLE, c=STREAMED)
    core.step(output("a", 1))
    core.update("4")  # nothing is sent during an update
    assert not core.messages
    core.step(output("a", 2), output("b", 3))
    core.step(output("a", 4), output("b", 5))
    core.update("5")
    core.update("6")  # no step between two updates
    assert core.step(output("c", 6)) == [("6", {"c": [6]})]
    assert core.step(output("b", 7, last=True), output("a", 8)) == [("4", {"b": [3, 5]}), ("6", {"b": [7]})]
    core.update("7")
    expected = [("3", {"a": [1]}), ("4", {"a": [2, 4]}), ("6", {"a": [8]}), ("7", {"a": [9]})]
    assert core.step(output("a", 9, last=True)) == expected
    assert core.scheduler.__dict__["_older_outputs"] == core.scheduler.__dict__["_held_outputs"] == {}


def test_outputs_of_older_versions_are_in_order_for_requests_that_end_together() -> None:
    core = Core("3", b=WHOLE, a=WHOLE)
    core.step(output("b", 1))
    core.update("4")
    core.step(output("a", 2), output("b", 3))
    core.update("5")
    expected = [("3", {"b": [1]}), ("4", {"a": [2], "b": [3]}), ("5", {"a": [4], "b": [5]})]
    assert core.step(output("a", 4, last=True), output("b", 5, last=True)) == expected


def test_outputs_of_older_versions_of_an_aborted_request_are_dropped() -> None:
    core = Core("3", a=WHOLE, b=WHOLE)
    core.step(output("a", 1), output("b", 2))
    core.update("4")
    del core.scheduler.requests["a"]
    assert core.step() == []
    core.scheduler.requests["a"] = SimpleNamespace(sampling_params=params_of(WHOLE))
    assert core.step(output("a", 9, last=True)) == [("4", {"a": [9]})]
    assert core.step(output("b", 3, last=True)) == [("3", {"b": [2]}), ("4", {"b": [3]})]


def test_a_version_that_is_set_twice_keeps_the_order() -> None:
    core = Core("3", a=WHOLE)
    core.step(output("a", 1))
    core.update("3")
    core.step(output("a", 2))
    core.update("4")
    assert core.step(output("a", 3, last=True)) == [("3", {"a": [1, 2]}), ("4", {"a": [3]})]
