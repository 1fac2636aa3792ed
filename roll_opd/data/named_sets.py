"""Data sets by name: the files of a split of a data set on the Hugging Face Hub, as files of rows in the cache.

The package `datasets` selects the files of a subset and a split, from the names of the repository's files and its
README. Only these files are downloaded. JSONL, JSON and Parquet files are read where they are; other formats are
converted by `datasets`. A data set of questions with columns in a form of `SHAPES` becomes rows with messages and a
ground truth. The result is recorded in the cache, so that later runs and plans need no network.
"""

import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from roll_opd.base import hub
from roll_opd.base.hub import HubError, HubName

DEFAULT_SUBSETS = ("default", "main")  # of several subsets, if no subset is written
ROW_FILES = (".jsonl", ".json", ".parquet")
CHATS = ("messages", "conversations", "prompt")  # columns that are rows' prompts without conversion
README = ("README.md", ".huggingface.yaml", "dataset_infos.json")
MARK = "####"
Read = Callable[[str], str | None]  # reads the ground truth in the text of a column


def after_mark(text: str) -> str | None:
    """Return the text after the last "####", without the commas of a number; None without this mark."""
    _, mark, tail = text.rpartition(MARK)
    return tail.strip().replace(",", "") or None if mark else None


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...}, or the word after \boxed; None without a box."""
    found = [*re.finditer(r"\\(?:boxed|fbox)\s*(\{)?", text)]
    if not found:
        return None
    start, depth = found[-1].end(), 1
    if found[-1][1] is None:
        return (re.match(r"[^\s$.,]*", text[start:]) or [""])[0] or None
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[start:place].strip() or None
    return None


@dataclass(frozen=True)
class Shape:
    """A form of data sets: the column of the question, the column of the answer, and how the ground truth is read."""

    prompt: str
    truth: str
    meaning: str = ""
    read: Read = str.strip

    def __str__(self) -> str:
        return f"{self.prompt} -> messages, {self.meaning}{self.truth} -> ground_truth"

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has the columns, and an answer that can be read."""
        return isinstance(row.get(self.prompt), str) and self.truth_of(row) is not None

    def truth_of(self, row: Mapping[str, Any]) -> str | None:
        """Return the ground truth of a row, or None if it has none."""
        value = row.get(self.truth)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = f"{value:g}" if isinstance(value, float) else str(value)
        return (self.read(value) or None) if isinstance(value, str) else None


SHAPES = (
    Shape("question", "answer", f"the number after {MARK} in ", after_mark),  # GSM8K
    Shape("question", "final_answer"),  # DeepMath-103K
    Shape("problem", "answer"),  # MATH-500, AIME, OpenR1-Math
    Shape("Problem", "Answer"),  # AIME 2024
    Shape("problem", "expected_answer"),  # OpenMathReasoning
    Shape("problem", "solution", r"the last \boxed in ", last_box),  # MATH, NuminaMath
    Shape("question", "answer"),
)


@dataclass(frozen=True)
class DataPart:
    """The part of a data set that is read: subsets, a split, and how its columns are read.

    `columns` has the columns that the configuration names; without names, `SHAPES` are tried. `as_is`: the run reads
    columns in another way (answers of SFT, tasks of a workflow), so that no shape is tried.
    """

    subset: tuple[str, ...] = ()
    split: str = "train"
    columns: tuple[str, ...] = ()
    as_is: bool = False

    def __str__(self) -> str:
        return ", ".join([*self.subset, self.split])


@dataclass(frozen=True)
class NamedFiles:
    """The files of a part of a data set, and a text about how its columns are read."""

    files: tuple[str, ...]
    commit: str
    reading: str = ""


def named_files(name: HubName, part: DataPart) -> NamedFiles:
    """Return the files of a part of a data set. They are downloaded, if `hub.downloading` permits it.

    Raises HubError.
    """
    commit = name.wanted
    if not hub.COMMIT.fullmatch(commit):
        found = hub.cached(name)
        commit = found.name if found else ""
    record = _place(name, commit, part) / "part.json"
    try:
        known = NamedFiles(**json.loads(record.read_text(encoding="utf-8")))
        if all(map(os.path.isfile, known.files)):
            hub.record(name, known.commit, known.reading)
            return known
    except (OSError, ValueError, TypeError):
        pass
    if hub.is_offline():
        raise hub.offline(name)
    if not hub.may_download():
        raise hub.absent(name, f"the files of its split {part.split}")
    found_now = _downloaded(name, part)
    hub.record(name, found_now.commit, found_now.reading)
    record = _place(name, found_now.commit, part) / "part.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    partial = record.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(found_now)), encoding="utf-8")
    partial.replace(record)
    return found_now


def _place(name: HubName, commit: str, part: DataPart) -> Path:
    """Return the directory for the converted files and the record of a part."""
    kind = sha256(repr((part.subset, part.split, bool(part.columns), part.as_is)).encode()).hexdigest()[:12]
    return hub.hub_cache().parent / "roll_opd" / name.id.replace("/", "--") / (commit or "-") / kind


