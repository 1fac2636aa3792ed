"""Training as a library: a session with student, teachers and sampler. The caller's code executes each part of a step.

    with roll_opd.open("examples/demo/onpolicy_distill.yaml") as session:
        for _ in range(20):
            batch = session.sampler.sample(session.prompts(32), n=1)
            batch = session.teacher.score(batch)
            session.student.forward_backward(batch)
            session.student.optim_step()
            session.sampler.update()
        session.student.save("out")

The models run in the processes of an ordinary run with the same configuration (`roll_opd.pipelines.session`). The
calling process does not import torch, and imports Ray only to send reward functions. Each call waits for its result.
The session ends when the calling process ends. docs/python.md has complete examples.
"""

import atexit
import math
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from roll_opd.base.command_line import SESSION_INTERRUPT, SESSION_SOCKET
from roll_opd.cluster.ray_environment import socket_parent
from roll_opd.commands.python_api import (
    Config,
    Overrides,
    RunFailed,
    end_message,
    run_command,
    run_environment,
    show,
)
from roll_opd.data.dataset import Prompt
from roll_opd.samples.sample import Sample, changed

CLOSE_TIMEOUT_S = 60.0

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Reward = Callable[..., Sequence[float]]


@dataclass(frozen=True)
class Batch:
    """Samples in the order of their prompts; `samples` contains all arrays.

    A batch is immutable: methods return new batches.
    """

    samples: tuple[Sample, ...]
    texts: tuple[str, ...]  # texts of the responses, without special tokens
    session: str  # identifies the session that sampled the batch; other sessions refuse it

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        """Return a line with the number of samples and the values that the batch has."""
        parts = [f"{len(self)} samples of {len({sample.group_id for sample in self.samples})} prompts"]
        if self.samples:
            parts.append(f"{sum(sample.response_length for sample in self.samples) / len(self):.1f} tokens each")
        if rewards := [reward for reward in self.rewards if reward is not None]:
            parts.append(f"mean reward {sum(rewards) / len(rewards):.3f}")
        if self.samples and all(sample.teacher_logprobs for sample in self.samples):
            parts.append(f"reverse KL {self.reverse_kl():.3f}")
        return f"Batch({', '.join(parts)})"

    @property
    def rewards(self) -> list[float | None]:
        """Reward of each sample."""
        return [sample.reward for sample in self.samples]

    def with_rewards(self, rewards: Iterable[float]) -> "Batch":
        """Return the batch with one reward for each sample.

        Raises ValueError or TypeError unless there is one finite number for each sample.
        """
        values = []
        for number, reward in enumerate(rewards):
            if isinstance(reward, str) or not math.isfinite(value := float(reward)):
                raise ValueError(f"reward {number} is {reward!r}; give a finite number for each sample")
            values.append(value)
        if len(values) != len(self.samples):
            raise ValueError(f"{len(values)} rewards for {len(self.samples)} samples; give one reward per sample")
        samples = (changed(sample, reward=value) for sample, value in zip(self.samples, values, strict=True))
        return replace(self, samples=tuple(samples))

    def reverse_kl(self) -> float:
        """Return the mean of (student log-prob - teacher log-prob) over all tokens that the student sampled.

        If a sample has several teachers, only the first teacher is used.

        Raises:
            ValueError: if a sample has no teacher log-probs; call `teacher.score` first.
        """
        from roll_opd.objective.reverse_kl import reverse_kl

        parts = []
        for sample in self.samples:
            if not sample.teacher_logprobs:
                raise ValueError(f"sample {sample.id} has no teacher log-probs; call teacher.score first")
            name, teacher = next(iter(sample.teacher_logprobs.items()))
            parts.append(reverse_kl(sample.student_logprobs, teacher)[sample.taught_by(name)])
        return float(np.concatenate(parts).mean())


class Sampler:
    """The inference engines. They have the weights that the student had at the last `update`."""

    def __init__(self, session: "Session") -> None:
        self._session = session

    def sample(
        self, prompts: Sequence[Prompt | str | Sequence[Message]], n: int | None = None, **sampling: Any
    ) -> Batch:
        """Return a batch with `n` samples of each prompt.

        Args:
            prompts: each prompt is a text, a list of messages, or an element of `Session.prompts`. Messages are
                rendered with the model's chat template; a text is tokenised unchanged.
            n: number of samples per prompt; None: the configured number.
            sampling: `temperature`, `top_p`, `top_k` or `max_new_tokens`, instead of the configured value.
        """
        is_one = isinstance(prompts, str | bytes | Mapping | Prompt) or not isinstance(prompts, Iterable)
        given = prompts if is_one else list(prompts)  # `sample` refuses a single prompt
        samples, texts = self._session.call("sample", prompts=given, n=n, sampling=sampling)
        return Batch(tuple(samples), tuple(texts), self._session.id)

    def update(self) -> None:
        """Send the student's weights to the engines, and to teachers that follow the student."""
        self._session.call("sync")


