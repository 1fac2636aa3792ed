"""Puts the configuration groups and the examples into a wheel; everything else about it is in pyproject.toml.

They stand beside the package, where a reader of the repository looks for them; `roll_opd.base.paths` finds them both
ways.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = (
    "configs/*/*.yaml",
    "examples/*/*.yaml",
    "examples/*/my_*.py",
    "examples/grafana/*.json",
    "examples/demo/data/*.jsonl",
    "examples/*/models/*/*",
)


class BuildWithExamples(build_py):
    """Copies `SHIPPED` to `roll_opd/shipped` of what is built; an editable install reads the repository itself."""

    def run(self) -> None:
        """Build the package's own files, then add the others."""
        super().run()
        if self.editable_mode:
            return
        shipped = Path(self.build_lib, "roll_opd", "shipped")
        shutil.rmtree(shipped, ignore_errors=True)  # of an earlier build
        for file in (file for pattern in SHIPPED for file in Path().glob(pattern)):
            target = shipped / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


setup(cmdclass={"build_py": BuildWithExamples})