def _downloaded(name: HubName, part: DataPart) -> NamedFiles:
    listed: dict[str, int] = {}

    def readme(files: Collection[str]) -> list[str]:
        listed.update(dict.fromkeys(files, 0))
        return [file for file in README if file in files]

    card = hub.look_up(name, readme)
    directory = hub.download([card])[0] if card.files else hub.snapshot(name, card.commit)
    module, chosen = _chosen(name, part, directory, [*listed])
    with hub.pinned({str(name): card.commit} if card.files else {}):  # a pinned commit does not become the branch's
        directory = hub.fetch(name, lambda files: [file for file in chosen if file in files])
    files = [str(directory / file) for file in chosen]
    place = _place(name, directory.name, part)
    if not all(file.endswith(ROW_FILES) for file in chosen):
        files = [_as_parquet(name, module, files, place)]
    reading = f"{part}: columns unchanged"
    if not part.columns and not part.as_is:
        first = _first(name, files)
        shape = next((one for one in SHAPES if one.fits(first)), None)
        if shape:
            files, reading = [_converted(name, part, shape, files, place)], f"{part}: {shape}"
        elif not any(first.get(column) for column in CHATS):
            raise HubError(
                f"{name} ({part}) has the columns {', '.join(sorted(first))}, and no ready mapping fits them; name the"
                " column of the prompt in data_args.prompt or data_args.messages, and that of the answer in"
                " data_args.ground_truth"
            )
    return NamedFiles(tuple(files), directory.name, reading)


def _chosen(name: HubName, part: DataPart, directory: Path, files: Sequence[str]) -> tuple[str, list[str]]:
    """Return (module, files): the module of `datasets` that reads the data set, and the files of the part.

    `datasets` sees a directory with empty files of the same names, and the README of the repository.
    """
    try:
        from datasets import get_dataset_config_names, load_dataset_builder
        from datasets.utils.logging import set_verbosity_error
    except ImportError as error:
        raise HubError(f"{name} needs the package datasets ({error}); pip install datasets") from error
    set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="roll_opd-") as skeleton:
        root = Path(skeleton).resolve()
        for file in files:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).touch()
        for file in README:
            if file in files:
                (root / file).write_bytes((directory / file).read_bytes())
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                known = get_dataset_config_names(str(root))
                subsets = part.subset or _default_subset(name, known)
                for one in subsets:
                    if one not in known:
                        raise HubError(f"{name} has no subset {one!r}; set data_args.subset to {_some(known)}")
                builders = [load_dataset_builder(str(root), one) for one in subsets]
        except HubError:
            raise
        except Exception as error:  # `datasets` raises errors of many kinds
            raise HubError(
                f"{name}: datasets cannot read the data set ({type(error).__name__}:"
                f" {str(error).splitlines()[0][:200]}); name its files, as {name.id}@refs/convert/parquet, or download"
                " them"
            ) from error
        found = []
        for one, builder in zip(subsets, builders, strict=True):
            splits = builder.config.data_files or {}
            if part.split not in splits:
                raise HubError(
                    f"{name} has no split {part.split!r} in subset {one!r}; set data_args.split to {_some(splits)}"
                )
            found += [Path(file).resolve().relative_to(root).as_posix() for file in splits[part.split]]
        return type(builders[0]).__module__.rpartition(".")[2], list(dict.fromkeys(found))


def _default_subset(name: HubName, known: Sequence[str]) -> tuple[str, ...]:
    if len(known) == 1:
        return (known[0],)
    for one in DEFAULT_SUBSETS:
        if one in known:
            return (one,)
    raise HubError(f"{name} has several subsets; set data_args.subset to {_some(known)} (or to a list)")


def _some(names: Iterable[str]) -> str:
    found = [*map(str, names)]
    more = f" or another of {len(found)}" if len(found) > 12 else ""
    return " or ".join(found[:12]) + more


def _as_parquet(name: HubName, module: str, files: Sequence[str], place: Path) -> str:
    """Convert files with `datasets` to a Parquet file; return its path."""
    from datasets import load_dataset

    place.mkdir(parents=True, exist_ok=True)
    output, partial = place / "rows.parquet", place / f"rows.{os.getpid()}.partial"
    try:
        with tempfile.TemporaryDirectory(dir=place) as cache:
            load_dataset(module, data_files=list(files), split="train", cache_dir=cache).to_parquet(
                str(partial), batch_size=1024
            )
        partial.replace(output)
    except Exception as error:  # `datasets` raises errors of many kinds
        raise HubError(f"{name}: datasets cannot convert {files[0]} ({type(error).__name__}: {error})") from error
    finally:
        partial.unlink(missing_ok=True)
    return str(output)


def _rows(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of files that are objects."""
    from roll_opd.data.row_files import open_file

    for file in files:
        for _, _, value in open_file(file).scan():
            if isinstance(value, dict):
                yield value


def _first(name: HubName, files: Sequence[str]) -> dict[str, Any]:
    first = next(_rows(files), None)
    if first is None:
        raise HubError(f"{name} has no rows in {files[0]}; name another split or subset")
    return first


def _converted(name: HubName, part: DataPart, shape: Shape, files: Sequence[str], place: Path) -> str:
    """Write rows with an id, messages and the ground truth; return the path of the file.

    A row without a readable answer has no ground truth.
    """
    source = name.id.partition("/")[2]
    place.mkdir(parents=True, exist_ok=True)
    output, partial = place / "rows.jsonl", place / f"rows.{os.getpid()}.partial"
    with partial.open("w", encoding="utf-8") as out:
        for number, row in enumerate(_rows(files)):
            found = {
                "id": "-".join([source, *part.subset, part.split, str(number)]),
                "source": source,
                "tag": "math_rule",
                "messages": [{"role": "user", "content": row.get(shape.prompt)}],
                "ground_truth": shape.truth_of(row),
            }
            out.write(json.dumps(found, ensure_ascii=False) + "\n")
    partial.replace(output)
    return str(output)
