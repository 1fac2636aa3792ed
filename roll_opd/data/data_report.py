"""The report of a pass over prompt files.

It has the number of usable rows, and the number of bad rows by kind and file, with examples.
"""

from collections import Counter
from dataclasses import dataclass, field

from roll_opd.base.frozen import FrozenDict

EXAMPLES_PER_KIND = 3  # number of bad rows that are named per kind and file; further rows are only counted
FILES_NAMED = 10  # number of files whose bad rows are listed; further files are only counted

# kinds of rows that can be parsed but not used
TOO_LONG = "longer than prompt_length"
WHOLE_TOO_LONG = "longer than sequence_length"  # rows with answers
TEACHER_TOO_LONG = "longer than a teacher's prompt_length, with the context of that teacher"
NOT_ENCODABLE = "refused by the template"
NO_TOKEN = "without a token"
NOT_LEARNED = "excluded from the loss"  # not an error


@dataclass
class FileReport:
    """The counts of one file: rows, prompts, and bad rows by kind. They are updated during the pass."""

    path: str
    rows: int = 0
    prompts: int = 0
    bad_counts: Counter = field(default_factory=Counter)  # kind -> rows
    # kind -> "file:line (detail)" of the first few rows
    bad_examples: dict[str, list[str]] = field(default_factory=dict)
    # ignored column -> number of rows with a value in it, see `Row.unread`
    unread: Counter = field(default_factory=Counter)

    def add_bad(self, kind: str, line: int, detail: str = "") -> None:
        """Count a bad row. If it is one of the first of its kind, also store its position."""
        self.bad_counts[kind] += 1
        if self.bad_counts[kind] <= EXAMPLES_PER_KIND:
            named = f"{self.path}:{line}" + (f" ({detail})" if detail else "")
            self.bad_examples.setdefault(kind, []).append(named)

    @property
    def bad(self) -> int:
        """Number of bad rows of all kinds."""
        return self.bad_counts.total()

    def describe_bad(self) -> str:
        """Return a text about the bad rows, with one line per kind."""
        lines = [f"  {self.path}: {self.bad} of {self.rows} rows"]
        for kind, count in self.bad_counts.items():
            more = ", ..." if count > EXAMPLES_PER_KIND else ""
            lines.append(f"    {count} x {kind}: {', '.join(self.bad_examples[kind])}{more}")
        return "\n".join(lines)


@dataclass(frozen=True)
class DataReport:
    """The report on all files of a data set."""

    files: tuple[FileReport, ...]
    length_key: str  # key that sets `most_tokens`
    most_tokens: int  # limit on the tokens of a row
    longest: int  # tokens of the longest row, including dropped rows
    renamed: int = 0  # number of prompts with a duplicate id, which became `id@file:line`
    streams: FrozenDict = field(default_factory=FrozenDict)  # domain, tag or file -> number of prompts
    undrawn: FrozenDict = field(default_factory=FrozenDict)  # tag -> number of prompts that no stream draws
    warnings: tuple[str, ...] = ()  # warnings about ignored parts of usable rows

    @property
    def rows(self) -> int:
        """Number of rows, without blank lines."""
        return sum(file.rows for file in self.files)

    @property
    def prompts(self) -> int:
        """Number of usable rows."""
        return sum(file.prompts for file in self.files)

    @property
    def bad_counts(self) -> Counter:
        """Number of bad rows of each kind, over all files."""
        return sum((file.bad_counts for file in self.files), Counter())

    @property
    def bad(self) -> int:
        """Number of bad rows, over all kinds and files."""
        return sum(file.bad for file in self.files)

    def describe_bad(self) -> str:
        """Return a text about the bad rows of each file; "" if there are none."""
        wrong = [file for file in self.files if file.bad]
        lines = [file.describe_bad() for file in wrong[:FILES_NAMED]]
        if len(wrong) > FILES_NAMED:
            left = sum(file.bad for file in wrong[FILES_NAMED:])
            lines.append(f"  {len(wrong) - FILES_NAMED} more files: {left} rows")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return the report as text: first a summary line, then a line for each kind of problem."""
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        lines = [f"{self.prompts} prompts from {self.rows} rows of {files}; the longest row has {self.longest} tokens"]
        if self.streams:
            lines.append("drawn from " + ", ".join(f"{name} ({count})" for name, count in self.streams.items()))
        if self.undrawn:
            tags = ", ".join(f"{tag!r} ({count})" for tag, count in self.undrawn.items())
            lines.append(f"never drawn, because domain_interleave_probs names no domain with their tag: {tags}")
        if self.renamed:
            lines.append(f"{self.renamed} prompts with a duplicate id got a new id")
        if self.bad:
            lines.append(
                f"{self.bad} rows dropped ({self.length_key}={self.most_tokens} tokens):\n{self.describe_bad()}"
            )
        return "\n".join(lines)
