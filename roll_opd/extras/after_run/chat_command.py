"""The command `roll-opd chat`: ask the student, its teacher, and the model before training."""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_opd.base.command_line import DONE, USER_ERROR
from roll_opd.base.failures import ConfigError
from roll_opd.base.terminal import columns, echo
from roll_opd.commands.main import Command
from roll_opd.extras.after_run.coloured_text import colour_of, legend, side_by_side
from roll_opd.extras.after_run.finished_model import (
    FinishedModel,
    NotUsable,
    add_place,
    add_sampling,
    finished_model,
    with_arguments,
)
from roll_opd.extras.report.run_files import NoRun
from roll_opd.models.model_info import ModelFilesError
from roll_opd.models.tokenizer_files import vocabulary_fingerprint

if TYPE_CHECKING:
    from roll_opd.extras.after_run.loaded_model import AnswerTokens, LoadedModel

NEW = "/new"  # begins another conversation
ANY_TEACHER = "teacher"


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    of_teacher = "also ask this teacher of the run, and colour the student's tokens by their reverse KL to it"
    parser.add_argument("--beside", metavar="TEACHER", help=f"{of_teacher}; `teacher`: the run's first teacher")
    parser.add_argument("--before", action="store_true", help="also ask the student before its training")
    parser.add_argument("--prompt", metavar="TEXT", help="ask this, and end (default: read questions line by line)")
    parser.add_argument("--no-colour", action="store_true", help="as without a terminal, or with NO_COLOR")
    add_sampling(parser)


def _chat(arguments: argparse.Namespace) -> int:
    try:
        found = finished_model(Path(arguments.run), arguments.step)
        sampling = with_arguments(found.sampling, arguments)
        others = {}
        if arguments.before:
            others["before training"] = _start_of(found)
        if arguments.beside:
            others[arguments.beside] = _teacher_of(found, arguments.beside)
        from roll_opd.extras.after_run.loaded_model import LoadedModel  # imports torch

        models = {found.title: LoadedModel(found.path, found.data)}
        models |= {title: LoadedModel(path, found.data) for title, path in others.items()}
    except (ConfigError, ModelFilesError, NoRun, NotUsable) as error:
        echo(f"roll-opd: {error}", sys.stderr)
        return USER_ERROR
    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ and not arguments.no_colour
    teacher = arguments.beside
    if teacher and vocabulary_fingerprint(found.path) != vocabulary_fingerprint(others[teacher]):
        echo(f"{teacher} has another tokenizer, so there is no reverse KL of single tokens")
        teacher = None
    if teacher and is_coloured:
        print(legend())
    talk = Conversation(models, teacher, is_coloured)
    for number, question in enumerate(_questions(arguments.prompt)):
        if question == NEW:
            talk = Conversation(models, teacher, is_coloured)
        elif question:
            print(talk.ask(question, replace(sampling, n=1), arguments.seed + number), flush=True)
    return DONE


class Conversation:
    """A conversation with several models. Each model remembers its own answers."""

    def __init__(self, models: "dict[str, LoadedModel]", teacher: str | None, is_coloured: bool) -> None:
        """Begin a conversation. The first model is the student; `teacher` names the model that scores its tokens."""
        self._models, self._teacher, self._is_coloured = models, teacher, is_coloured
        self._messages: dict[str, list[dict[str, Any]]] = {title: [] for title in models}

    def ask(self, question: str, sampling: Any, seed: int) -> str:
        """Return the answers of all models in columns, and a line about the reverse KL."""
        answers: dict[str, AnswerTokens] = {}
        shown, note = [], ""
        for title, model in self._models.items():
            messages = self._messages[title]
            messages.append({"role": "user", "content": question})
            answers[title] = model.answer(messages, sampling, seed)
            messages.append({"role": "assistant", "content": model.text(answers[title].tokens)})
        student = next(iter(self._models))
        for title, model in self._models.items():
            pieces = model.pieces(answers[title].tokens)
            colours: list[int | None] = [None] * len(pieces)
            if title == student and self._teacher and pieces:
                kl = self._reverse_kl(answers[title])
                colours = [colour_of(value) if self._is_coloured else None for value in kl]
                worst = max(range(len(kl)), key=kl.__getitem__)
                note = (
                    f"\nreverse KL to {self._teacher}: mean {sum(kl) / len(kl):.4f} nats a token, largest"
                    f" {kl[worst]:.4f} at token {worst + 1}, {pieces[worst]!r}"
                )
            shown.append((title, list(zip(pieces, colours, strict=True))))
        return side_by_side(shown, columns()) + note

    def _reverse_kl(self, answer: "AnswerTokens") -> list[float]:
        from roll_opd.extras.after_run.loaded_model import reverse_kl_of

        assert self._teacher is not None
        student, teacher = next(iter(self._models.values())), self._models[self._teacher]
        return reverse_kl_of(student.logprobs(answer), teacher.logprobs(answer))


def _questions(given: str | None) -> Iterator[str]:
    if given is not None:
        yield given
        return
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        print(f"One question a line; {NEW} begins another conversation, Ctrl-D ends.")
    while True:
        try:
            yield input(prompt).strip()
        except EOFError:
            return


def _start_of(found: FinishedModel) -> Path:
    if found.plan is None:
        raise NotUsable("--before needs a run, which names the model before training; give the run's directory")
    return Path(found.plan.student.model.path)


def _teacher_of(found: FinishedModel, name: str) -> Path:
    """Return the directory of a teacher. Raises NotUsable if it has none."""
    if found.plan is None:
        raise NotUsable(f"--beside {name} needs a run, which names the teachers; give the run's directory")
    teachers = {teacher.name: teacher for teacher in found.plan.teachers}
    chosen = teachers.get(name) or (next(iter(teachers.values()), None) if name == ANY_TEACHER else None)
    if chosen is None:
        known = f"its teachers are {', '.join(teachers)}" if teachers else "it has no teacher"
        raise NotUsable(f"--beside {name}: the run has no such teacher; {known}")
    if chosen.model is None:
        raise NotUsable(f"--beside {name}: this teacher is not a local model; remove --beside")
    return Path(chosen.model.path)


CHAT = Command(
    "ask the model of a run, its teacher, and the student before training", _arguments, _chat, needs_extra=True
)
