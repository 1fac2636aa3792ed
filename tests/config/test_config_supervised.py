"""SFT and DPO: epochs, and messages about keys and lengths that do not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_opd.config.plan import RunPlan
from roll_opd.pipelines.start_checks import miscounted

Plan = Callable[..., RunPlan]
Problems = Callable[..., list[str]]
ROWS, UPDATE = 50, 4  # an update's is per_device_train_batch_size 2 x gradient_accumulation_steps 2 x one rank
ROLE = {"sft": "sft_train", "dpo": "actor_train"}


@pytest.fixture(params=["sft", "dpo"])
def schema(request: pytest.FixtureRequest, root: Path, values: dict[str, Any]) -> str:
    """Return the schema of the data; the base configuration has ROWS rows."""
    train = values.pop("student_train")
    file = root / "rows.jsonl"
    file.write_text((json.dumps({"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}) + "\n") * ROWS)
    kept = {key: values[key] for key in ("hydra", "exp_name", "output_dir", "num_gpus_per_node")}
    train["data_args"] = {"file_name": str(file)}
    train["device_mapping"] = "[0]"
    train["strategy_args"] = {"strategy_name": "megatron_train"}
    train["training_args"] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    values.clear()
    values |= {**kept, "sequence_length": 64, "max_steps": 5, ROLE[request.param]: train}
    if request.param == "dpo":
        values["reference"] = {"strategy_args": {"strategy_name": "megatron_infer"}, "device_mapping": "[0]"}
    return request.param


@pytest.mark.parametrize(("epochs", "steps"), [(1, ROWS // UPDATE), (2.5, int(2.5 * ROWS) // UPDATE)])
def test_epochs_become_steps(plan: Plan, schema: str, epochs: float, steps: int) -> None:
    key = f"{ROLE[schema]}.training_args.num_train_epochs"
    run = plan({key: epochs, "max_steps": -1}, pure=None, pipeline=schema)
    assert (run.max_steps, run.student.optimizer.total_steps) == (steps, steps)
    assert miscounted(run, ROWS) is None
    usable = ROWS - 20
    said = miscounted(run, usable)
    assert f"max_steps={steps}," in said and f"max_steps={int(epochs * usable) // UPDATE}" in said
    assert miscounted(plan({"max_steps": 3}, pure=None, pipeline=schema), usable) is None


def test_the_kl_loss_is_that_of_trinitys_row(plan: Plan, schema: str) -> None:
    """ROLL's DPO has no KL loss; `algorithm_type` adds Trinity-RFT's, and sft has no reference policy."""

    def coefficient(changes: dict[str, Any]) -> float:
        objective = plan(changes, pure=None, pipeline=schema).objective
        assert objective.loss_agg_mode == {"sft": "token-mean", "dpo": "seq-mean-token-mean"}[schema]
        return objective.kl_loss_coef

    assert coefficient({}) == 0.0
    assert coefficient({"algorithm_type": schema}) == (0.001 if schema == "dpo" else 0.0)
    if schema == "dpo":
        assert plan({"algorithm_type": "dpo"}, pure=None, pipeline=schema).objective.kl_loss == "k2"
        assert coefficient({"algorithm_type": "dpo", "kl_loss_coef": 0.0}) == 0.0
        assert coefficient({"algorithm_type": ..., "kl_loss_coef": 0.2}) == 0.2


def test_rows_are_limited_by_sequence_length(plan: Plan, schema: str) -> None:
    data = plan({}, pure=None, pipeline=schema).data
    assert (data.schema, data.prompt_length, data.length_key) == (schema, 64, "sequence_length")


def test_what_is_too_long_is_named_as_it_is(problems: Problems, schema: str) -> None:
    changes = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 40}
    (found,) = problems({f"{ROLE[schema]}.{key}": value for key, value in changes.items()}, pure=None, pipeline=schema)
    what = {"sft": "one sequence of prompt + answer (64 tokens)", "dpo": "a pair, which stays together (128"}
    assert what[schema] in found
    (found,) = problems(
        {f"{ROLE[schema]}.max_tokens_per_microbatch_in_train": 512, "sequence_length": 256}, pure=None, pipeline=schema
    )
    assert found.startswith("sequence_length: 256 is more than the positions of student (128)")


def test_keys_of_rollouts_and_teachers_have_no_effect(plan: Plan, schema: str) -> None:
    written = {"generating_args": {"max_new_tokens": 8}, "opd_kl_coef": 1.0, "tag_included": ["math"]}
    run = plan({f"{ROLE[schema]}.{key}": value for key, value in written.items()}, pure=None, pipeline=schema)
    (warning,) = [text for text in run.warnings if "have no effect here" in text]
    assert "of roles: generating_args, opd_kl_coef, tag_included" in warning
