"""Weights & Biases tracker. Without a login, it writes files that `wandb sync` can upload later."""

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from roll_opd.base.terminal import warn
from roll_opd.tracking.run_directory import RunDirectory
from roll_opd.tracking.tracker_registry import as_list, register, run_id

# As in ROLL, the console is not captured. Timeouts, in seconds, keep an unresponsive server from delaying a run; the
# defaults of W&B are 90 and no limit.
SETTINGS = {"console": "off", "init_timeout": 20.0, "finish_timeout": 20.0}


@register("wandb", packages=("wandb",))
class WandbTracker:
    """Writes to a W&B run. The run is offline if the server cannot be reached."""

    def __init__(
        self,
        run: RunDirectory,
        resume_step: int | None,
        *,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        notes: str | None = None,
        tags: Sequence[str] | str = (),
        group: str | None = None,
        log_dir: str | None = None,
        api_key: str | None = None,
        base_url: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Start a W&B run with the arguments of `wandb.init`.

        Args:
            log_dir: directory of the run's files; the argument `dir` of `wandb.init`.
            mode: mode of the run. The default is the environment variable WANDB_MODE. If the variable is not set, the
                mode is `online` with a login and `offline` without.
        """
        import wandb

        known = {"api_key": api_key, "base_url": base_url}
        options = {**SETTINGS, **{key: value for key, value in known.items() if value}, **(settings or {})}
        wanted_mode = mode or os.environ.get("WANDB_MODE")
        if wanted_mode is None:
            logged_in = api_key or wandb.login(prompt=False, verify=False)
            wanted_mode = "online" if logged_in else "offline"
        wanted = {
            "project": project or run.path.parent.name,
            "entity": entity,
            "name": name or run.path.name,
            "notes": notes,
            "tags": as_list(tags),
            "group": group,
            "dir": log_dir or str(run.path),
            "config": run.read_config(),
        }
        identity = run_id(run, "wandb", lambda: secrets.token_hex(4))
        try:
            self._run = wandb.init(
                mode=wanted_mode, id=identity, resume="allow", settings=wandb.Settings(**options), **wanted
            )
        except wandb.Error as error:
            if wanted_mode != "online":
                raise
            warn(f"tracker wandb continues offline: {error}")
            # the half-opened run still uses its id, so the offline part gets another id
            self._run = wandb.init(
                mode="offline", id=f"{identity}-{secrets.token_hex(2)}", settings=wandb.Settings(**options), **wanted
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
