"""Build the index of the usable rows of a data set, in one pass that renders and checks every row.

The index takes about 30 bytes per usable row. Legend: N prompts, F files.
"""

import hashlib
import json
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from roll_opd.base.frozen import FrozenDict, thaw
from roll_opd.config.plan import DataPlan
from roll_opd.data.data_checks import NO_TOKEN, NOT_ENCODABLE, TEACHER_TOO_LONG, TOO_LONG, WHOLE_TOO_LONG, FileReport
from roll_opd.data.messages import tool_name
from roll_opd.data.row_files import RowFile
from roll_opd.data.row_formats import BadRow, DataError, Row
from roll_opd.data.supervised_rows import parse_answered
from roll_opd.data.teacher_prompts import TeacherPrompts
from roll_opd.data.template_check import TEXT_WITH_CALLS, drops_text_with_calls
from roll_opd.data.templates import PromptText, UnusableTemplate, render_answer, render_prompt, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# number of rows tokenised together, which is several times faster than one by one
BATCH_ROWS = 512
BATCH_CHARACTERS = 2**20
RENDERED_TWICE = 16  # number of rows per file that are rendered twice, to detect templates with random text
MAX_DOMAINS = 1000  # domains kept per tag; a column with more values names web sites or subjects instead of rewards
PROGRESS_DELAY_S = 3.0  # seconds before the progress bar appears


@dataclass(frozen=True)
class Index:
    """The place and the checksums of each prompt, in the order of files and rows."""

    starts: np.ndarray  # int64 [F+1]; file f has the prompts starts[f] to starts[f+1] - 1
    positions: np.ndarray  # int64 [N], position of the row in its file, see `RowFile`
    lines: np.ndarray  # uint32 [N]
    tags: np.ndarray  # int32 [N], index into tag_names
    checks: np.ndarray  # uint32 [N], checksum of id, tag, ground truth and tokens: detects changed rows
    prompt_hashes: np.ndarray  # uint64 [N], hash that is equal for equal prompts, also across data sets
    unanswered: np.ndarray  # bool [N], true if the row has no ground_truth
    renamed: np.ndarray  # bool [N], true if an earlier prompt has the same id
    tag_names: tuple[str, ...]
    domains: FrozenDict  # tag -> {domain named in a row: `file:line` of the first such row}
    digests: tuple[str, ...]  # [F], digest of explicit ids, tags, ground truths and tokens of a file's prompts


@dataclass(frozen=True)
class _ParsedRow:
    """A parsed row that is not tokenised yet."""

    line: int
    position: int
    id: str
    own_id: str | None  # None: the row has no id, and `id` is derived from the file name
    tag: str
    ground_truth: str | None
    domain: Any  # value of the row's column `domain`, unchecked
    task: bytes | None  # a workflow's task without its id, hashed instead of the prompt's tokens
    texts: tuple[PromptText, ...]  # texts of the prompt and its answers
    teacher_prompts: dict[str, PromptText]  # teacher -> text of the teacher's prompt


