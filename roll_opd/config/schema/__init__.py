"""Schema of the configuration. Each key is declared once: name, type, range, default, meaning and origin.

A section of the configuration is a frozen dataclass of keys. Pydantic checks types and ranges strictly. The planner
checks rules that combine sections, and rules that need files.

Some values reach the plan unchanged. For these keys, a class in `plan.py` inherits from the class in the schema. To add
such a key, declare it in the schema, and write the code that uses its value.

A pipeline declares its keys as a subclass of `Top` if it has a rollout, or of `Supervised` if its rows have answers.

`docs/configuration.md` is generated from these declarations.
"""

from roll_opd.config.schema.key_types import *
from roll_opd.config.schema.objective_keys import *
from roll_opd.config.schema.reward_keys import *
from roll_opd.config.schema.rollout_keys import *
from roll_opd.config.schema.run_keys import *
from roll_opd.config.schema.section import *
from roll_opd.config.schema.supervised_keys import *
from roll_opd.config.schema.teacher_keys import *
from roll_opd.config.schema.worker_keys import *
