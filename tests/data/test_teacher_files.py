"""Teacher files: reading returns the written bits; formats of other projects; errors name the row."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from roll_opd.config.plan import DataPlan
from roll_opd.data.row_formats import DataError
from roll_opd.data.teacher_files import ROWS_OF_A_PART, TeacherWriter, facts_of, open_teacher_files
from roll_opd.data.teacher_scores import Expected, TeacherScores, narrowed, problem
from roll_opd.data.templates import load_tokenizer

VOCABULARY, K = 40, 4
DEMO = Path(__file__).parents[2] / "examples" / "demo" / "models" / "student"
FACTS = {"teacher": "large", "tokenizer": "abc", "temperature": 1.0}
TOPK = Expected(VOCABULARY, "abc", topk=K)
SAMPLED = replace(TOPK, topk=None)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(str(DEMO))


def softmax(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Log-probs of random distributions, f64 [tokens, VOCABULARY]."""
    logits = rng.normal(0, 2, (tokens, VOCABULARY))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def scored(seed: int, tokens: int = 12) -> TeacherScores:
    """A consistent row: sampled tokens, their log-probs, the top-k and the rest."""
    rng = np.random.default_rng(seed)
    logprobs = softmax(rng, tokens)
    response = np.array([rng.choice(VOCABULARY, p=np.exp(row)) for row in logprobs])
    ids = np.argsort(-logprobs, 1)[:, :K].astype(np.int32)
    best = np.take_along_axis(logprobs, ids, 1)
    rest = np.log(1 - np.exp(best).sum(1))
    own = np.take_along_axis(logprobs, response[:, None], 1)[:, 0]
    arrays = {"logprobs": own, "topk_logprobs": best, "topk_rest": rest}
    f32 = {name: values.astype(np.float32) for name, values in arrays.items()}
    return TeacherScores(rng.integers(0, VOCABULARY, 5), response, topk_ids=ids, **f32, **FACTS)


def rows_of(scores: list[TeacherScores]) -> list[dict[str, Any]]:
    return [
        {"id": n, "tokens": [*one.prompt_ids.tolist(), *one.response_ids.tolist()], "prompt_length": 5}
        for n, one in enumerate(scores)
    ]


def arrays_of(scores: TeacherScores) -> dict[str, np.ndarray]:
    return {name: getattr(scores, name) for name in ("logprobs", "topk_ids", "topk_logprobs", "topk_rest")}


def written(path: Path, scores: list[TeacherScores], **facts: Any) -> Path:
    writer = TeacherWriter(path, {**FACTS, **facts}, K, VOCABULARY, {})
    for number, part in writer.missing(iter(rows_of(scores))):
        first = number * ROWS_OF_A_PART
        writer.write(number, part, [arrays_of(one) for one in scores[first : first + len(part)]])
    writer.finish()
    return path


def plan_of(*files: Path, **changes: Any) -> DataPlan:
    return DataPlan(tuple(map(str, files)), 64, schema="scored", length_key="sequence_length", **changes)


