"""Processes of a session that each compile a part of the files together compile all files, as imports would."""

import importlib.util
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.bytecode import write_share

FILES = {
    "module.py": "VALUE = 1\n",
    "test_module.py": "def test_it():\n    value = 1\n    assert value == 2\n",
    "conftest.py": "",
    "test_broken.py": "def\n",
}


def test_shares_are_the_bytecode_that_imports_read(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    files = [tmp_path / name for name in FILES]
    for file in files:
        file.write_text(FILES[file.name])
    for number in range(3):
        write_share(files, number, 3, pytestconfig)
    assert Path(importlib.util.cache_from_source(str(tmp_path / "module.py"))).is_file()
    cached = tmp_path / "__pycache__" / f"test_module{rewrite.PYC_TAIL}"
    code = rewrite._read_pyc(tmp_path / "test_module.py", cached)
    assert code is not None
    namespace: dict = {}
    exec(code, namespace)
    with pytest.raises(AssertionError, match=r"assert 1 == 2"):
        namespace["test_it"]()
