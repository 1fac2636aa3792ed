"""tests/README.md has all files that use CUDA, and the versions of docs/gpu.md are the locked ones."""

import re
from pathlib import Path

from roll_opd.commands import gpu_versions

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/gpu.md").read_text()
TESTS = (ROOT / "tests/README.md").read_text()
CUDA = re.compile(
    r"torch\.cuda|is_cuda|[\"']cuda[\"']|nccl|transformer_engine|nvidia|NVTE_|CUDA_VISIBLE|get_device_capability|ALLOC_CONF"
)


def test_every_file_that_names_cuda_is_on_the_page() -> None:
    section = TESTS.split("## CUDA's part of the code")[1].split("\n## ")[0]
    table = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    listed: set[str] = set()
    for cell in table:
        room = ""
        for name in re.findall(r"`([\w/]+\.py)`", cell):  # the first names the room of those after it
            listed |= {name, f"{room}/{name}"}
            room = room or str(Path(name).parent)
    named = [path for path in (ROOT / "roll_opd").rglob("*.py") if CUDA.search(path.read_text())]
    assert len(named) > 15
    assert [str(path) for path in named if str(path.relative_to(ROOT / "roll_opd")) not in listed] == []


def test_the_table_of_versions_is_the_lock() -> None:
    locked = {
        name.lower(): version
        for name, _, version in (
            line.partition("==") for line in (ROOT / "requirements/gpu.lock").read_text().splitlines()
        )
    }
    assert {name: locked[name] for name in gpu_versions.VERSIONS} == gpu_versions.VERSIONS
    names = {
        "transformer engine": "transformer-engine",
        "cuda": "nvidia-cuda-runtime",
        "cudnn": "nvidia-cudnn-cu13",
        "nccl": "nvidia-nccl-cu13",
    }
    section = PAGE.split("## Versions")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in section.splitlines() if line.startswith("| ")]
    packages = [(name.lower(), version.split()[0].strip(",")) for name, version in rows[1:] if "," not in name]
    checked = {name for name, version in packages if locked.get(names.get(name, name)) == version}
    assert checked == {name for name, _ in packages} - {"python", "base image", "nvidia's driver"}
    assert f"| NVIDIA's driver | {gpu_versions.DRIVER} " in section and f"for CUDA {gpu_versions.CUDA} " in section
