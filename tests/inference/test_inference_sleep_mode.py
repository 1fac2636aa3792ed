"""An engine whose memory is another's: no answers, no weights taken in at the wrong moment, and none lost.

What vLLM's sleep mode frees is on GPUs; the order of calls, and what is refused, are the same here.
"""

import itertools

import numpy as np
import pytest
from inference_models import Running, buckets_of, hf_logprobs, make_model

from roll_opd.config.plan import SamplingPlan

VERSIONS = itertools.count(1000)
ANSWERS = SamplingPlan(max_new_tokens=4)


def test_it_gives_no_answers_until_it_has_weights_and_a_cache(shared_engine: Running) -> None:
    engine, run = shared_engine.engine, shared_engine.run
    tokens = np.random.default_rng(1).integers(2, 99, 30).tolist()
    run(engine.update_weights(buckets_of(make_model(11)), next(VERSIONS)))

    run(engine.sleep(2, "train"))
    run(engine.sleep(2, "train"))  # it does already
    for asking in (lambda: shared_engine.batch([tokens], ANSWERS, [0]), lambda: run(engine.prompt_logprobs(tokens))):
        with pytest.raises(RuntimeError, match=r"weights were away: it gave its memory back in the phase train"):
            asking()
    with pytest.raises(RuntimeError, match="sent weights while the memory for them was away"):
        run(engine.update_weights(buckets_of(make_model(12)), next(VERSIONS)))

    run(engine.wake_up(["weights"]))
    run(engine.update_weights(buckets_of(make_model(12)), next(VERSIONS)))
    with pytest.raises(RuntimeError, match="while its kv_cache were away"):
        shared_engine.batch([tokens], ANSWERS, [0])
    run(engine.sleep(2, "checkpoint"))  # after new weights, and before anything is generated
    with pytest.raises(RuntimeError, match=r"its kv_cache, weights were away: it gave .* in the phase checkpoint"):
        shared_engine.batch([tokens], ANSWERS, [0])
    run(engine.wake_up(["weights"]))
    run(engine.update_weights(buckets_of(make_model(12)), next(VERSIONS)))
    run(engine.wake_up(["kv_cache"]))
    found = run(engine.prompt_logprobs(tokens))
    np.testing.assert_allclose(found, hf_logprobs(make_model(12), tokens), atol=1e-5, rtol=0)
    assert len(shared_engine.batch([tokens], ANSWERS, [0])) == 1


def test_weights_that_were_given_up_are_missed(shared_engine: Running) -> None:
    """At level 2 alone: at level 1 they come back."""
    engine, run = shared_engine.engine, shared_engine.run
    run(engine.update_weights(buckets_of(make_model(13)), next(VERSIONS)))
    before = run(engine.prompt_logprobs([4, 5, 6, 7]))
    run(engine.sleep(1, "checkpoint"))
    run(engine.wake_up(["weights", "kv_cache"]))
    np.testing.assert_array_equal(run(engine.prompt_logprobs([4, 5, 6, 7])), before)

    run(engine.sleep(2, "checkpoint"))
    run(engine.wake_up(["kv_cache", "weights"]))
    with pytest.raises(RuntimeError, match="before it had weights: it gave them up in the phase checkpoint"):
        shared_engine.batch([[4, 5]], ANSWERS, [0])
    run(engine.update_weights(buckets_of(make_model(13)), next(VERSIONS)))
    np.testing.assert_array_equal(run(engine.prompt_logprobs([4, 5, 6, 7])), before)
