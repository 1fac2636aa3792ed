"""Wrong formulas in losses, advantages, masks, divergences and KL estimators: each of them fails a test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import PACKAGE, REPOSITORY, file_of, file_of_test
from wrong_formulas import WRONG_FORMULAS

from tests.each import each


@pytest.mark.nightly  # one run of tests for each
@pytest.mark.timeout(1800)
def test_every_wrong_formula_fails_a_test() -> None:
    program = [sys.executable, Path(__file__).with_name("mutations.py")]
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(program, cwd=REPOSITORY, env=unmeasured, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@each("formula", WRONG_FORMULAS)
def test_the_table_of_wrong_formulas_matches_the_package(formula) -> None:
    assert formula.right != formula.wrong
    file_of(formula.right, REPOSITORY / PACKAGE)
    for name in formula.tests:
        file_of_test(name, REPOSITORY / "tests")
