"""Exceptions of workflows: unusable workflow, no room for a response, failed run."""


class WorkflowError(ValueError):
    """A workflow cannot be used; the message says where and what to do."""


class NoRoomError(ValueError):
    """A conversation leaves no room for a response."""


class RunFailure(RuntimeError):
    """A run failed; it is not trained on."""

    def __init__(self, kind: str, message: str) -> None:
        """Create a failure counted in the metric `workflow/failed/<kind>`."""
        super().__init__(message)
        self.kind = kind
