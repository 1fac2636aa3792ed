"""The engine core detects incomplete updates, and then refuses to sample.

The last file that uses the shared engine, which its tests damage.
"""

import asyncio
import os
import signal
from contextlib import suppress

import pytest
import torch
from inference_models import MAX_MODEL_LEN, Running, buckets_of, make_model, update_weights

from roll_opd.config.plan import SamplingPlan
from roll_opd.inference.weight_updates import WeightUpdateError
from roll_opd.samples import weight_bucket

Buckets = list[dict[str, torch.Tensor]]


@pytest.fixture
def engine(shared_engine: Running) -> Running:
    """The engine is reused after each damage, because starting one takes far longer than a test."""
    return shared_engine


def refusal_of(engine: Running, buckets: Buckets) -> str:
    version = engine.engine.updates.version
    with suppress(Exception):  # the update of the test before, where it is still open
        engine.run(engine.engine._llm.finish_weight_update())
    engine.engine.updates.broken = None
    with pytest.raises(WeightUpdateError) as refused:
        engine.run(update_weights(engine.engine, buckets, 1))
    with pytest.raises(RuntimeError, match="cannot be used: update to weights version 1 failed"):
        engine.run(engine.engine.generate([2], SamplingPlan(), 0))
    assert engine.engine.updates.version == version
    return str(refused.value)


def test_an_incomplete_layer_fails_the_update(engine: Running) -> None:
    lost = "model.layers.1.self_attn.k_proj.weight"  # vLLM holds q, k and v as one
    buckets = [{n: t for n, t in b.items() if n != lost} for b in buckets_of(make_model(1))]
    said = refusal_of(engine, buckets)
    assert "did not arrive: model.layers.1.self_attn.qkv_proj (" in said and " of " in said


def test_weights_sent_twice_fail_the_update(engine: Running) -> None:
    buckets = buckets_of(make_model(1))
    assert "sent twice in one update: " in refusal_of(engine, [*buckets, buckets[0]])


def test_weights_changed_in_transfer_fail_the_update(engine: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprint is computed from the source; here the memory is changed afterwards."""
    honest = weight_bucket.fingerprint

    def taken_before_a_bit_flips(tensors: torch.Tensor, dtype: torch.dtype) -> dict[str, list[list[int]]]:
        result = honest(tensors, dtype)
        if tensors.shape[1:] == (64,):
            tensors[:, 3] += 2e-7 * MAX_MODEL_LEN
        return result

    monkeypatch.setattr(weight_bucket, "fingerprint", taken_before_a_bit_flips)
    said = refusal_of(engine, buckets_of(make_model(1)))
    assert "the model differs from the sent weights: model.layers.0.input_layernorm" in said


def test_a_core_that_dies_in_an_update_raises_engine_dead_error(engine: Running) -> None:
    """The last test of this file: there is no engine after it."""
    from vllm.v1.engine.exceptions import EngineDeadError  # seconds of imports, in each process that collects this file

    (core,) = engine.engine._llm.engine_core.resources.engine_manager.processes
    engine.engine.updates.broken = None

    async def dies_in_a_call() -> None:
        os.kill(core.pid, signal.SIGSTOP)
        checking = asyncio.ensure_future(engine.engine.check_alive())
        await asyncio.sleep(0.2)
        assert not checking.done()
        core.kill()
        await checking

    with pytest.raises(RuntimeError, match="engine core has ended"):
        engine.run(dies_in_a_call())
    assert engine.engine._llm.errored
    with pytest.raises(EngineDeadError):
        engine.run(update_weights(engine.engine, buckets_of(make_model(1)), 1))