class Teacher:
    """The teachers of the configuration, and the reference policy if it is configured."""

    def __init__(self, session: "Session") -> None:
        self._session = session

    def score(self, batch: Batch) -> Batch:
        """Return the batch with the log-probs that each sample's teachers give to its tokens."""
        return self._session.with_samples("score", batch)


class Student:
    """The model that is trained."""

    def __init__(self, session: "Session") -> None:
        self._session = session

    def logprobs(self, batch: Batch) -> Batch:
        """Return the batch with `old_logprobs`, the log-probs of the training engine."""
        return self._session.with_samples("logprobs", batch)

    def forward_backward(
        self, batch: Batch, loss: str | None = None, *, opd_kl_coef: float | None = None, **objective: Any
    ) -> dict[str, float]:
        """Accumulate the gradient of the mean loss over the batch; return metrics.

        The advantages are computed from the rewards of the batch, with the configured estimator. Without rewards, the
        teachers are the only training signal.

        Args:
            loss: name of a policy loss, see `losses`; None: the configured loss.
            opd_kl_coef: coefficient of the teachers' term; None: the configured coefficient.
            objective: other keys of the objective, instead of their configured values.
        """
        keys = {**objective, **({} if loss is None else {"policy_loss": loss})}
        samples = self._session.samples_of("forward_backward", batch)
        return self._session.call("forward_backward", samples=samples, objective=keys, opd_kl_coef=opd_kl_coef)

    def optim_step(self, learning_rate: float | None = None) -> dict[str, float]:
        """Make one optimizer update from the accumulated gradients; return metrics.

        If `learning_rate` is None, the rate of the configured schedule is used.
        """
        return self._session.call("optim_step", learning_rate=learning_rate)

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Save the training state and a Hugging Face model in `directory`; return the directory of the model."""
        return Path(self._session.call("save", directory=_absolute("save", directory)))

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Restore the training state that `save` wrote, and send its weights to the engines.

        Accumulated gradients are discarded, and batches from before the call count as sampled by other weights.
        """
        self._session.call("load", directory=_absolute("load", directory))