def test_a_file_is_read_with_the_bits_that_were_written(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Over several parts and row groups, in any order; nothing is left next to the file."""
    scores = [scored(seed, tokens=3 + seed % 7) for seed in range(ROWS_OF_A_PART + 70)]
    file = written(tmp_path / "scores.parquet", scores)
    assert [path.name for path in tmp_path.iterdir()] == ["scores.parquet"]
    rows, report = open_teacher_files(plan_of(file), tokenizer, TOPK)
    assert len(rows) == report.prompts == len(scores)
    for number in (300, 0, 65, 299):
        (row,) = rows.read([number])
        assert row.id == str(number) and row.scores is not None
        for name, wanted in arrays_of(scores[number]).items():
            np.testing.assert_array_equal(getattr(row.scores, name), wanted, strict=True)
        assert row.answers[0].tolist() == scores[number].response_ids.tolist()
    facts = facts_of([str(file)], None)
    assert (facts.vocab_size, facts.topk) == (VOCABULARY, K)


def test_an_interrupted_writing_continues_after_its_last_part(tmp_path: Path) -> None:
    """A part of other settings is written again; an unfinished part does not count."""
    scores, file = [scored(seed, 2) for seed in range(2 * ROWS_OF_A_PART)], tmp_path / "scores.parquet"
    first = TeacherWriter(file, FACTS, K, VOCABULARY, {"input": "a"})
    number, part = next(first.missing(iter(rows_of(scores))))
    first.write(number, part, [arrays_of(one) for one in scores[:ROWS_OF_A_PART]])
    (first.parts / "00000001.partial").write_bytes(b"half")
    again = TeacherWriter(file, FACTS, K, VOCABULARY, {"input": "a"})
    assert [number for number, _ in again.missing(iter(rows_of(scores)))] == [1] and not file.exists()
    other = TeacherWriter(file, FACTS, K, VOCABULARY, {"input": "b"})
    assert [number for number, _ in other.missing(iter(rows_of(scores)))] == [0, 1]


def changed(name: str, at: tuple[int, ...], value: float) -> Any:
    def change(row: TeacherScores) -> TeacherScores:
        values = getattr(row, name).copy()
        values[at] = value
        return replace(row, **{name: values})

    return change


def renormalised(row: TeacherScores) -> TeacherScores:
    assert row.topk_logprobs is not None
    whole = np.log(np.exp(row.topk_logprobs.astype(np.float64)).sum(1, keepdims=True))
    return replace(row, topk_logprobs=(row.topk_logprobs - whole).astype(np.float32), topk_rest=None, logprobs=None)


INCONSISTENT = {
    "another tokenizer": (lambda row: replace(row, tokenizer="xyz"), "tokenizer xyz, but the student's is abc"),
    "another temperature": (lambda row: replace(row, temperature=0.7), "at temperature 0.7, but the run samples at 1"),
    "fewer log-probs": (lambda row: replace(row, logprobs=row.logprobs[:-1]), "11 entries of teacher_logprobs for 12"),
    "fewer positions": (lambda row: replace(row, topk_ids=row.topk_ids[1:]), "11 entries of teacher_topk_ids for 12"),
    "a mask of other length": (lambda row: replace(row, mask=np.ones(3, bool)), "3 entries of loss_mask"),
    "an empty answer": (lambda row: replace(row, response_ids=row.response_ids[:0]), "5 prompt and 0 response tokens"),
    "a foreign token": (changed("response_ids", (3,), VOCABULARY), "response id 40 is outside"),
    "a foreign top-k token": (changed("topk_ids", (3, 1), -1), "top-k id -1 is outside"),
    "an overflow of f16": (changed("topk_logprobs", (2, 3), -math.inf), "-inf at response token 2 is not finite"),
    "not a number": (changed("logprobs", (5,), math.nan), "nan at response token 5 is not finite"),
    "a placeholder": (changed("logprobs", (5,), -1000.0), "-1000 at response token 5 is a placeholder"),
    "a logit": (changed("topk_logprobs", (1, 0), 3.5), "3.5 at response token 1 is positive"),
    "one token twice": (lambda row: replace(row, topk_ids=row.topk_ids * 0), "twice in the top-k of response token 0"),
    "a renormalised top-k": (renormalised, "its top-k is renormalised"),
    "a rest of another top-k": (lambda row: replace(row, topk_rest=row.topk_rest - 5), "sum to 0."),
    "shifted log-probs": (lambda row: replace(row, logprobs=np.roll(row.logprobs, 1)), "one of the two is shifted"),
    "no top-k": (lambda row: replace(row, topk_ids=None, topk_logprobs=None, topk_rest=None), "has no top-k"),
    "a smaller top-k": (
        lambda row: replace(row, topk_ids=row.topk_ids[:, :2], topk_logprobs=row.topk_logprobs[:, :2]),
        "has 2 tokens, but opd_topk is 4",
    ),
}


@pytest.mark.parametrize("name", INCONSISTENT)
def test_every_inconsistency_of_a_row_is_found(name: str) -> None:
    change, message = INCONSISTENT[name]
    row = scored(7)
    assert problem(row, TOPK) is None
    assert message in (problem(change(row), TOPK) or "")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_true_rows_are_never_refused(dtype: type) -> None:
    """Random distributions, rounded to f16 too: with and without a rest, log-probs or a top-k only."""
    error = 1e-3 if dtype == np.float16 else 1e-6
    for seed in range(200):
        row = scored(seed, tokens=8)
        rounded = {name: getattr(row, name).astype(dtype).astype(np.float32) for name in ("logprobs", "topk_logprobs")}
        row = replace(row, **rounded, error=error)
        for one in (row, replace(row, topk_rest=None), replace(row, topk_rest=None, logprobs=None)):
            assert problem(one, TOPK) is None
        assert problem(replace(row, topk_ids=None, topk_logprobs=None, topk_rest=None), SAMPLED) is None


def test_an_inconsistent_row_is_refused_by_its_number_or_dropped(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    scores = [scored(seed) for seed in range(5)]
    scores[3] = changed("logprobs", (2,), math.nan)(scores[3])
    file = written(tmp_path / "scores.parquet", scores)
    with pytest.raises(DataError, match=r"scores.parquet:4 \(teacher_logprobs nan at response token 2"):
        open_teacher_files(plan_of(file), tokenizer, TOPK)
    rows, report = open_teacher_files(plan_of(file, on_bad_row="drop"), tokenizer, TOPK)
    assert report.bad == 1 and [row.id for row in rows.all()] == ["0", "1", "2", "4"]
    with pytest.raises(DataError, match="tokenizer abc, but the student's is def"):
        open_teacher_files(plan_of(file, on_bad_row="drop"), tokenizer, replace(TOPK, tokenizer="def"))


def test_the_largest_of_a_topk_are_its_topk() -> None:
    row = scored(3)
    assert row.topk_logprobs is not None and row.topk_ids is not None
    two = narrowed(row, 2)
    np.testing.assert_array_equal(two["topk_ids"], row.topk_ids[:, :2])
    mass = np.exp(two["topk_logprobs"].astype(np.float64)).sum(1) + np.exp(two["topk_rest"].astype(np.float64))
    np.testing.assert_allclose(mass, 1, atol=1e-6)
    same = narrowed(row, K)
    np.testing.assert_array_equal(same["topk_rest"], row.topk_rest)


def test_files_of_no_known_format_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "other.parquet")
    for opened in (
        lambda: open_teacher_files(plan_of(tmp_path / "other.parquet"), tokenizer, TOPK),
        lambda: facts_of([str(tmp_path / "other.parquet")], None),
    ):
        with pytest.raises(DataError, match="no known teacher file"):
            opened()
