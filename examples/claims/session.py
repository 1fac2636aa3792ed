"""The engine of the claims in the package's processes: Megatron trains and scores, vLLM samples, Ray between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from lab import ANSWERS, SAMPLES, Signal
from make_chains import LONGEST, TASKS, write_rows

import roll_opd
from roll_opd.api import Batch, Session
from roll_opd.samples.sample import teacher_columns

# one student, one teacher and one engine on two CPU slots; every step is one update on fresh samples
CONFIG = {
    "hydra": {"run": {"dir": "."}, "output_subdir": None},
    "exp_name": "claims",
    "num_gpus_per_node": 2,
    "max_steps": 100_000,  # steps are made by the claim
    "save_steps": 0,
    "eval_steps": 0,
    "rollout_batch_size": SAMPLES // ANSWERS,
    "num_return_sequences_in_group": ANSWERS,
    "prompt_length": 8,
    "response_length": LONGEST,  # each arm has its length
    "logged_samples_per_step": 0,
    "student_train": {
        "model_args": {"dtype": "fp32"},
        "training_args": {
            "learning_rate": 1.0e-3,
            "weight_decay": 0,
            "per_device_train_batch_size": SAMPLES,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
        },
        "device_mapping": "[0]",
        "use_dynamic_batching_in_train": True,
        "max_tokens_per_microbatch_in_train": 16384,
    },
    "student_infer": {
        "model_args": {"dtype": "fp32"},
        "strategy_args": {"strategy_name": "vllm", "strategy_config": {"max_num_seqs": 256, "enforce_eager": True}},
        "device_mapping": "[1]",
    },
    "teacher": {
        "model_args": {"dtype": "fp32"},
        "device_mapping": "[0]",
        "use_dynamic_batching_in_infer": True,
        "max_tokens_per_microbatch_in_infer": 16384,
    },
}


class SessionEngine:
    """A session in which each reset loads the first student again."""

    def __init__(self, session: Session, start: Path) -> None:
        self._session, self._start = session, start
        session.student.save(start)

    def reset(self, seed: int) -> None:
        """Start again from the first student, with its optimizer state; samples are seeded by the session."""
        self._session.student.load(self._start)

    def sample(self, asked: list[str], length: int, greedy: bool) -> list[str]:
        """Return an answer of at most `length` tokens to each question."""
        messages = [[{"role": "user", "content": question}] for question in asked]
        setting = {"temperature": 0} if greedy else {}
        self._batch = self._session.sampler.sample(messages, n=1, max_new_tokens=length, **setting)
        return list(self._batch.texts)

    def update(self, signal: Signal, rewards: np.ndarray, learning_rate: float) -> None:
        """Make one optimizer step on the answers of the last `sample`."""
        scored = self._session.teacher.score(self._batch)
        self._session.student.forward_backward(with_advantages(scored, signal, rewards))
        self._session.student.optim_step(learning_rate=learning_rate)
        self._session.sampler.update()


def with_advantages(batch: Batch, signal: Signal, rewards: np.ndarray) -> Batch:
    """Return the batch with teacher log-probs from which the session computes the signal's advantages."""
    ((name, _),) = batch.samples[0].teacher_logprobs.items()
    width = max(len(sample.student_logprobs) for sample in batch.samples)
    student, scored = (
        np.stack([np.pad(row, (0, width - len(row))) for row in rows])
        for rows in zip(*((s.student_logprobs, s.teacher_logprobs[name]) for s in batch.samples), strict=True)
    )
    wanted = student + signal(student, scored, rewards)
    samples = [
        sample.with_columns(**teacher_columns({name: row[: len(sample.student_logprobs)].astype(np.float32)}))
        for sample, row in zip(batch.samples, wanted, strict=True)
    ]
    return replace(batch, samples=tuple(samples))


@contextmanager
def opened(models: Path, task: str, directory: Path) -> Iterator[SessionEngine]:
    """Open a session with a task's models; its files are in `directory`."""
    rows = directory / "rows.jsonl"
    write_rows(TASKS[task], length=4, count=64, seed=0, path=rows)
    overrides = {
        "pretrain": str(models / f"{task}_student"),
        "teacher.model_args.model_name_or_path": str(models / f"{task}_teacher"),
        "student_train.data_args.file_name": str(rows),
        "output_dir": str(directory),
    }
    with roll_opd.open(CONFIG, overrides) as session:
        yield SessionEngine(session, directory / "start")
