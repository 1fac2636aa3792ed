"""Words and sections of other tools are refused with the keys that have their meaning here."""

import re
from collections.abc import Callable
from typing import Any

from roll_opd.config.schema import Reward, Section, TeacherWorker, Top, Validation, Worker
from roll_opd.extras.other_tools.words import NOTHING, WORDS
from roll_opd.planner.unknown_keys import _tree

Problems = Callable[..., list[str]]
ROLES: dict[str, type[Section]] = {"{role}": Worker, "{train}": Worker, "{infer}": Worker, "teacher": TeacherWorker}


def test_every_answer_names_keys_that_exist() -> None:
    places = {
        ".".join((*place, key))
        for name, section in {**ROLES, "": Top, "validation": Validation, "rewards.<domain>": Reward}.items()
        for place, keys in _tree(section, (name,) if name else ()).items()
        for key in keys
    }
    for word, answer in WORDS.items():
        first = re.match(r"[\w.{}<>]+", answer)
        assert first and (answer.startswith(NOTHING) or any(first[0].startswith(place) for place in places)), word


def test_words_and_sections_of_other_tools_are_refused_in_files_and_overrides(
    problems: Problems, values: dict[str, Any]
) -> None:
    expected = {
        "peft_config.r": "student_train.model_args.lora_rank",
        "actor_rollout_ref.rollout.n": "num_return_sequences_in_group",
        "trainer.total_epochs": "max_steps",
        "data.train_files": "student_train.data_args.file_name",
        "algorithm.adv_estimator": "use adv_estimator",
        "a.b.c.lr": "student_train.training_args.learning_rate",
        "unheard.of": "docs/configuration.md",
        "max_prompt_length": "use prompt_length",
        "report_to": "track_with",
        "lr": "student_train.training_args.learning_rate",
    }
    for key, answer in expected.items():
        top = key.partition(".")[0]
        (of_override,) = problems(overrides=(f"{key}=1",))
        nested: Any = 1
        for part in reversed(key.split(".")[1:]):
            nested = {part: nested}
        (of_file,) = problems({top: nested})
        for text, place in ((of_override, "command line"), (of_file, "run.yaml:")):
            assert text.startswith(f"{top}: unknown") and answer in text and place in text, text
        values.pop(top)
    (of_role,) = problems(overrides=("teacher.model_args.torch_dtype=bfloat16",))
    assert "use teacher.model_args.dtype" in of_role
