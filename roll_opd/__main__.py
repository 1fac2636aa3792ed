"""`python -m roll_opd` is the command `roll-opd`."""

import sys

from roll_opd.base.interpreter import NO_TORCH, use_project_environment

if __name__ == "__main__":
    # doctor reports missing packages; `main` checks for the packages of a run
    use_project_environment("" if sys.argv[1:2] == ["doctor"] else NO_TORCH, module="roll_opd")
    from roll_opd.base.installed import refuse_shadowing_files

    if sys.argv[1:2] != ["doctor"]:
        refuse_shadowing_files()  # before `main` imports modules: a file of the user may hide one of them
    from roll_opd.commands.main import main

    sys.exit(main())
