"""The table of columns: the package writes and reads only these columns, and stages set their dtypes."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from roll_opd.config.plan import (
    CorrectionPlan,
    Layout,
    MegatronPlan,
    MicroBatchLimits,
    ModelPlan,
    ObjectivePlan,
    TeacherPlan,
)
from roll_opd.objective.audit import audited
from roll_opd.objective.columns import loss_columns, value_columns
from roll_opd.objective.demonstrations import supervised_samples
from roll_opd.objective.external_advantages import external_advantages
from roll_opd.objective.mismatch import corrected
from roll_opd.objective.registry import ADVANTAGES
from roll_opd.samples.sample import Sample, TargetRef, with_columns
from roll_opd.samples.sample_columns import COLUMNS, as_columns, teacher_columns

PACKAGE = Path(__file__).parents[2] / "roll_opd"
ROOMS = ("actors", "megatron", "objective", "pipelines", "roles", "rollout", "samples", "teachers")
FILES = ("workflows/workflow_experience.py", "tracking/metrics.py")
FILLS = ("with_columns", "as_columns")
KINDS = {"i8": np.int8, "f32": np.float32, "f64": np.float64, "bool": np.bool_, "i32": np.int32}


def is_columns(node: ast.AST) -> bool:
    """Whether the expression is a sample's columns by its name."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name == "columns"


def column_names(node: ast.AST) -> Iterator[str]:
    """Yield the column names that one expression writes or reads."""
    if isinstance(node, ast.Subscript) and is_columns(node.value):
        yield from names_in([node.slice])
    elif isinstance(node, ast.Compare) and is_columns(node.comparators[0]):
        yield from names_in([node.left])
    elif isinstance(node, ast.Call):
        function = node.func
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if called in FILLS:
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
        elif called == "get" and isinstance(function, ast.Attribute) and is_columns(function.value):
            yield from names_in(node.args[:1])
        yield from (name for k in node.keywords if k.arg == "columns" for name in names_in(keys_of(k.value)))
    elif isinstance(node, ast.Assign) and is_columns(node.targets[0]):
        yield from names_in(keys_of(node.value))


def keys_of(node: ast.AST) -> list[ast.expr]:
    return [key for key in node.keys if key] if isinstance(node, ast.Dict) else []


def names_in(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[-1], ast.Constant):
            yield "TEACHER" + str(node.values[-1].value)


def test_the_package_writes_and_reads_the_columns_of_the_table_alone() -> None:
    paths = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]
    paths = [*paths, *(PACKAGE / name for name in FILES)]
    found: dict[str, str] = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            found |= {name: str(path.relative_to(PACKAGE)) for name in column_names(node)}
    assert len(found) > 15  # the search finds something
    assert {name: path for name, path in found.items() if name not in COLUMNS} == {}


def test_every_column_of_the_table_is_named_in_the_package() -> None:
    texts = [path.read_text() for path in PACKAGE.rglob("*.py") if path != PACKAGE / "samples" / "sample_columns.py"]
    for name in COLUMNS:
        last = name.rpartition("/")[2]
        words = ("logprobs_column",) if name == "TEACHER/logprobs" else (f'"{last}"', f'/{last}"', f"{last}=")
        assert any(word in text for text in texts for word in words), name


def expected(name: str, shard: bool) -> str:
    teacher, _, rest = name.rpartition("/")
    column = COLUMNS[f"TEACHER/{rest}" if teacher else name]
    return column.shard if shard else column.dtype


def check(samples: Sequence[Sample], *, shard: bool = False) -> None:
    """Assert that every column is in the table, with the dtype and length of the table."""
    for sample in samples:
        for name, values in sample.columns.items():
            assert values.dtype == KINDS[expected(name, shard)], name
            assert len(values) == sample.response_length, name


def teacher() -> TeacherPlan:
    return TeacherPlan("t", MegatronPlan("t", ModelPlan("m"), (0,), Layout(), MicroBatchLimits()), 0.5)


def rollouts(rng: np.random.Generator, *, targets: bool) -> list[Sample]:
    found = []
    for number in range(8):
        length = int(rng.integers(1, 9))
        logprobs = [-rng.random(length).astype(np.float32) for _ in range(5)]
        columns = as_columns(
            action_mask=np.arange(length) != 1,
            rollout_logprobs=logprobs[0],
            old_logprobs=logprobs[1],
            ref_logprobs=logprobs[2],
            values=logprobs[3],
            **teacher_columns({"t": logprobs[4]}),
        )
        refs = {"t": TargetRef(None, 0, {})} if targets else {}
        facts = {"id": str(number), "group_id": str(number // 4), "run": number, "reward": float(rng.random())}
        found.append(Sample(np.arange(2 + length), 2, columns, **facts, state="s", teacher_targets=refs))
    return found


@pytest.mark.parametrize("estimator", ADVANTAGES.builtin)
@pytest.mark.parametrize("opd", ["sampled", "topk"])
def test_stages_fill_columns_with_the_dtypes_of_the_table(estimator: str, opd: str) -> None:
    objective = ObjectivePlan(
        adv_estimator=estimator,
        opd_objective=opd,  # type: ignore[arg-type]
        opd_kl_discount=0.5,
        correction=CorrectionPlan(weight="tis", high=2.0, negatives_delta=0.1),
    )
    samples = rollouts(np.random.default_rng(0), targets=opd == "topk")
    check(samples)
    samples = external_advantages(samples, objective, taught=True)
    samples = corrected(audited(samples, [teacher()], objective), [teacher()], objective)
    check(samples)
    check(loss_columns(samples, [teacher()], objective), shard=True)
    if estimator == "gae":
        check(value_columns(samples), shard=True)


def test_rows_with_answers_have_columns_of_the_table() -> None:
    samples = supervised_samples([(np.arange(3), (np.arange(2), np.arange(4)))])
    samples = with_columns(samples, ref_logprobs=[np.zeros(2, np.float32), np.zeros(4, np.float32)])
    check(samples)
    check(loss_columns(samples, [], ObjectivePlan(policy_loss="sft")), shard=True)


def test_a_batch_is_filled_by_column_and_a_column_is_removed_by_none() -> None:
    samples = supervised_samples([(np.arange(3), (np.arange(2), np.arange(4)))])
    old = [np.zeros(2, np.float32), np.zeros(4, np.float32)]
    filled = with_columns(samples, old_logprobs=old, rollout_logprobs=old)
    assert [one.old_logprobs is values for one, values in zip(filled, old, strict=True)] == [True, True]
    assert all(one.old_logprobs is None for one in samples)  # the samples given are unchanged
    removed = filled[0].with_columns(old_logprobs=None)
    assert removed.columns.keys() == {"action_mask", "rollout_logprobs"}
    with pytest.raises(ValueError, match="zip"):
        with_columns(samples, old_logprobs=old[:1])
