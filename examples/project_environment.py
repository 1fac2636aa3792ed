"""What the launchers beside this file begin with: a Python that has the project's packages."""

import os
import runpy

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "roll_opd")
# by its path: before this, the package itself need not be importable
use_project_environment = runpy.run_path(os.path.join(_PACKAGE, "interpreter.py"))["use_project_environment"]
