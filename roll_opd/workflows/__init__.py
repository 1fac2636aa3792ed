"""What a workflow of one's own imports: the interface of Trinity-RFT's, whose workflows run with this import instead.

from roll_opd.workflows import WORKFLOWS, Experience, Task, Workflow
"""

from roll_opd.workflows.experience import EID, Experience
from roll_opd.workflows.interface import WORKFLOWS, FormatConfig, GenerationConfig, Task, Workflow, WorkflowError
from roll_opd.workflows.model import ModelWrapper, Responses

__all__ = [
    "EID",
    "WORKFLOWS",
    "Experience",
    "FormatConfig",
    "GenerationConfig",
    "ModelWrapper",
    "Responses",
    "Task",
    "Workflow",
    "WorkflowError",
]
