"""Import `use_project_environment` for the launchers in this directory, before the package is importable."""

import os
import runpy

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "roll_opd")
# loaded by path, since the package may not be importable yet
use_project_environment = runpy.run_path(os.path.join(_PACKAGE, "base", "interpreter.py"))["use_project_environment"]