class Indexer:
    """Builds the index in one pass over all files, and counts the bad rows."""

    def __init__(self, plan: DataPlan, tokenizer: "PreTrainedTokenizerBase", teachers: TeacherPrompts) -> None:
        self._plan, self._tokenizer, self._teachers = plan, tokenizer, teachers
        self._positions, self._lines, self._tags = array("q"), array("I"), array("i")
        self._unanswered = array("b")
        self._prompt_hashes = array("Q")
        self._checks, self._ids = array("I"), array("q")  # 64-bit hashes of ids, to detect duplicates
        self._codes: dict[str, int] = {}  # tag -> number
        self._domains: dict[str, dict[str, str]] = {}  # see Index.domains
        self._parsed = 0  # number of rows so far, as counted for `limit`
        self._longest = 0

    def index(self, files: Sequence[RowFile]) -> tuple[Index, tuple[FileReport, ...], int]:
        """Scan all files. Return (index, report on each file, number of tokens of the longest row)."""
        reports, digests, starts = [], [], [0]
        sizes = [file.path.stat().st_size for file in files]
        with tqdm(
            total=sum(sizes), desc="Checking prompts", unit="B", unit_scale=True, delay=PROGRESS_DELAY_S, mininterval=1
        ) as progress:
            for number, file in enumerate(files):
                report, digest = FileReport(str(file.path)), hashlib.sha256()
                before = sum(sizes[:number])
                for batch in self._batches(file, report):
                    self._add(batch, report, digest)
                    progress.update(before + file.bytes_before(batch[-1].position) - progress.n)
                reports.append(report)
                digests.append(digest.hexdigest())
                starts.append(len(self._positions))
        index = Index(
            starts=np.array(starts, dtype=np.int64),
            positions=np.frombuffer(self._positions, dtype=np.int64),
            lines=np.frombuffer(self._lines, dtype=np.uint32),
            tags=np.frombuffer(self._tags, dtype=np.int32),
            checks=np.frombuffer(self._checks, dtype=np.uint32),
            prompt_hashes=np.frombuffer(self._prompt_hashes, dtype=np.uint64),
            unanswered=np.frombuffer(self._unanswered, dtype=np.bool_),
            renamed=repeated(np.frombuffer(self._ids, dtype=np.int64)),
            tag_names=tuple(self._codes),
            domains=FrozenDict(self._domains),
            digests=tuple(digests),
        )
        return index, tuple(reports), self._longest

    def _batches(self, file: RowFile, report: FileReport) -> Iterator[list[_ParsedRow]]:
        """Yield batches of parsed rows, none of them empty. Bad rows are added to `report`."""
        batch: list[_ParsedRow] = []
        characters = 0
        for line, position, value in file.scan():
            if self._parsed == self._plan.limit:
                break
            report.rows += 1
            try:
                fallback = fallback_id(file, line)
                row = parse_answered(value, fallback, self._plan)
                self._parsed += 1
                report.unread.update(row.unread)
                texts = render_row(self._tokenizer, row, self._plan)
                if report.rows <= RENDERED_TWICE and render_row(self._tokenizer, row, self._plan) != texts:
                    raise UnusableTemplate(
                        f"{file.path}:{line}: the chat template renders the same row differently each time, but a run"
                        " renders a row again when it is drawn; remove the random part of the template"
                    )
                report.unread.update(dropped_parts(row, texts[0].text))
                teacher_prompts = self._teachers.texts(row, template_of(row, self._plan))
            except BadRow as bad:
                report.add_bad(bad.kind, line, bad.detail)
                continue
            except UnusableTemplate:
                raise
            except DataError as error:
                report.add_bad(NOT_ENCODABLE, line, str(error))
                continue
            own_id = None if row.id == fallback else row.id
            domain, task = row.extra.get("domain"), _task(row, self._plan)
            batch.append(
                _ParsedRow(
                    line, position, row.id, own_id, row.tag, row.ground_truth, domain, task, texts, teacher_prompts
                )
            )
            characters += sum(len(text.text) for text in (*texts, *teacher_prompts.values()))
            if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch

    def _add(self, batch: list[_ParsedRow], report: FileReport, digest: Any) -> None:
        too_long = WHOLE_TOO_LONG if self._plan.schema != "experience" else TOO_LONG
        encoded = encode(self._tokenizer, [row.texts for row in batch])
        teacher_prompts = self._teachers.encode([row.teacher_prompts for row in batch])
        for row, own, read in zip(batch, encoded, teacher_prompts, strict=True):
            tokens, *answers = own
            parts = (*own, *read.values())
            length = len(tokens) + max(map(len, answers), default=0)
            self._longest = max(self._longest, length)
            if not all(map(len, parts)):
                report.add_bad(NO_TOKEN, row.line, row.id)
            elif length > self._plan.prompt_length:
                report.add_bad(too_long, row.line, f"{row.id}, {length} tokens")
            elif (longer := self._teachers.too_long(read)) is not None:
                report.add_bad(TEACHER_TOO_LONG, row.line, f"{row.id}, {longer}")
            else:
                report.prompts += 1
                digest.update(_identity(row.own_id, row.tag, row.ground_truth, parts))
                self._positions.append(row.position)
                self._lines.append(row.line)
                self._tags.append(self._codes.setdefault(row.tag, len(self._codes)))
                self._checks.append(row_check(row.id, row.tag, row.ground_truth, parts))
                self._prompt_hashes.append(_hash(tokens.tobytes() if row.task is None else row.task))
                self._unanswered.append(row.ground_truth is None)
                self._ids.append(hash(row.id))
                domains = self._domains.setdefault(row.tag, {})
                if isinstance(row.domain, str) and len(domains) < MAX_DOMAINS:
                    domains.setdefault(row.domain, f"{report.path}:{row.line}")


