"""Pure on-policy distillation: the student trains only on the teacher's log-probs.

python examples/start_onpolicy_distill_pipeline.py --config_path DIR --config_name NAME [key=value ...]
"""

import sys

from project_environment import use_project_environment

if __name__ == "__main__":
    use_project_environment()
    from roll_opd.commands.run import main

    sys.exit(main(__doc__.splitlines()[0], pure=True))
