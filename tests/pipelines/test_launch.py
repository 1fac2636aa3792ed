"""The exit code and the message state why a run has ended."""

import errno

import pytest

from roll_opd.base.failures import ConfigError, RunError
from roll_opd.commands.exit_codes import exit_code
from roll_opd.commands.main import main
from roll_opd.data.row_formats import DataError
from roll_opd.pipelines.checkpoints import CheckpointError


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError(["a key is wrong"]), 2, "a key is wrong"),
        (DataError("a row is wrong"), 2, "roll-opd: a row is wrong"),
        (CheckpointError("no checkpoint"), 2, "roll-opd: no checkpoint"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "free space or change output_dir"),
        (OSError(errno.EACCES, "Permission denied"), 1, "Traceback"),
        (RunError("values are not finite"), 1, "roll-opd: values are not finite"),
        (KeyError("a bug"), 1, "Traceback"),
        (KeyboardInterrupt(), 130, "roll-opd: interrupted"),
    ],
)
def test_exit_codes(error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise error
    except BaseException as raised:
        assert exit_code(raised) == code
    assert message in (said := capsys.readouterr().err)
    assert ("Traceback" in said) == (message == "Traceback")


@pytest.mark.parametrize("entry", ["distill", "rlvr", "sft", "dpo"])
def test_every_entry_is_a_command(entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"distill": "onpolicy_distill", "rlvr": "rlvr", "sft": "sft", "dpo": "dpo"}
    arguments = ["run", entry, "--config_path", "demo", "--config_name", names[entry], "max_stepz=1"]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "max_stepz" in said and "the configuration has a problem" in said  # and no other: it is this entry's
