"""`Compact` returns the objects that were put into it, and stores them in one buffer."""

import pickle
from dataclasses import astuple, replace

import numpy as np
import pytest

from roll_opd.base.frozen import FrozenDict
from roll_opd.samples.sample import Sample, as_columns, teacher_columns
from roll_opd.samples.transport import Compact


def sent(value):
    """`value` as it arrives, and the number of buffers it travelled in."""
    buffers = []
    data = pickle.dumps(Compact(value), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=buffers), len(buffers)


def experiences(count):
    rng = np.random.default_rng(0)
    for number in range(count):
        response = int(rng.integers(0, 40))  # also none at all
        yield Sample(
            id=f"row-{number}#0/0",
            group_id=f"row-{number}#0",
            tag="math",
            tokens=rng.integers(0, 100, 7 + response),
            prompt_length=7,
            finish_reason="stop",
            versions=((3, response),),
            reward=0.5,
            columns=as_columns(
                action_mask=rng.random(response) < 0.5,
                rollout_logprobs=-rng.random(response, dtype=np.float32),
                **teacher_columns({name: -rng.random(response, dtype=np.float32) for name in ("a", "b")}),
            ),
        )


def test_experiences_arrive_as_they_were_in_one_buffer():
    samples = list(experiences(50))
    arrived, buffers = sent(samples)
    assert buffers == 1
    for expected, found in zip(samples, arrived, strict=True):
        for one, other in zip(astuple(expected), astuple(found), strict=True):
            np.testing.assert_equal(other, one)
        assert found.tokens.dtype == np.int64 and found.action_mask.dtype == bool
        assert found.tokens.flags.aligned and found.rollout_logprobs.flags.aligned


def test_samples_of_many_kinds_arrive_as_they_were():
    """Fields that some samples have, arrays of two dtypes, dicts of other keys, and an array that two samples share."""
    samples = [replace(sample, metrics={}) for sample in experiences(20)]
    shared, strange = np.arange(5.0), FrozenDict({"answers": ("a", 1)})
    samples[3] = replace(samples[3], extra=strange, reward=None).with_columns(old_logprobs=shared)
    samples[4] = samples[4].with_columns(old_logprobs=shared, **teacher_columns({"b": shared}))
    samples[5] = replace(samples[5], teacher_prompts={"a": np.arange(3)}).with_columns(
        advantages=shared.astype(np.float32)
    )
    samples[6] = replace(samples[6], routes=np.zeros((4, 2, 3), np.int16)).with_columns(advantages=shared)
    arrived, buffers = sent(samples)
    assert buffers == 1 and [type(one) for one in arrived] == [Sample] * 20
    for expected, found in zip(samples, arrived, strict=True):
        for one, other in zip(astuple(expected), astuple(found), strict=True):
            np.testing.assert_equal(other, one)
            assert getattr(other, "dtype", None) == getattr(one, "dtype", None) and type(one) is type(other)
        assert list(found.teacher_logprobs) == list(expected.teacher_logprobs)
    assert arrived[7].metrics is not arrived[8].metrics  # two dicts stay two


def test_what_arrives_cannot_be_written_to():
    (array,), _ = sent([np.arange(4)])
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {3: np.zeros(0, np.float32)},
        [np.arange(12).reshape(3, 4).T, np.arange(10)[::2]],  # not contiguous, or only the other way round
        [np.array(["a", None], dtype=object), np.float64(0.5), np.bool_(True)],
        ("text", b"bytes", [np.ones((2, 3), np.float16)]),
    ],
)
def test_any_value_is_the_same_after_pickling(value):
    np.testing.assert_equal(sent(value)[0], value)
