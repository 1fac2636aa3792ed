"""Trackio tracker. Without a Space or a server, it writes a database in the run directory."""

import os
from collections.abc import Mapping

from roll_opd.tracking.run_directory import RunDirectory
from roll_opd.tracking.tracker_registry import register

DIRECTORY = "TRACKIO_DIR"  # Trackio reads it at its import


@register("trackio", packages=("trackio",))
class TrackioTracker:
    """Writes to a Trackio run, which a resumed run continues."""

    def __init__(
        self,
        run: RunDirectory,
        resume_step: int | None,
        *,
        project: str | None = None,
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
        private: bool = True,
        log_dir: str | None = None,
    ) -> None:
        """Start a Trackio run with the arguments of `trackio.init`.

        Args:
            log_dir: directory of the database; the environment variable TRACKIO_DIR.
        """
        os.environ[DIRECTORY] = log_dir or os.environ.get(DIRECTORY) or str(run.path / "trackio")
        import trackio

        self._run = trackio.init(
            project or run.path.parent.name,
            name=name or run.path.name,
            group=group,
            space_id=space_id,
            server_url=server_url,
            private=private,
            config=run.read_config(),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
