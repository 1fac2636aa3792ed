"""Supervised fine-tuning on rows that bring their answers.

python examples/start_sft_pipeline.py --config_path DIR --config_name NAME [key=value ...]
"""

import sys

from roll_opd.pipelines.launch import main

if __name__ == "__main__":
    sys.exit(main(__doc__.splitlines()[0], pipeline="sft"))
