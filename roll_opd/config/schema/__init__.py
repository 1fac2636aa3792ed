"""Schema of the configuration. Each key is declared once: name, type, range, default, meaning and origin.

A section of the configuration is a frozen dataclass of keys. Pydantic checks types and ranges strictly. The planner
checks rules that combine sections, and rules that need files.

Some values reach the plan unchanged. For these keys, a class in `plan.py` inherits from the class in the schema. To add
such a key, declare it in the schema, and write the code that uses its value.

A pipeline declares its keys as a subclass of `Top` if it has a rollout, or of `Supervised` if its rows have answers.

`docs/configuration.md` is generated from these declarations.
"""

from roll_opd.config.schema.key_types import (
    COLDEST,
    AboveZero,
    Count,
    Dtype,
    Environment,
    Fraction,
    Level,
    Many,
    Name,
    Names,
    NotNegative,
    Number,
    Positive,
    Probabilities,
    RoutingMode,
    Seed,
    Several,
    Temperature,
    Texts,
    Threshold,
)
from roll_opd.config.schema.objective_keys import (
    CriticKeys,
    DistillationKeys,
    ImportanceWeight,
    ObjectiveKeys,
    ReinforcementKeys,
    SampleKeys,
    StepKeys,
    TokenFilter,
    TrainInferCorrection,
)
from roll_opd.config.schema.reward_keys import Filter, Reward, RewardKeys, Term
from roll_opd.config.schema.rollout_keys import (
    Demonstrations,
    RemoteModelKeys,
    RolloutKeys,
    Top,
    Validation,
    WorkflowKeys,
)
from roll_opd.config.schema.run_keys import PIPELINES, ChatKeys, CheckpointKeys, PromptColumns, RowKeys, Run, RunKeys
from roll_opd.config.schema.section import (
    OURS,
    TRINITY,
    Reading,
    Section,
    changed,
    derived,
    key,
    keys_of,
    other_names,
    settle,
    shared,
)
from roll_opd.config.schema.supervised_keys import (
    Dpo,
    EpochArgs,
    HeldOut,
    Sft,
    Supervised,
    SupervisedWorker,
    supervised_pipelines,
)
from roll_opd.config.schema.teacher_file_keys import FileTeacher, OfflineDistill
from roll_opd.config.schema.teacher_keys import (
    ContextKeys,
    ExternalKeys,
    FollowKeys,
    HttpKeys,
    ScorerKeys,
    TeacherWorker,
)
from roll_opd.config.schema.worker_keys import (
    MIXED_ROLES,
    PURE_ROLES,
    DataArgs,
    GeneratingArgs,
    Job,
    ModelArgs,
    OptimizerKeys,
    RouterReplay,
    SamplingKeys,
    SchedulerArgs,
    SequencePackingArgs,
    StrategyArgs,
    TrainingArgs,
    Worker,
)
