"""Tokens that the engine check tests: sampled by known weights, at equal intervals, none of demonstrations."""

import numpy as np

from roll_opd.config.plan import EngineCheckPlan, ObjectivePlan
from roll_opd.config.schema import SamplingKeys
from roll_opd.objective import engine_evidence
from roll_opd.objective.columns import loss_columns
from roll_opd.objective.engine_evidence import CURRENT, ENGINE_LOGPROBS, OLDER, SAMPLED_BY, TESTED_SETTINGS, marked
from roll_opd.samples.call_settings import CALL_SETTINGS, OF_RUN, UNKNOWN
from roll_opd.samples.sample import Sample, as_columns, changed


def sample(versions: tuple[tuple[int | None, int], ...], logprobs: list[float], mask: list[bool]) -> Sample:
    columns = as_columns(action_mask=np.array(mask), rollout_logprobs=np.array(logprobs, np.float32))
    return Sample(np.arange(2 + len(mask)), 2, columns, versions=versions)


def marks(samples: list[Sample], version: int, plan: EngineCheckPlan | None = None) -> list[list[int]]:
    made = marked(samples, version, plan or EngineCheckPlan())
    return [one.columns[SAMPLED_BY].tolist() for one in made]


def test_marks_follow_the_versions() -> None:
    one = sample(((3, 2), (None, 1), (4, 2)), [-1.0, -2.0, 0.0, -3.0, -4.0], [True, True, False, True, True])
    assert marks([one], 4) == [[OLDER, OLDER, 0, CURRENT, CURRENT]]
    assert marks([one], 4, EngineCheckPlan(is_corrected=True)) == [[OLDER, OLDER, 0, OLDER, OLDER]]
    broken = sample(((4, 2),), [-1.0, float("nan")], [True, True])
    unknown = sample((), [-1.0], [True])
    given = changed(broken, demonstration=True)
    assert marks([broken, unknown, given], 4) == [[CURRENT, 0], [0], [0, 0]]
    assert marks([broken.with_columns(rollout_logprobs=None)], 4) == [[0, 0]]


def test_tokens_are_tested_with_the_settings_of_their_call() -> None:
    """Not with a repetition penalty or unknown settings, nor if older weights wrote greedy tokens."""
    rows = {"run": OF_RUN, "cold": (0.5, 7, 0.9, 1), "greedy": (0, -1, 1, 1), "penalty": (1, -1, 1, 1.2)}
    rows["unknown"] = UNKNOWN
    given = np.array(list(rows.values()), np.float32)
    plan = EngineCheckPlan(SamplingKeys(temperature=0.8))
    for version, expected in ((0, [CURRENT, CURRENT, CURRENT, 0, 0]), (1, [OLDER, OLDER, 0, 0, 0])):
        one = sample(((0, 5),), [-1.0] * 5, [True] * 5)
        own, other = marked([one.with_columns(**{CALL_SETTINGS: given}), one], version, plan)
        assert own.columns[SAMPLED_BY].tolist() == expected
        tested = own.columns[TESTED_SETTINGS][:3].tolist()
        np.testing.assert_allclose(tested, [[0.8, -1, 1], [0.5, 7, 0.9], [0, -1, 1]], rtol=1e-6)
        np.testing.assert_allclose(other.columns[TESTED_SETTINGS], [[0.8, -1, 1]] * 5, rtol=1e-6)
    penalised = EngineCheckPlan(SamplingKeys(repetition_penalty=1.1))
    assert marks([sample(((0, 1),), [-1.0], [True])], 0, penalised) == [[0]]


def test_a_large_step_is_tested_at_equal_intervals(monkeypatch) -> None:
    monkeypatch.setattr(engine_evidence, "TESTED_TOKENS", 4)
    samples = [sample(((0, length),), [-1.0] * length, [True] * length) for length in (5, 1, 6)]
    found = [mark for row in marks(samples, 0) for mark in row]
    assert [place for place, mark in enumerate(found) if mark] == [0, 3, 6, 9]


def test_losses_read_the_same_columns_with_and_without_marked() -> None:
    samples = [sample(((0, 3),), [-1.0, -2.0, -0.5], [True, True, True])]
    plain = loss_columns(samples, (), ObjectivePlan())
    tested = loss_columns(marked(samples, 0, EngineCheckPlan()), (), ObjectivePlan())
    assert tested[0].columns.keys() - plain[0].columns.keys() == {SAMPLED_BY, ENGINE_LOGPROBS}
    for name, values in plain[0].columns.items():
        np.testing.assert_array_equal(tested[0].columns[name], values)
