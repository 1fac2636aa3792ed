"""`roll-opd serve`: the command line of vLLM's server, and the API key, which is only in the environment."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from roll_opd.commands import serve_teacher
from roll_opd.commands.main import main, parse

TEACHER = "examples/demo/models/teacher"


def test_the_server_offers_the_requested_top_k_and_further_arguments_reach_it() -> None:
    options = parse(["serve", TEACHER, "--topk", "32", "--dtype", "fp32", "--tp", "2", "--vllm", "--seed", "7"])
    command = serve_teacher.server_command(options, Path(TEACHER), "toy", on_cpu=False)
    pairs = dict(pairwise(command))
    assert (pairs["--max-logprobs"], pairs["--dtype"], pairs["--tensor-parallel-size"]) == ("33", "float32", "2")
    assert pairs["--model"] == str(Path(TEACHER).resolve()) and command[-2:] == ["--seed", "7"]
    assert "--enable-scale-out" in command and "--enforce-eager" not in command


def test_the_key_is_in_the_servers_environment_and_not_on_its_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = {}

    def run_guarded(command: Sequence[str], environment: Mapping[str, str]) -> int:
        started.update(c=command, e=environment)
        return -15

    monkeypatch.setattr("roll_opd.cluster.process_reaper.run_guarded", run_guarded)
    monkeypatch.setenv("TOY_KEY", "very-secret-word")
    assert main(["serve", TEACHER, "--api-key-env", "TOY_KEY"]) == 128 + 15
    assert started["e"]["VLLM_API_KEY"] == "very-secret-word" and "very-secret-word" not in started["c"]
    printed = capsys.readouterr().out
    assert "api_key_env: TOY_KEY" in printed and "very-secret-word" not in printed
    monkeypatch.delenv("TOY_KEY")
    assert main(["serve", TEACHER, "--api-key-env", "TOY_KEY"]) == 2
    assert main(["serve", "no/such/model"]) == 2
