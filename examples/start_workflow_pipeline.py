"""Workflows: custom code processes each row. Also runs YAML files of Trinity-RFT unchanged.

python examples/start_workflow_pipeline.py --config trinity.yaml [key=value ...]
python examples/start_workflow_pipeline.py --config_path DIR --config_name NAME [key=value ...]
"""

import sys

from project_environment import use_project_environment

if __name__ == "__main__":
    use_project_environment()
    from roll_opd.commands.run import main

    sys.exit(main(__doc__.splitlines()[0]))
