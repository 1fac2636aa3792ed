"""SwanLab. Without a login it works offline, into files that `swanlab sync` uploads later."""

import os
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from roll_opd.tracking.registry import register, run_id
from roll_opd.tracking.run_directory import RunDirectory


@register("swanlab")
class SwanlabTracker:
    """A SwanLab run; where the login fails, an offline one."""

    def __init__(
        self,
        run: RunDirectory,
        resume_step: int | None,
        *,
        project: str | None = None,
        experiment_name: str | None = None,
        tags: tuple[str, ...] = (),
        logdir: str | None = None,
        mode: str | None = None,
        login_kwargs: Mapping[str, Any] | None = None,
        **about: str,  # workspace, description
    ) -> None:
        import swanlab

        mode = mode or os.environ.get("SWANLAB_MODE")
        if mode is None:
            mode = "online" if login_kwargs or os.environ.get("SWANLAB_API_KEY") else "offline"
        mode = "online" if mode == "cloud" else mode
        wanted = {
            "project": project or run.path.parent.name,
            "name": experiment_name or run.path.name,
            "tags": list(tags),
            "log_dir": logdir or str(run.path / "swanlab"),
            "config": run.read_config(),
            "id": run_id(run, "swanlab", lambda: secrets.token_hex(10)),
            "resume": "allow",
            **about,
        }
        try:
            if login_kwargs and mode == "online":
                swanlab.login(**login_kwargs)
            self._run = swanlab.init(mode=mode, **wanted)
        except Exception as error:  # it has no class of its own for a network that is not there
            if mode != "online":
                raise
            print(f"warning: tracker swanlab goes on offline: {error}", file=sys.stderr, flush=True)
            self._run = swanlab.init(mode="offline", **wanted)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
