"""Updates that go wrong are noticed inside the engine core, and the engine then refuses to work."""

from collections.abc import Callable

import pytest
import torch
from inference_models import MAX_MODEL_LEN, Running, buckets_of, make_model

from roll_opd.config.plan import SamplingPlan
from roll_opd.inference import bucket
from roll_opd.inference.engine import WeightUpdateError

Buckets = list[dict[str, torch.Tensor]]


def without_one_part_of_a_fused_layer(buckets: Buckets) -> Buckets:
    return [{n: t for n, t in b.items() if n != "model.layers.1.self_attn.k_proj.weight"} for b in buckets]


def twice(buckets: Buckets) -> Buckets:
    return [*buckets, buckets[0]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_one_part_of_a_fused_layer, r"did not arrive: model.layers.1.self_attn.qkv_proj \(.* of .*\)"),
        (twice, "sent twice in one update: "),
    ],
)
def test_incomplete_updates_are_noticed(
    tiny_model_path: str, spoil: Callable[[Buckets], Buckets], message: str
) -> None:
    running = Running(tiny_model_path)
    with pytest.raises(WeightUpdateError, match=message):
        running.run(running.engine.update_weights(spoil(buckets_of(make_model(1))), 1))
    with pytest.raises(RuntimeError, match="cannot be used: update to weights version 1 failed"):
        running.run(running.engine.generate([2], SamplingPlan(), 0))
    assert running.engine.weights_version == 0
    running.close()


def test_weights_that_changed_on_the_way_are_noticed(tiny_model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprint is taken of the source; here memory says something else afterwards."""
    honest = bucket.fingerprint

    def taken_before_a_bit_flips(tensor: torch.Tensor, dtype: torch.dtype) -> dict[str, list[int]]:
        result = honest(tensor, dtype)
        if tensor.ndim == 1 and tensor.numel() == 64:
            tensor[3] += 2e-7 * MAX_MODEL_LEN
        return result

    monkeypatch.setattr(bucket, "fingerprint", taken_before_a_bit_flips)
    running = Running(tiny_model_path)
    with pytest.raises(WeightUpdateError, match=r"not hold what was sent: model\.layers\.0\.input_layernorm"):
        running.run(running.engine.update_weights(buckets_of(make_model(1)), 1))
    running.close()
