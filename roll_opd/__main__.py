"""`python -m roll_opd` is the command `roll-opd`."""

import sys

from roll_opd.cli import main

if __name__ == "__main__":
    sys.exit(main())
