"""Plans of teachers behind a server: the source, and settings that a server cannot support."""

from pathlib import Path

import pytest

from roll_opd.base.failures import ConfigError
from roll_opd.commands.describe import to_json
from roll_opd.commands.plan_text import to_text
from roll_opd.config.plan import HttpPlan, RunPlan
from roll_opd.planner.load_plan import load_plan

URL = "http://teacher.example:8000/v1"


def planned(*overrides: str, server: str = "vllm", url: str = URL) -> RunPlan:
    section = f"+teacher={{http: {{url: '{url}', server: {server}}}}}"
    return load_plan("demo", "onpolicy_distill", ["~teacher", section, *overrides], pure=True, runnable=False)


def test_a_teacher_behind_a_server_takes_no_device_and_is_shown_with_its_address() -> None:
    plan = planned()
    (teacher,) = plan.teachers
    assert teacher.source == HttpPlan(url=(URL,), name="teacher")
    assert teacher.role is None and teacher.model is None and list(plan.megatron_roles()) == ["student_train"]
    assert to_json(plan)["roles"]["teacher"]["http"]["url"] == [URL] and URL in to_text(plan)


def test_the_directory_of_a_teachers_tokenizer_needs_no_weights(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path("examples/demo/models/teacher") / name).read_bytes())
    source = planned(f"+teacher.model_args.model_name_or_path={tmp_path}").teachers[0].source
    assert isinstance(source, HttpPlan) and source.tokenizer == str(tmp_path) and source.vocab_size


@pytest.mark.parametrize(
    ("server", "overrides", "reason"),
    [
        ("vllm", ["++student_infer.generating_args.temperature=0.7"], "at temperature 1"),
        ("openai", ["++student_infer.generating_args.temperature=0.7"], "at temperature 1"),
        ("sglang", ["++student_infer.generating_args.temperature=0.7"], "at temperature 1"),
        ("sglang", ["++opd_objective=full"], "hidden states"),
        ("openai", ["++opd_objective=topk"], "no token ids"),
        ("vllm", ["+teacher.follows_student={}"], "does not get the student's weights"),
    ],
)
def test_what_a_server_cannot_compute_is_refused_with_the_reason(
    server: str, overrides: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        planned(*overrides, server=server)


def test_a_path_of_tinkers_weights_is_a_model_and_no_address() -> None:
    with pytest.raises(ConfigError, match="write it in model_name, server: tinker"):
        planned(url="tinker://run/sampler_weights/final")
    with pytest.raises(ConfigError, match="base model, or a path tinker://"):
        planned(server="tinker")
    (teacher,) = planned("+teacher.http.model_name=tinker://run/sampler_weights/final", server="tinker").teachers
    assert isinstance(teacher.source, HttpPlan) and teacher.source.server == "tinker"


@pytest.mark.parametrize("url", ["", "teacher:8000", "http://user:word@host:1", "http://host:1?key=word"])
def test_an_address_with_a_secret_or_without_a_host_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(url=url)
    assert "teacher.http.url" in str(refused.value) and "word" not in str(refused.value).replace("password", "")
