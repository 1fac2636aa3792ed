"""The notebook examples/first_run.ipynb: its file, and its execution in a separate environment."""

import ast
import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples/first_run.ipynb"
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
nbformat.validate(notebook)
NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, "done.ipynb")
"""


def test_the_notebook_has_cells_that_compile_and_no_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5) and notebook["metadata"].keys() == {
        "kernelspec",
        "language_info",
    }
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            ast.parse("".join(cell["source"]))


@pytest.mark.slow
@pytest.mark.nightly
def test_the_notebook_distils_the_demo(tmp_path: Path) -> None:
    """With this environment's packages and those of requirements/notebook.txt, in 60 to 70 seconds on two cores."""
    tools = ROOT / "build/notebook_env"
    command = ["make", "-s", f"PYTHON={sys.executable}", f"{tools.relative_to(ROOT)}/installed"]
    if subprocess.run(command, cwd=ROOT, timeout=300).returncode:
        pytest.skip("the packages of requirements/notebook.txt cannot be installed here")
    (packages,) = tools.glob("lib/python3*/site-packages")
    (packages / "project.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [str(tools / "bin/python"), "-c", EXECUTE, str(NOTEBOOK)]
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, timeout=400)
    cells = json.loads((tmp_path / "done.ipynb").read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    html = ["".join(output["data"]["text/html"]) for output in outputs if "text/html" in output.get("data", {})]
    assert any(text.count("<span style") > 100 and "rgba(230, 110, 0" in text for text in html)
    printed = "".join("".join(output.get("text", [])) for output in outputs)
    first, last = printed.partition("reverse KL: ")[2].split(" in the first step, ")
    assert float(last.split()[0]) < 0.5 * float(first)
    assert (tmp_path / "first_run/model").is_dir() and list(tmp_path.glob("first_run/output/demo/*/report.html"))
