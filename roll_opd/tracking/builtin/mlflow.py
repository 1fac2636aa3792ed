"""MLflow tracker. If no tracking URI is given, it writes an SQLite file in the run directory."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from roll_opd.tracking.run_directory import RunDirectory
from roll_opd.tracking.tracker_registry import register, run_id

PARAMS_PER_REQUEST = 100  # MLflow's limit
PARAM_CHARACTERS = 500  # every MLflow server since 1.28 accepts this length


@register("mlflow", packages=("mlflow", "sqlalchemy", "alembic"))
class MlflowTracker:
    """Writes to an MLflow run. The configuration is stored as the parameters of the run."""

    def __init__(
        self,
        run: RunDirectory,
        resume_step: int | None,
        *,
        tracking_uri: str | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.path / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)

        def new() -> str:
            name = experiment_name or run.path.parent.name
            experiment = self._client.get_experiment_by_name(name)
            identity = experiment.experiment_id if experiment else self._client.create_experiment(name)
            made = self._client.create_run(identity, run_name=run_name or run.path.name, tags=dict(tags or {}))
            params = [Param(_name(key), value[:PARAM_CHARACTERS]) for key, value in _flat(run.read_config())]
            for start in range(0, len(params), PARAMS_PER_REQUEST):
                self._client.log_batch(made.info.run_id, params=params[start : start + PARAMS_PER_REQUEST])
            return made.info.run_id

        self._id = run_id(run, "mlflow", new)
        self._client.update_run(self._id, status="RUNNING")  # marks a resumed run, which had ended, as running again

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(_name(name), float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _name(name: str) -> str:
    """Return the metric name in a form that MLflow accepts: `pass@4` becomes `pass_at_4`."""
    return re.sub(r"[^\w\-. /]", "_", name.replace("@", "_at_"))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
