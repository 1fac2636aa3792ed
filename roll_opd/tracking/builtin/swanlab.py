"""SwanLab tracker. Without a login, it writes files that `swanlab sync` can upload later."""

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from roll_opd.base.terminal import warn
from roll_opd.tracking.run_directory import RunDirectory
from roll_opd.tracking.tracker_registry import as_list, register, run_id


@register("swanlab", packages=("swanlab",))
class SwanlabTracker:
    """Writes to a SwanLab run. The run is offline if the login fails."""

    def __init__(
        self,
        run: RunDirectory,
        resume_step: int | None,
        *,
        project: str | None = None,
        workspace: str | None = None,
        experiment_name: str | None = None,
        description: str | None = None,
        tags: Sequence[str] | str = (),
        logdir: str | None = None,
        mode: Literal["online", "cloud", "local", "offline", "disabled"] | None = None,
        login_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Start a SwanLab run with the arguments of `swanlab.init`.

        Args:
            mode: mode of the run. ROLL's mode `cloud` means `online`. The default is the environment variable
                SWANLAB_MODE. If the variable is not set, the mode is `online` with a login and `offline` without.
            login_kwargs: arguments of `swanlab.login`.
        """
        import swanlab

        wanted_mode = mode or os.environ.get("SWANLAB_MODE")
        if wanted_mode is None:
            wanted_mode = "online" if login_kwargs or os.environ.get("SWANLAB_API_KEY") else "offline"
        wanted_mode = "online" if wanted_mode == "cloud" else wanted_mode
        wanted = {
            "project": project or run.path.parent.name,
            "workspace": workspace,
            "name": experiment_name or run.path.name,
            "description": description,
            "tags": as_list(tags),
            "log_dir": logdir or str(run.path / "swanlab"),
            "config": run.read_config(),
            "id": run_id(run, "swanlab", lambda: secrets.token_hex(10)),
            "resume": "allow",
        }
        try:
            if login_kwargs and wanted_mode == "online":
                swanlab.login(**login_kwargs)
            self._run = swanlab.init(mode=wanted_mode, **wanted)
        except Exception as error:  # SwanLab has no exception class for network failures
            if wanted_mode != "online":
                raise
            warn(f"tracker swanlab continues offline: {error}")
            self._run = swanlab.init(mode="offline", **wanted)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
