"""Alignment of two tokenizations of the same bytes against a loop over bytes, and its time."""

import time

import numpy as np
import pytest

from roll_opd.samples.byte_alignment import NO_CHUNK, Alignment


def cut_of(rng: np.random.Generator, length: int) -> np.ndarray:
    """Return the ends of random tokens of `length` bytes."""
    ends = np.flatnonzero(rng.random(length - 1) < rng.choice([0.1, 0.5, 0.9])) + 1
    return np.append(ends, length)


def aligned(student: np.ndarray, teacher: np.ndarray, missing: np.ndarray | None = None) -> Alignment:
    absent = np.zeros(len(teacher), bool) if missing is None else missing
    return Alignment(student, teacher, absent, np.ones(len(student), bool))


def test_chunks_are_those_of_a_loop_over_bytes() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        length = int(rng.integers(1, 40))
        student, teacher = cut_of(rng, length), cut_of(rng, length)
        logprobs, missing = -rng.random(len(teacher)), rng.random(len(teacher)) < 0.1
        chunks: list[tuple[list[int], list[int]]] = [([], [])]
        for byte in range(1, length + 1):
            chunks[-1][0].extend(np.flatnonzero(student == byte).tolist())
            chunks[-1][1].extend(np.flatnonzero(teacher == byte).tolist())
            if byte in student and byte in teacher:
                chunks.append(([], []))
        found = aligned(student, teacher, missing)
        on_student = found.on_student_tokens(logprobs[~missing].astype(np.float32))
        sizes = []
        for ours, theirs in chunks[:-1]:
            covered = not missing[theirs].any()
            assert found.chunks[ours].tolist() == [ours[0] if covered else NO_CHUNK] * len(ours)
            if covered:
                assert on_student[ours].sum() == pytest.approx(logprobs[theirs].sum(), abs=1e-5)
                sizes.append([len(ours), len(theirs), student[ours[-1]] - ([0, *student][ours[0]])])
            else:
                assert np.isnan(on_student[ours]).all()
        assert found.sizes.tolist() == sizes
        assert found.uncovered == len(student) - sum(size[0] for size in sizes)


def test_the_same_cut_gives_the_same_log_probs_to_the_bit() -> None:
    rng = np.random.default_rng(1)
    ends, logprobs = cut_of(rng, 500), None
    logprobs = (-rng.random(len(ends)) * 30).astype(np.float32)
    found = aligned(ends, ends)
    assert found.on_student_tokens(logprobs).tobytes() == logprobs.tobytes()
    assert found.chunks.tolist() == list(range(len(ends)))


def test_an_empty_response_has_no_chunks() -> None:
    none = np.zeros(0, np.int64)
    found = aligned(none, none)
    assert found.chunks.shape == found.on_student_tokens(np.zeros(0, np.float32)).shape == (0,)
    assert found.uncovered == 0 and found.sizes.shape == (0, 3)


def test_observed_tokens_have_no_chunk_and_are_not_uncovered() -> None:
    ends = np.arange(1, 5)
    found = Alignment(ends, ends, np.zeros(4, bool), np.array([True, False, False, True]))
    assert found.chunks.tolist() == [0, NO_CHUNK, NO_CHUNK, 3] and found.uncovered == 0
    assert len(found.sizes) == 2


def test_alignment_takes_less_than_a_microsecond_a_token() -> None:
    rng = np.random.default_rng(2)
    cuts = [(cut_of(rng, 4000), cut_of(rng, 4000)) for _ in range(20)]
    taken = []
    for student, teacher in cuts:
        start = time.perf_counter()
        found = aligned(student, teacher)
        found.on_student_tokens(np.zeros(len(teacher), np.float32))
        taken.append((time.perf_counter() - start) / len(student))
    assert min(taken) < 20e-6  # seconds; measured 0.3e-6