class Session:
    """A running student, teacher and sampler. Create it with `roll_opd.open`.

    A `with` statement ends the session at its end; without one, call `close`, or the session ends with Python. If the
    session's run fails, the method that is called raises RunFailed. If a call raises another error (ValueError,
    TypeError, OSError, RuntimeError, KeyboardInterrupt), the session can still be used.
    """

    def __init__(self, config: Config, overrides: Overrides, rewards: Mapping[str, Reward]) -> None:
        self.student, self.teacher, self.sampler = Student(self), Teacher(self), Sampler(self)
        self._scratch = tempfile.TemporaryDirectory(prefix="roll_opd-", dir=socket_parent())
        scratch = Path(self._scratch.name)
        self.id = scratch.name
        self._calling = threading.Lock()
        self._is_idle = True  # False: a call was sent, and its answer has not arrived
        self._announced, self._output = scratch / "run_directory", ""
        command = run_command(None, config, overrides, rewards, scratch)
        self._listener = Listener(str(scratch / "socket"), "AF_UNIX")
        self._process = subprocess.Popen(
            command,
            env=run_environment(self._announced) | {SESSION_SOCKET: str(scratch / "socket")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a separate process group, so that Ctrl-C does not reach the run directly
        )
        self._shown = threading.Thread(target=self._show, name="roll_opd session output", daemon=True)
        self._shown.start()
        self._connection: Connection | None = None
        atexit.register(self.close)
        try:
            self._connection = self._listener.accept()
            self._answer()
        except BaseException:
            self.close()
            raise

    def prompts(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts from the files of the configuration."""
        return self.call("prompts", n=n)

    def reward(self, batch: Batch) -> Batch:
        """Return the batch with rewards.

        They are computed by the reward functions of the configuration, or by the functions that were passed to `open`.
        """
        return self.with_samples("reward", batch)

    @property
    def directory(self) -> Path | None:
        """Directory of the run, with its logs, metrics and samples."""
        return Path(self._announced.read_text(encoding="utf-8")) if self._announced.exists() else None

    def call(self, name: str, **arguments: Any) -> Any:
        """Call the method `name` of `pipelines.session.SessionCalls` in the run; return its result.

        An interrupt (Ctrl-C) ends `sample` and `reward` early. Any other call ends first, because it changes the
        student; a second interrupt then ends the session.
        """
        with self._calling:
            if self._connection is None:
                raise ValueError("the session is closed; open a new session")
            try:
                message = ForkingPickler.dumps((name, arguments))
            except Exception as error:
                raise TypeError(f"{name}: an argument cannot be sent to the run: {error}") from error
            try:
                with interrupted_later(self.close):
                    self._is_idle = False
                    self._send(message)
                return self._answer()
            except BaseException:  # Ctrl-C, or what a handler of another signal raises
                self._interrupt()
                raise

    def _interrupt(self) -> None:
        """Wait for the answer to an interrupted call, which would otherwise be taken for the answer to the next one."""
        if self._is_idle or self._connection is None:
            return
        try:
            with suppress(ValueError, TypeError, OSError, RuntimeError):
                self._connection.send(SESSION_INTERRUPT)
                self._answer()
        except BaseException:
            self.close()
            raise

    def samples_of(self, name: str, batch: Batch) -> tuple[Sample, ...]:
        """Return the samples of a batch for the call `name`.

        Raises TypeError if `batch` is not a batch, and ValueError if it is empty or was sampled by another session.
        """
        if not isinstance(batch, Batch):
            what = f"a {type(batch).__name__}"
            raise TypeError(f"{name}: batch is {what}; give a Batch, which session.sampler.sample returns")
        if batch.session != self.id:
            raise ValueError(f"{name}: the batch was sampled by another session; sample it with this session")
        if not batch.samples or not all(isinstance(sample, Sample) for sample in batch.samples):
            raise ValueError(f"{name}: the batch has no samples; give a Batch, which session.sampler.sample returns")
        return batch.samples

    def with_samples(self, name: str, batch: Batch) -> Batch:
        """Return a batch with the samples that the call `name` returns for its samples."""
        return replace(batch, samples=tuple(self.call(name, samples=self.samples_of(name, batch))))

    def _send(self, message: memoryview) -> None:
        assert self._connection is not None
        try:
            self._connection.send_bytes(message)
        except OSError:  # the run has ended since the last call
            self._failed()

    def _answer(self) -> Any:
        connection = self._connection  # another thread may close the session
        assert connection is not None
        try:
            connection.poll(None)
            with interrupted_later(self.close):
                answer = connection.recv()
                self._is_idle = True
        except TimeoutError:  # of a signal's handler
            raise
        except (EOFError, OSError):
            self._failed()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _failed(self) -> NoReturn:
        """Raise RunFailed with the error of the run that has ended."""
        self._connection = None
        code = self._process.wait()
        self._shown.join()
        raise RunFailed(end_message(code, self._output), code, self.directory)

    def _show(self) -> None:
        """Print the run's output until the run ends.

        If the constructor is still waiting for a connection from the run, this method ends the wait.
        """
        self._output = show(self._process)
        if self._connection is None:
            with suppress(OSError):
                Client(self._listener.address).close()

    def close(self) -> None:
        """End the session and its processes. If the session is already closed, do nothing."""
        atexit.unregister(self.close)
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as wire:
                wire.shutdown(socket.SHUT_RDWR)  # `close` would not end a wait of another thread
            connection.close()  # the run cancels a call in progress
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
        self._shown.join()
        self._listener.close()
        self._scratch.cleanup()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_session(config: Config, overrides: Overrides = (), *, rewards: Mapping[str, Reward] | None = None) -> Session:
    """Start the models of a configuration and return them as a session. Also called `roll_opd.open`.

    Prompts, rewards, objective, layouts and the learning-rate schedule come from the configuration. The caller's code
    makes the training steps. The arguments are those of `roll_opd.run`.
    """
    return Session(config, overrides, rewards or {})


@contextmanager
def interrupted_later(end: Callable[[], None]) -> Iterator[None]:
    """Context manager: an interrupt (Ctrl-C) within the block has its effect at the end of the block.

    A second one within the block calls `end` and has its effect immediately.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # another thread is not interrupted
        return
    arrived: list[tuple[int, FrameType | None]] = []

    def note(*given: Any) -> None:
        arrived.append(given)
        if len(arrived) > 1:
            end()
            handler(*given)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[0])


def _absolute(name: str, directory: str | os.PathLike[str]) -> str:
    if not os.fspath(directory):
        raise ValueError(f"{name}: directory is empty; give the path of a directory")
    return os.path.abspath(directory)


def losses() -> str:
    """Return the names of the policy losses, separated by commas."""
    from roll_opd.objective.registry import POLICY_LOSSES

    return POLICY_LOSSES.known
