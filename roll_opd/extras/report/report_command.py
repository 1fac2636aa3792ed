"""The command `roll-opd report`."""

import argparse
import sys
from pathlib import Path

from roll_opd.base.command_line import DONE, USER_ERROR
from roll_opd.base.failures import full_disk
from roll_opd.commands.main import Command


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help="directory of a run, finished or not, or of its experiment")
    parser.add_argument("--output", metavar="FILE", help="output file (default: RUN_DIR/report.html)")


def _report(arguments: argparse.Namespace) -> int:
    from roll_opd.extras.report.page import write_report
    from roll_opd.extras.report.run_files import NoRun

    try:
        written = write_report(Path(arguments.run), Path(arguments.output) if arguments.output else None)
    except NoRun as error:
        print(f"roll-opd: {error}", file=sys.stderr)
        return USER_ERROR
    except OSError as error:
        why = full_disk(error, Path(arguments.output).parent if arguments.output else Path(arguments.run)) or error
        print(f"roll-opd: cannot write the report: {why}; name another file with --output", file=sys.stderr)
        return USER_ERROR
    print(f"{written} ({written.stat().st_size / 1e6:.1f} MB): open it in a browser")
    return DONE


REPORT = Command("write the report of a run as one HTML file", _arguments, _report, needs_engines=False)
