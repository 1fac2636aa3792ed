"""TensorBoard event files."""

from collections.abc import Mapping

from roll_opd.tracking.registry import register
from roll_opd.tracking.run_directory import RunDirectory


@register("tensorboard")
class TensorBoardTracker:
    """TensorBoard event files; after a resume the events of later steps are purged from view."""

    def __init__(self, run: RunDirectory, resume_step: int | None, log_dir: str | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(log_dir=log_dir or str(run.tensorboard), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()  # a killed run keeps what it has logged

    def close(self) -> None:
        self._writer.close()
