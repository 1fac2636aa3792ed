"""A sleeping engine: it refuses requests, accepts weights only at the right time, and loses none.

vLLM's sleep mode frees memory only on GPUs, but the order of calls and the refusals are the same on CPUs.
"""

import itertools

import numpy as np
import pytest
from inference_models import Running, buckets_of, hf_logprobs, make_model, update_weights

from roll_opd.config.plan import SamplingPlan

VERSIONS = itertools.count(1000)
ANSWERS = SamplingPlan(max_new_tokens=4)


def test_a_sleeping_engine_refuses_requests_until_it_has_weights_and_a_cache(shared_engine: Running) -> None:
    engine, run = shared_engine.engine, shared_engine.run
    tokens = np.random.default_rng(1).integers(2, 99, 30).tolist()
    run(update_weights(engine, buckets_of(make_model(11)), next(VERSIONS)))

    run(engine.sleep(2, "train"))
    run(engine.sleep(2, "train"))  # asleep already
    for asking in (lambda: shared_engine.batch([tokens], ANSWERS, [0]), lambda: run(engine.prompt_logprobs(tokens))):
        with pytest.raises(RuntimeError, match=r"it is asleep \(kv_cache and weights released in the phase train\)"):
            asking()
    with pytest.raises(RuntimeError, match="cannot load weights: it is asleep"):
        run(update_weights(engine, buckets_of(make_model(12)), next(VERSIONS)))

    run(engine.wake_up(["weights"]))
    run(update_weights(engine, buckets_of(make_model(12)), next(VERSIONS)))
    with pytest.raises(RuntimeError, match=r"it is asleep \(kv_cache released in the phase train\)"):
        shared_engine.batch([tokens], ANSWERS, [0])
    run(engine.sleep(2, "checkpoint"))  # after new weights, and before anything is generated
    with pytest.raises(RuntimeError, match=r"it is asleep \(kv_cache and weights released in the phase checkpoint\)"):
        shared_engine.batch([tokens], ANSWERS, [0])
    run(engine.wake_up(["weights"]))
    run(update_weights(engine, buckets_of(make_model(12)), next(VERSIONS)))
    run(engine.wake_up(["kv_cache"]))
    found = run(engine.prompt_logprobs(tokens))
    np.testing.assert_allclose(found, hf_logprobs(make_model(12), tokens), atol=1e-5, rtol=0)
    assert len(shared_engine.batch([tokens], ANSWERS, [0])) == 1


def test_discarded_weights_must_be_loaded_again(shared_engine: Running) -> None:
    """Only at level 2: level 1 restores them."""
    engine, run = shared_engine.engine, shared_engine.run
    run(update_weights(engine, buckets_of(make_model(13)), next(VERSIONS)))
    before = run(engine.prompt_logprobs([4, 5, 6, 7]))
    run(engine.sleep(1, "checkpoint"))
    run(engine.wake_up(["weights", "kv_cache"]))
    np.testing.assert_array_equal(run(engine.prompt_logprobs([4, 5, 6, 7])), before)

    run(engine.sleep(2, "checkpoint"))
    run(engine.wake_up(["kv_cache", "weights"]))
    with pytest.raises(RuntimeError, match="weights were discarded in the phase checkpoint, and no new weights"):
        shared_engine.batch([[4, 5]], ANSWERS, [0])
    run(update_weights(engine, buckets_of(make_model(13)), next(VERSIONS)))
    np.testing.assert_array_equal(run(engine.prompt_logprobs([4, 5, 6, 7])), before)
