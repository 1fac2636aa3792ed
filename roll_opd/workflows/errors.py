"""What is wrong with a workflow before any runs."""


class WorkflowError(ValueError):
    """A workflow cannot be used; the message says where and what to do."""
