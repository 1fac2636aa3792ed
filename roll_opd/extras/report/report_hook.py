"""The report at the end of a run."""

from collections.abc import Iterable

from roll_opd.extras.report.page import write_report
from roll_opd.pipelines.run_hooks import RunHook


class Report(RunHook):
    """Writes `report.html` into the run directory."""

    def at_end(self, ended_by: BaseException | None) -> Iterable[str]:
        """Write the report."""
        yield f"Report: {self.run.path / write_report(self.run.path).name}"
