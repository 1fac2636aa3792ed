"""The error of an engine that cannot start has the reason of the failed process."""

import logging
import multiprocessing
import os
import signal

import pytest

from roll_opd.inference.failed_start import FILE, EngineStartError, record_errors, start_errors

VLLM = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.fixture
def logger() -> logging.Logger:
    """Return vLLM's logger, as in one of its processes."""
    found = logging.getLogger("vllm")
    yield logging.getLogger("vllm.v1.engine.core")
    found.handlers = [handler for handler in found.handlers if type(handler).__name__ != "_FirstError"]


def test_the_first_error_of_a_process_is_the_reason(logger: logging.Logger) -> None:
    with pytest.raises(EngineStartError) as caught, start_errors():
        record_errors()
        record_errors()  # once is enough
        for reason in ("no kernel for blocks of 16", "what follows"):
            try:
                raise ValueError(reason)
            except ValueError:
                logger.exception("EngineCore failed to start.")
        raise RuntimeError(VLLM.format("{'EngineCore': 1}"))
    assert str(caught.value) == "ValueError: no kernel for blocks of 16"
    assert FILE not in os.environ


def test_the_reason_of_a_killed_process_names_its_signal(logger: logging.Logger) -> None:
    with (
        pytest.raises(EngineStartError, match="killed by SIGKILL; the kernel kills processes when memory runs out"),
        start_errors(),
    ):
        raise RuntimeError(VLLM.format("{'EngineCore': -9}"))


def crash(number: int) -> None:
    record_errors()
    os.kill(os.getpid(), number)


def test_the_reason_of_a_crash_is_its_signal_and_function() -> None:
    for number, name in ((signal.SIGILL, "illegal instruction"), (signal.SIGSEGV, "segmentation fault")):
        with pytest.raises(EngineStartError) as caught, start_errors():
            process = multiprocessing.get_context("spawn").Process(target=crash, args=(number,))
            process.start()
            process.join()
            raise RuntimeError("EngineCore encountered an issue. See stack trace (above) for the root cause.")
        assert f"crashed with {name} in crash (" in str(caught.value)
        assert ("dtype: fp32" in str(caught.value)) == (number == signal.SIGILL)


def test_an_error_of_the_starting_process_is_its_own_reason() -> None:
    with pytest.raises(EngineStartError, match=r"^ValueError: max_num_seqs should be"), start_errors():
        raise ValueError("max_num_seqs should be at least 1")
    with start_errors():
        assert os.path.exists(os.environ[FILE])


def test_errors_are_not_recorded_without_a_starting_process(logger: logging.Logger) -> None:
    record_errors()
    assert not logging.getLogger("vllm").handlers or all(
        type(handler).__name__ != "_FirstError" for handler in logging.getLogger("vllm").handlers
    )
