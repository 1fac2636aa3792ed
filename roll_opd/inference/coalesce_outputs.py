"""Send one output per request from vLLM's engine core to its front end, instead of one per token.

vLLM sends every token and log-prob separately, even if a request needs only its final output
(`RequestOutputKind.FINAL_ONLY`). For a small model, processing these messages is half of the front end's work. Here the
engine core holds the outputs of a request until the request ends.

Requests with stop strings are sent token by token as usual, because the front end searches for the stop strings.

Outputs of a request that runs during weight updates are sent as one message per version of the weights, because vLLM
labels messages. They too are sent when the request ends: an update pauses all requests, so it is kept short.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

Update = Callable[..., dict[int, Any]]  # `Scheduler.update_from_output`: client -> outputs of a step


def coalesces_outputs(update: Update) -> Update:
    """Wrap `Scheduler.update_from_output` to send all outputs of a request as one output.

    The outputs are held until the request ends, and are then joined.
    """

    @functools.wraps(update)
    def updated(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        final_only = {
            name for name in scheduler_output.num_scheduled_tokens if _is_final_only(scheduler.requests.get(name))
        }
        sent = update(scheduler, scheduler_output, model_runner_output)
        held = scheduler.__dict__.setdefault("_held_outputs", {})
        for client, step in list(sent.items()):
            step.outputs = _due(step.outputs, held, final_only)
            if step == type(step)(timestamp=step.timestamp):  # empty
                del sent[client]
        for name in held.keys() - scheduler.requests.keys():  # aborted
            del held[name]
        return sent

    return updated


def ends_version(set_weight_version: Callable[..., None]) -> Callable[..., None]:
    """Wrap `EngineCore.set_weight_version` to record which version sampled the held outputs."""

    @functools.wraps(set_weight_version)
    def updated(core: Any, weight_version: str) -> None:
        held = core.scheduler.__dict__.get("_held_outputs", {})
        versions = core.scheduler.__dict__.setdefault("_older_outputs", {})  # from the oldest version to the newest
        older = versions.setdefault(core.get_weight_version(), {})
        for name in held.keys() & core.scheduler.requests.keys():
            older.setdefault(name, []).extend(held.pop(name))
        set_weight_version(core, weight_version)

    return updated


def sends_versions(attach_weight_version: Callable[..., None]) -> Callable[..., None]:
    """Wrap `EngineCore._attach_weight_version` to send outputs of older versions before the last output of a request.

    A message has one version, so each version has its own message.
    """

    @functools.wraps(attach_weight_version)
    def attached(core: Any, sent: dict[int, Any]) -> None:
        versions = core.scheduler.__dict__.setdefault("_older_outputs", {})
        for version, older in list(versions.items()):
            for client, step in sent.items():
                due = [joined(older.pop(output.request_id)) for output in step.outputs if output.request_id in older]
                if due:
                    core.output_queue.put_nowait((client, type(step)(outputs=due, weight_version=version)))
            for name in older.keys() - core.scheduler.requests.keys():  # aborted
                del older[name]
            if not older:
                del versions[version]
        attach_weight_version(core, sent)

    return attached


def _is_final_only(request: Any) -> bool:
    from vllm.sampling_params import RequestOutputKind

    params = getattr(request, "sampling_params", None)
    return params is not None and params.output_kind is RequestOutputKind.FINAL_ONLY and not params.detokenize


def _due(outputs: list[Any], held: dict[str, list[Any]], final_only: set[str]) -> list[Any]:
    due = []
    for output in outputs:
        name = output.request_id
        if output.finish_reason is None and name in final_only:
            held.setdefault(name, []).append(output)
        elif name in held:
            due.append(joined([*held.pop(name), output]))
        else:
            due.append(output)
    return due


def joined(outputs: list[Any]) -> Any:
    """Join the `EngineCoreOutput`s of a request into one."""
    first, last = outputs[0], outputs[-1]
    rows = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    import msgspec  # of vLLM; planning imports this module without vLLM

    return msgspec.structs.replace(
        last,
        new_token_ids=[token for output in outputs for token in output.new_token_ids],
        new_logprobs=rows[0]._replace(**_stacked(rows)) if rows else None,
        new_prompt_logprobs_tensors=first.new_prompt_logprobs_tensors,
        prefill_stats=first.prefill_stats,
        events=[event for output in outputs for event in output.events or ()] or None,
    )


def _stacked(rows: list[Any]) -> dict[str, np.ndarray]:
    names = ("logprob_token_ids", "logprobs", "sampled_token_ranks")
    return {name: np.concatenate([getattr(row, name) for row in rows]) for name in names}
