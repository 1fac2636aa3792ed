"""`python -m roll_opd` is the command `roll-opd`."""

import sys

from roll_opd.base.interpreter import use_project_environment

if __name__ == "__main__":
    use_project_environment(
        needs_packages=sys.argv[1:2] != ["doctor"], module="roll_opd"
    )  # doctor reports missing packages
    from roll_opd.base.installed import refuse_shadowing_files

    if sys.argv[1:2] != ["doctor"]:
        refuse_shadowing_files()  # before `main` imports modules that a file may hide
    from roll_opd.commands.main import main

    sys.exit(main())
