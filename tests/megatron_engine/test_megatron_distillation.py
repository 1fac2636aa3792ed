"""`full` and `topk` in the engine, against complete distributions of Hugging Face's models and autograd."""

import megatron_layouts as layouts
import megatron_models as models
import megatron_reference as reference
import pytest
from megatron_answers import Answers
from megatron_jobs import distillation

from tests.cover import cover, tiered


@pytest.fixture(scope="module")
def naive(answers: Answers) -> tuple[list[dict], dict]:
    paths = {name: layouts.model_path(answers.root, name) for name in distillation.TEACHERS}
    return reference.naive_distilling(paths, layouts.model_path(answers.root, "qwen3_tied"))


@pytest.mark.parametrize(
    "layout",
    tiered(
        distillation.TEACHER_LAYOUTS,
        cover(
            distillation.TEACHER_LAYOUTS,
            of=lambda layout: (*layouts.axes(layout), *layouts.axes(distillation.TEACHER_LAYOUTS[layout])),
        ),
    ),
)
def test_distilling_equals_the_naive_one(answers: Answers, naive: tuple[list[dict], dict], layout: str) -> None:
    """Two teachers, on another layout than the student's; one has a wider vocabulary, each looks at some samples."""
    found = answers.values(f"distil-{layout}")
    wanted, final = naive
    assert len(found) == len(wanted) == len(distillation.DISTILLING)
    for record, plain in zip(found, wanted, strict=True):
        assert record["applied"]
        assert record["loss"] == pytest.approx(plain["loss"], rel=1e-5, abs=1e-6)
        assert record["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
    before = dict(models.load(layouts.model_path(answers.root, "qwen3_tied")).named_parameters())
    for name, tensor in answers.weights(f"distil-{layout}").items():
        moved = (final[name] - before[name]).norm()
        assert moved > 0
        assert (tensor - final[name]).norm() <= 2e-3 * moved, name
