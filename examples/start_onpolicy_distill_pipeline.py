"""Pure on-policy distillation: the student learns from the teacher alone.

python examples/start_onpolicy_distill_pipeline.py --config_path DIR --config_name NAME [key=value ...]
"""

import sys

from roll_opd.pipelines.launch import main

if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], pure=True))
