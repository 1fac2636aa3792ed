"""Every command on the pages is valid: commands that start a run are planned, the files of the others exist.

The commands of these pages build on each other; test_command_line.py runs them in order.
"""

import re
import shlex
from pathlib import Path

import pytest

from roll_opd.commands import main

ROOT = Path(__file__).parent.parent
FOLLOWED = {"docs/cli.md", "docs/quickstart.md", "docs/bigger-machine.md"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"^ {4}(?:\.venv/bin/)?((?:python|roll-opd|make|pip|torchrun) [^:\n]*)$", re.MULTILINE)
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}(?:_[A-Z]+)*\b|\[|\.\.\.")  # DIR, RUN_DIR, [key=value ...]
PIPELINES = {
    "examples/start_onpolicy_distill_pipeline.py": "distill",
    "examples/start_rlvr_pipeline.py": "rlvr",
    "examples/start_sft_pipeline.py": "sft",
    "examples/start_dpo_pipeline.py": "dpo",
}


def commands() -> dict[str, list[str]]:
    """Page and command -> its words, without those that are followed elsewhere."""
    found = {}
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        if name not in FOLLOWED:
            for line in COMMAND.findall(page.read_text(encoding="utf-8")):
                found[f"{name}: {line}"] = shlex.split(line, comments=True)
    return found


COMMANDS = commands()
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_commands_of_the_pages_are_found() -> None:
    assert {words[0] for words in COMMANDS.values()} >= {"make", "python", "roll-opd"}
    assert len(COMMANDS) >= 12


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_of_a_page(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *arguments = words
    started = [number for number, word in enumerate(arguments) if word in PIPELINES]
    if program == "torchrun" and started:  # what it starts on every host
        arguments = arguments[started[0] :]
    if program == "make":
        assert set(arguments) <= TARGETS
    elif program == "roll-opd":
        assert arguments[0] in main.commands()
        if arguments[0] in ("plan", "run") and not PLACEHOLDER.search(" ".join(arguments)):
            assert main.main(["plan", *arguments[1:]]) == 0
    elif "gsm8k" in " ".join(arguments):
        pytest.skip("the page says that it is not run: the data set is not in the repository")
    elif arguments[0] in PIPELINES:
        assert main.main(["plan", PIPELINES[arguments[0]], *arguments[1:]]) == 0
    else:
        assert arguments[0] != "-m" and (ROOT / arguments[0]).is_file()
