"""Run hooks: parts of other packages that observe a run.

A package names a hook as an entry point of the group `roll_opd.run_hooks`; every run makes one of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from roll_opd.base.entry_points import entries, load
from roll_opd.base.failures import ConfigError, full_disk
from roll_opd.base.terminal import warn
from roll_opd.config.plan import RunPlan
from roll_opd.pipelines.settings_history import RunPart
from roll_opd.tracking.run_directory import RunDirectory


class RunHook:
    """Observes a run on the driver. A subclass overrides the methods that it needs."""

    def __init__(self, plan: RunPlan, run: RunDirectory) -> None:
        self.plan, self.run = plan, run

    def after_step(self, metrics: Mapping[str, float | None]) -> Iterable[str]:
        """Return warnings. A resumed run first passes the metrics of earlier steps, and does not print their warnings.

        A metric of an earlier step that was not finite is None.
        """
        return ()

    def model_files(self, step: int, summary: Mapping[str, Any], parts: Sequence[RunPart]) -> Mapping[str, str]:
        """Return the content of each text file to write next to the model of a checkpoint, by file name.

        Args:
            summary: content of `summary.json`, with the results so far.
            parts: parts of the run with their settings.
        """
        return {}

    def at_end(self, ended_by: BaseException | None) -> Iterable[str]:
        """Return texts to print after the last record of the run.

        `ended_by` is the error that ended the run early.
        """
        return ()


class RunHooks:
    """The hooks of a run. A hook that fails does not fail the run: it is named, and not called again."""

    def __init__(self, plan: RunPlan, run: RunDirectory) -> None:
        self._run, self._hooks = run, dict[str, RunHook]()
        for name, entry in entries("run_hooks").items():
            try:
                self._hooks[name] = load(entry)(plan, run)
            except ImportError as error:
                raise ConfigError([str(error)]) from error
            except Exception as error:
                self._warn(name, error)

    def after_step(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Return the warnings of all hooks."""
        return [text for texts in self._each("after_step", metrics) for text in texts]

    def model_files(self, step: int, summary: Mapping[str, Any], parts: Sequence[RunPart]) -> dict[str, str]:
        """Return the files of all hooks by name."""
        return {name: text for found in self._each("model_files", step, summary, parts) for name, text in found.items()}

    def at_end(self, ended_by: BaseException | None) -> list[str]:
        """Return the texts of all hooks."""
        return [text for texts in self._each("at_end", ended_by) for text in texts]

    def _each(self, method: str, *values: Any) -> Iterator[Any]:
        for name, hook in [*self._hooks.items()]:
            try:
                found = getattr(hook, method)(*values)
                yield found if isinstance(found, Mapping) else [*found]
            except Exception as error:
                del self._hooks[name]
                self._warn(name, error)

    def _warn(self, name: str, error: Exception) -> None:
        why = full_disk(error, self._run.path) or f"{type(error).__name__}: {error}"
        warn(f"The run hook {name} failed and is not called again ({why})")
