"""What is wrong with a workflow before any runs, and what stops a run on its way."""


class WorkflowError(ValueError):
    """A workflow cannot be used; the message says where and what to do."""


class NoRoomError(ValueError):
    """A conversation leaves no room for a response."""


class RunFailure(RuntimeError):
    """A run fails, and nothing is learned from it."""

    def __init__(self, kind: str, message: str) -> None:
        """`kind` is the one it is counted by, in `workflow/failed/<kind>`."""
        super().__init__(message)
        self.kind = kind
