"""Workflows: what is done with a row is your own code. Also runs Trinity-RFT's YAML files as they are.

python examples/start_workflow_pipeline.py --config trinity.yaml [key=value ...]
python examples/start_workflow_pipeline.py --config_path DIR --config_name NAME [key=value ...]
"""

import sys

from roll_opd.pipelines.launch import main

if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0]))
