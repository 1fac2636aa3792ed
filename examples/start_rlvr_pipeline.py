"""Reinforcement learning from verifiable rewards, without teachers or together with teachers (use_opd: true).

python examples/start_rlvr_pipeline.py --config_path DIR --config_name NAME [key=value ...]
"""

import sys

from project_environment import use_project_environment

if __name__ == "__main__":
    use_project_environment()
    from roll_opd.commands.run import main

    sys.exit(main(__doc__.splitlines()[0], pure=False))