def repeated(ids: np.ndarray) -> np.ndarray:
    """Return a mask of the ids that equal an earlier id.

    Shapes: `ids` int64 [N], result bool [N].
    """
    order = np.argsort(ids, kind="stable")
    again = np.zeros(len(ids), dtype=bool)
    again[order[1:]] = ids[order[1:]] == ids[order[:-1]]
    return again


def render_row(tokenizer: "PreTrainedTokenizerBase", row: Row, plan: DataPlan) -> tuple[PromptText, ...]:
    """Render the prompt and the answers of a row, with the template for the row's tag."""
    template = template_of(row, plan)
    prompt = render_prompt(tokenizer, row, template)
    return (prompt, *(render_answer(tokenizer, row, answer, prompt, template) for answer in row.answers))


def dropped_parts(row: Row, prompt: str) -> Iterator[str]:
    """Yield the names of the parts of a row that the template has left out of the prompt.

    Only parts that cause a warning are checked; other missing parts make a row unusable.
    """
    if drops_text_with_calls(row.messages, prompt):
        yield TEXT_WITH_CALLS
    if row.prompt is not None and any((tool_name(tool) or "") not in prompt for tool in row.tools):
        yield "tools"


def template_of(row: Row, plan: DataPlan) -> str:
    """Return the name of the template for a row."""
    return plan.tag_templates.get(row.tag, plan.template)


def encode(
    tokenizer: "PreTrainedTokenizerBase", rows: Sequence[tuple[PromptText, ...]]
) -> Iterator[tuple[np.ndarray, ...]]:
    """Tokenise the texts of all rows in one call. For each row, yield the token ids of its texts, int64."""
    tokens = iter(tokenize(tokenizer, [text for texts in rows for text in texts]))
    for texts in rows:
        yield tuple(np.asarray(next(tokens), dtype=np.int64) for _ in texts)


def fallback_id(file: RowFile, line: int) -> str:
    """Return an id for a row without an id."""
    return f"{file.path.stem}:{line}"


def _identity(identity: str | None, tag: str, ground_truth: str | None, parts: Sequence[np.ndarray]) -> bytes:
    return repr((identity, tag, ground_truth, *map(len, parts))).encode() + b"".join(part.tobytes() for part in parts)


def _task(row: Row, plan: DataPlan) -> bytes | None:
    """Return a workflow task as bytes, without its id; None for rows of other schemas."""
    if plan.schema != "task":
        return None
    named = plan.columns.get("id", "id")
    task = {key: value for key, value in sorted(row.extra.items()) if key != named}
    return json.dumps(thaw(task), default=str).encode()


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def row_check(identity: str, tag: str, ground_truth: str | None, parts: Sequence[np.ndarray]) -> int:
    """Return a checksum of a row's id, tag, ground truth and tokens."""
    return zlib.crc32(_identity(identity, tag, ground_truth, parts))
