"""Names in docstrings exist: "see `name`" leads to a definition, and names with a dot or underscore are in the code."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "roll_opd"
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
NAME = re.compile(r"`([A-Za-z]\w*(?:\.\w+)*)(?:\(\))?`")
REFERENCE = re.compile(r"\b[Ss]ee `([A-Za-z]\w*(?:\.\w+)*)`")
DEFINED = re.compile(r"^ *(?:(?:async )?def|class) (\w+)|^(\w+)(?::[^=\n]+)? = ", re.MULTILINE)
# names of engines, libraries and metrics
ELSEWHERE = {
    "SchedulerConfig.verify_max_model_len",
    "EngineCore._attach_weight_version",
    "EngineCore.set_weight_version",
    "torch.nn.attention.varlen",
    "get_attention_backend",
    "fully_reshardable",
    "mtp_num_layers",
    "pass_at_4",
}


@cache
def texts() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def parts_of_package() -> set[str]:
    return {part for path in texts() for part in (*path.parts, path.stem)}


def unknown(pattern: re.Pattern[str], names: set[str], *, is_long: bool) -> Iterator[str]:
    for path, text in texts().items():
        for docstring in DOCSTRING.findall(text):
            for name in pattern.findall(docstring):
                is_asked = not is_long or "." in name or "_" in name
                if is_asked and name not in ELSEWHERE and not names.issuperset(name.split(".")):
                    yield f"{path.relative_to(PACKAGE)}: `{name}`"


def test_references_lead_to_a_definition() -> None:
    defined = {name for text in texts().values() for found in DEFINED.findall(text) for name in found if name}
    assert not list(unknown(REFERENCE, defined | parts_of_package(), is_long=False))


def test_names_in_docstrings_occur_in_the_code() -> None:
    words = {word for text in texts().values() for word in re.findall(r"\w+", NAME.sub("", text))}
    assert not list(unknown(NAME, words | parts_of_package(), is_long=True))
