"""Weights & Biases. Without a login it works offline, into files that `wandb sync` uploads later."""

import os
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from roll_opd.tracking.registry import register, run_id
from roll_opd.tracking.run_directory import RunDirectory

# Console off, as in ROLL: the run's own log is not W&B's to capture. Seconds: a server that does not answer must not
# hold up the end of a run; W&B itself waits for 90 and for ever.
SETTINGS = {"console": "off", "init_timeout": 20.0, "finish_timeout": 20.0}


@register("wandb")
class WandbTracker:
    """A W&B run; where the server cannot be reached, an offline one."""

    def __init__(
        self,
        run: RunDirectory,
        resume_step: int | None,
        *,
        project: str | None = None,
        name: str | None = None,
        tags: tuple[str, ...] = (),
        log_dir: str | None = None,
        api_key: str | None = None,
        base_url: str | None = None,
        mode: str | None = None,
        settings: Mapping[str, Any] | None = None,
        **about: str,  # entity, notes, group
    ) -> None:
        import wandb

        known = {"api_key": api_key, "base_url": base_url}
        options = {**SETTINGS, **{key: value for key, value in known.items() if value}, **(settings or {})}
        mode = mode or os.environ.get("WANDB_MODE")
        if mode is None:
            logged_in = api_key or wandb.login(prompt=False, verify=False)
            mode = "online" if logged_in else "offline"
        wanted = {
            "project": project or run.path.parent.name,
            "name": name or run.path.name,
            "tags": list(tags),
            "dir": log_dir or str(run.path),
            "config": run.read_config(),
            **about,
        }
        identity = run_id(run, "wandb", lambda: secrets.token_hex(4))
        try:
            self._run = wandb.init(mode=mode, id=identity, resume="allow", settings=wandb.Settings(**options), **wanted)
        except wandb.Error as error:
            if mode != "online":
                raise
            print(f"warning: tracker wandb goes on offline: {error}", file=sys.stderr, flush=True)
            # the half-opened run keeps its id in use, so this part has another
            self._run = wandb.init(
                mode="offline", id=f"{identity}-{secrets.token_hex(2)}", settings=wandb.Settings(**options), **wanted
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
