"""The commands of docs/use-the-result.md, executed in a project that was trained: lm-eval, a server of vLLM, llama.cpp.

`LM_EVAL` is the program of an installed lm-eval; without it, pip installs lm-eval in an environment of its own.
`LLAMA_CPP` is a clone of llama.cpp with its tools in build/bin.
"""

import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll_opd.commands import main
from tests.pages import DOCS, blocks, commands

PAGE = "use-the-result.md"
SCRIPTS = Path(sys.executable).parent
REAL = Path(__file__).parents[3] / "examples/real"
PREFIXES = ("lm_eval run --model hf", "python -m vllm", "curl", "lm_eval run --model local", "python llama.cpp/")


def lines() -> list[str]:
    return [line for text in blocks(PAGE, "sh") for line in text.splitlines()]


def command(prefix: str) -> str:
    """Return the command of the page that begins with `prefix`."""
    (line,) = [line for line in lines() if line.startswith(prefix)]
    return line


def shell(line: str, place: Path, **variables: str) -> str:
    """Execute a line of the page in `place`, and return what it prints."""
    path = os.pathsep.join([str(SCRIPTS), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(line, shell=True, cwd=place, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (line, done.stdout[-2000:], done.stderr[-4000:])
    return done.stdout


def test_each_command_of_the_page_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests below execute every line; the arguments of this package's commands are valid."""
    executed = [line for line in lines() if line.startswith((*PREFIXES, "roll-opd", "cp", "llama.cpp/build/bin/"))]
    assert executed == lines() and all(command(prefix) for prefix in PREFIXES)
    own = [words[1:] for words in commands(PAGE) if words[0] == "roll-opd"]
    assert [main.parse(words, main.commands()).command for words in own] == ["chat", "generate"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained project, with the page's copy of the model and its task of lm-eval."""
    place = tmp_path_factory.mktemp("result") / "quickstart"
    shell(f"roll-opd init {place}", place.parent)
    shell("roll-opd run distill.yaml max_steps=20", place)
    for line in lines():
        if line.startswith(("roll-opd", "cp")):
            shell(line, place)
    (place / "evaluation").mkdir()
    (place / "evaluation/sums.yaml").write_text(blocks(PAGE, "yaml")[0])
    (place / "evaluation/rows.py").write_text(blocks(PAGE, "python")[0])
    return place


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the program `lm_eval`."""
    if "LM_EVAL" in os.environ:
        return str(Path(os.environ["LM_EVAL"]).parent)
    place = tmp_path_factory.mktemp("lm_eval")
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    (here,) = place.glob("lib/python*/site-packages")
    (here / "shared.pth").write_text(sysconfig.get_paths()["purelib"])  # torch, transformers and datasets are shared
    (wanted,) = set(re.findall(r"pip install '(lm_eval\S*)'", (DOCS / PAGE).read_text()))
    done = subprocess.run([place / "bin/pip", "install", "-q", wanted], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"lm-eval cannot be installed: {done.stderr[-500:]}")
    return str(place / "bin")


def graded(line: str, project: Path, lm_eval: str) -> dict[str, float]:
    """Execute a command of lm-eval, and return for each row of the task whether its answer is correct."""
    output = line.split("--output_path ")[1]
    path = os.pathsep.join([lm_eval, os.environ["PATH"]])
    shell(f"{line} --log_samples", project, PATH=path, HF_HOME=str(project / "cache"))
    (file,) = (project / output).rglob("samples_sums_*.jsonl")
    rows = map(json.loads, file.read_text().splitlines())
    return {row["doc"]["id"]: row["exact_match"] for row in rows}


def validated(project: Path) -> dict[str, float]:
    """Return the run's own score of each validation row after the last step."""
    rows = map(json.loads, (project / "output/mine/latest/validation_samples.jsonl").read_text().splitlines())
    return {
        row["id"].partition("#")[0]: float(row["reward"])
        for row in rows
        if row["step"] == 20 and row["by"] == "student"
    }


@pytest.mark.slow
@pytest.mark.nightly
def test_lm_eval_measures_the_validation_accuracy_of_the_run(project: Path, lm_eval: str) -> None:
    found = graded(command("lm_eval run --model hf"), project, lm_eval)
    summary = json.loads((project / "output/mine/latest/summary.json").read_text())
    assert sum(found.values()) / len(found) == pytest.approx(summary["val_accuracy_last"])
    logged = validated(project)
    assert logged and {name: found[name] for name in logged} == logged


@pytest.fixture
def server(project: Path) -> Iterator[int]:
    """The port of the page's server, with the options that the page has for CPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (options,) = re.findall(r"append `(.*?)`", (DOCS / PAGE).read_text())
    line = f"{command('python -m vllm')} {options}".replace("8000", str(port))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (project / "server.log").open("w") as log:
        started = subprocess.Popen(
            f"exec {SCRIPTS}/{line}", shell=True, cwd=project, env=environment, stdout=log, stderr=log
        )
        try:
            for _ in range(240):
                time.sleep(1)
                assert started.poll() is None, (project / "server.log").read_text()[-4000:]
                try:
                    urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                    break
                except OSError:
                    continue
            yield port
        finally:
            started.terminate()
            started.wait(60)


@pytest.mark.slow
@pytest.mark.nightly
def test_vllm_serves_the_model_and_lm_eval_grades_the_server(project: Path, server: int, lm_eval: str) -> None:
    answer = json.loads(shell(command("curl").replace("8000", str(server)), project))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"].endswith("895")
    found = graded(command("lm_eval run --model local").replace("8000", str(server)), project, lm_eval)
    logged = validated(project)
    assert logged and {name: found[name] for name in logged} == logged


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="needs LLAMA_CPP, a clone of llama.cpp with built tools")
def test_llama_cpp_converts_quantises_and_answers(tmp_path: Path) -> None:
    """With SmolLM2, whose tokenizer the converter recognises, after one step of training."""
    (tmp_path / "llama.cpp").symlink_to(os.environ["LLAMA_CPP"])
    shell(f"python {REAL}/convert.py smollm2 smollm2 --no-check-model", tmp_path)
    shell("roll-opd init demo --example demo", tmp_path)
    changed = {
        "model_args.model_name_or_path": "smollm2",
        "strategy_args.strategy_config.tensor_model_parallel_size": 1,
        "device_mapping": "[0]",
        "training_args.per_device_train_batch_size": 4,
    }
    words = " ".join(f"sft_train.{key}={value}" for key, value in changed.items())
    shell(f"roll-opd run demo/sft.yaml max_steps=1 eval_steps=0 sequence_length=128 {words}", tmp_path)
    shell("cp -r output/demo_sft/latest/checkpoints/step_1/hf mine", tmp_path)
    shell(command("python llama.cpp/"), tmp_path)
    quantise, answer = (line for line in lines() if line.startswith("llama.cpp/build/bin/"))
    shell(quantise, tmp_path)
    printed = shell(answer, tmp_path)
    tokenizer, model = (kind.from_pretrained(tmp_path / "mine") for kind in (AutoTokenizer, AutoModelForCausalLM))
    question = [{"role": "user", "content": "661+234="}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=5, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() in printed.rpartition("assistant")[2]
