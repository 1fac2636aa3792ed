"""`roll-opd report RUN_DIR`."""

import sys
from pathlib import Path

from roll_opd.base.command_line import DONE, USER_ERROR
from roll_opd.base.full_disk import full_disk
from roll_opd.report.page import write_report
from roll_opd.report.run_files import NoRun


def report(run: str, output: str | None) -> int:
    """Write the report of the run at `run` and return the exit code."""
    try:
        written = write_report(Path(run), Path(output) if output else None)
    except NoRun as error:
        return _refused(str(error))
    except OSError as error:
        why = full_disk(error, Path(output).parent if output else Path(run)) or error
        return _refused(f"the report cannot be written: {why}; name another file with --output")
    print(f"{written} ({written.stat().st_size / 1e6:.1f} MB): open it in a browser")
    return DONE


def _refused(message: str) -> int:
    print(f"roll-opd: {message}", file=sys.stderr)
    return USER_ERROR
