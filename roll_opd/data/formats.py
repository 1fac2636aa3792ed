"""Detect the format of a row file from its first bytes, since file names are unreliable."""

import json
from pathlib import Path

FIRST_BYTES = 2**20  # read for detection
BOM = b"\xef\xbb\xbf"
PARQUET = b"PAR1"
# first bytes of unsupported files -> format, remedy
FOREIGN = {
    b"\x1f\x8b": ("compressed with gzip", "unpack it (gunzip {name})"),
    b"\x28\xb5\x2f\xfd": ("compressed with Zstandard", "unpack it (zstd -d {name})"),
    b"BZh": ("compressed with bzip2", "unpack it (bunzip2 {name})"),
    b"\xfd7zXZ": ("compressed with xz", "unpack it (unxz {name})"),
    b"PK\x03\x04": ("a zip archive or a spreadsheet", "unpack or export it"),
    b"ARROW1": ("an Arrow file", 'convert it: datasets.Dataset.from_file("{name}").to_parquet("rows.parquet")'),
    b"SQLite format 3": ("an SQLite database", "export its rows"),
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"),
}
TABLES = {".csv": "a CSV file", ".tsv": "a table with tabs"}  # text formats, recognised only by name
SEPARATORS = {".csv": ",", ".tsv": "\\t"}


def is_parquet(path: Path) -> bool:
    """Whether a file has Parquet's first bytes or file name."""
    return path.suffix == ".parquet" or _head(path, len(PARQUET)) == PARQUET


def is_array(path: Path) -> bool:
    """Whether a text file is one JSON array of rows, a form that `datasets` reads too."""
    with path.open("rb") as file:
        head = file.read(len(BOM))
        file.seek(len(BOM) if head == BOM else 0)
        line = b""
        while not line.strip():
            line = file.readline(FIRST_BYTES)
            if not line:
                return False
        if not line.lstrip().startswith(b"["):
            return False
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            return True  # the array continues in the next lines
        # an array in one line is the complete file, or a bad first row of a JSONL file
        return not any(rest.strip() for rest in iter(lambda: file.read(FIRST_BYTES), b""))


def refusal(path: Path) -> str | None:
    """Return a message about an unsupported file format and its remedy; None for other files."""
    if not path.is_file() or is_parquet(path):
        return None
    read = "rows are read from JSONL (one object per line), a JSON array or Parquet"
    if path.suffix in TABLES:
        convert = f'pandas.read_csv("{path.name}", sep="{SEPARATORS[path.suffix]}")'
        convert += f'.to_json("{path.stem}.jsonl", orient="records", lines=True)'
        return f"{path} is {TABLES[path.suffix]}; {read}: convert it with {convert}"
    head = _head(path, FIRST_BYTES)
    for start, (what, advice) in FOREIGN.items():
        if head.startswith(start):
            return f"{path} is {what}; {read}: {advice.format(name=path.name)} and name the result"
    if _is_spread(head):
        advice = f"write one object per line (jq -c . {path.name} > {path.stem}.jsonl)"
        return f"{path} holds JSON objects over several lines; {read}: {advice}, or write an array of them"
    return None


def _is_spread(head: bytes) -> bool:
    """Whether a text begins with a JSON object that spans several lines."""
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if not text.startswith("{"):
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]


def _head(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""  # reported when the file is read
