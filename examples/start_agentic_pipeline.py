"""Learning in environments, turn by turn, from teachers (is_pure_opd), from rewards, or from both (use_opd).

python examples/start_agentic_pipeline.py --config_path DIR --config_name NAME [key=value ...]
"""

import sys

from project_environment import use_project_environment

if __name__ == "__main__":
    use_project_environment()
    from roll_opd.commands.run import main

    sys.exit(main(__doc__.splitlines()[0], pipeline="agentic"))
