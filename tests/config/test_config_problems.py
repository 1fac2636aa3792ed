"""Messages about invalid configurations: the key, the value, the remedy, file and line."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from config_assets import VOCABULARY, set_key, write_config, write_model, write_tokenizer

from roll_opd.base.failures import ConfigError
from roll_opd.config.compose import LoadedConfig, load_config
from roll_opd.config.schema import Top
from roll_opd.models.model_info import read_model
from roll_opd.planner import check_files
from roll_opd.planner.load_plan import plan_config
from tests.cover import tiered

Problems = Callable[..., list[str]]
MEGATRON = "strategy_args.strategy_config"

# changes to the working configuration -> parts of the one sentence they cause
ONE_PROBLEM: list[tuple[dict[str, Any], list[str]]] = [
    ({"max_stepz": 3}, ["max_stepz: unknown key", "'max_steps'", "(run.yaml:"]),
    ({"student_trian": {}}, ["student_trian: unknown key", "'student_train'"]),
    (
        {"student_train.model_args.dtypes": "fp32"},
        ["student_train.model_args.dtypes: unknown key", "'dtype'"],
    ),
    ({"teacher.divice_mapping": "[0]"}, ["teacher.divice_mapping: unknown key", "'device_mapping'"]),
    ({"rewards.math_rule.tag_includet": ["a"]}, ["tag_includet: unknown key", "'tag_included'"]),
    ({f"teacher.{MEGATRON}.tensor_parallel_size": 2}, ["unknown key", "'tensor_model_parallel_size'"]),
    ({f"teacher.{MEGATRON}.calculate_per_token_loss": False}, ["calculate_per_token_loss: is set by"]),
    (
        {"student_infer.strategy_args.strategy_config.gpu_memory_utilizatoin": 0.5},
        ["unknown engine argument of vLLM", "'gpu_memory_utilization'"],
    ),
    ({f"teacher.{MEGATRON}.num_layers": 2}, ["num_layers: is set by the model's config.json"]),
    ({"max_steps": "many"}, ["max_steps: should be a valid integer", '"many"', "(run.yaml:"]),
    ({"max_steps": 0}, ["max_steps: should be greater than or equal to 1"]),
    ({"save_steps": True}, ["save_steps: should be a valid integer"]),
    (
        {"student_train.training_args.learning_rate": "fast"},
        ["learning_rate: should be a valid number", '"fast"'],
    ),
    (
        {"student_train.model_args.dtype": "float32"},
        ["dtype: should be 'fp32', 'bf16' or 'fp16'", '"float32"'],
    ),
    ({"student_train.model_args": "x"}, ["student_train.model_args: should be", "object"]),
    ({"loss_agg_mode": "mean"}, ["loss_agg_mode: should be 'token-mean'"]),
    ({"teacher": ...}, ["teacher: is missing"]),
    ({"student_infer": ...}, ["student_infer: is missing"]),
    (
        {"teacher.model_args.model_name_or_path": ...},
        ["teacher.model_args.model_name_or_path: is missing", "needs the path of a model"],
    ),
    (
        {"teacher.model_args.model_name_or_path": "no/such"},
        ["teacher.", "no/such is neither a path", "(run.yaml:"],
    ),
    (
        {"teacher.strategy_args.strategy_name": "vllm"},
        ["strategy_name: 'vllm' cannot do", "'megatron_infer'"],
    ),
    ({"teacher.device_mapping": "list(range(0,3)"}, ["teacher.device_mapping: ", "cannot be read"]),
    ({"teacher.device_mapping": [2, 2]}, ["device 2 is listed twice"]),
    ({"teacher.device_mapping": [3, 4], "num_nodes": 1}, ["device 4 does not exist", "devices 0 to 3"]),
    ({"teacher.device_mapping": [2]}, ["teacher.device_mapping: 1 devices hold no whole copies", "tp 2"]),
    ({"response_length": 4096}, ["4096 new tokens is more than the positions of student (128) and teacher (128)"]),
    ({"sequence_length": 70}, ["sequence_length: 70 is less than prompt_length 32 + 48"]),
    ({"rollout_batch_size": 9}, ["9 prompts x 2 responses = 18 sequences", "student_train's mini-batch of 16"]),
    ({"student_infer.generating_args.temperature": 0}, ["temperature: 0 does not sample"]),
    (
        {"student_infer.generating_args.num_return_sequences": 3},
        ["3 contradicts num_return_sequences_in_group 2"],
    ),
    ({"student_train.data_args.file_name": "no.jsonl"}, ["file_name: no file 'no.jsonl'"]),
    ({"student_train.data_args": ...}, ["student_train.data_args.file_name: is missing"]),
    ({"global_template": "qwen9"}, ["global_template: 'qwen9' is not a known template"]),
    ({"track_with": "ml_tracker"}, ["track_with: 'ml_tracker' is not available here; use one or more of mlflow"]),
    ({"track_with": "no_such_package.Tracker"}, ["no_such_package.Tracker needs no_such_package", "PYTHONPATH"]),
    ({"tracker_kwargs": {"logdir": "x"}}, ["tracker_kwargs.logdir: unknown argument of tracker", "'log_dir'"]),
    (
        {"track_with": "wandb", "tracker_kwargs": {"projct": "x"}},
        ["tracker_kwargs.projct: unknown argument of tracker wandb", "'project'", "(run.yaml:"],
    ),
    (
        {"track_with": ["wandb", "mlflow"], "tracker_kwargs": {"tags": ["x"]}},
        [
            "tracker_kwargs: with several trackers, each has a section",
            "wandb, mlflow",
        ],
    ),
    (
        {"track_with": ["wandb", "mlflow"], "tracker_kwargs": {"mlflow": {"tracking_url": "x"}}},
        ["tracker_kwargs.mlflow.tracking_url: unknown argument of tracker mlflow", "'tracking_uri'"],
    ),
    (
        {"track_with": "wandb", "tracker_kwargs": {"mode": "of"}},
        ["tracker_kwargs.mode: should be 'online', 'offline' or 'disabled', got 'of'"],
    ),
    ({"tracker_kwargs": {"tensorboard": 3}}, ["tracker_kwargs.tensorboard: expected the arguments", "got 3"]),
    ({"track_with": ["tensorbord"]}, ["'tensorbord' is not a known tracker"]),
    ({"resume_from_checkpoint": "no/such"}, ["resume_from_checkpoint: 'no/such' is not a directory"]),
    ({"rewards.math_rule.worker_cls": "mathrule"}, ["no reward worker 'mathrule'", "math_rule"]),
    (
        {"rewards.code.worker_cls": "roll_opd.extras.graders.rewards.multiple_choice.MultipleChoice"},
        ["rewards.code.tag_included: every tag", "rewards.math_rule"],
    ),
    ({"use_opd": True, "is_pure_opd": True}, ["use_opd", "exclude each other"]),
    ({"use_opd": True}, ["use_opd", "start it with examples/start_rlvr_pipeline.py"]),
    (
        {f"student_train.{MEGATRON}.bf16": True},
        ["bf16: true contradicts student_train.model_args.dtype fp32"],
    ),
    (
        {f"student_train.{MEGATRON}.virtual_pipeline_model_parallel_size": 2},
        ["needs pipeline_model_parallel_size"],
    ),
    ({f"teacher.{MEGATRON}.expert_model_parallel_size": 2}, ["dense model without experts"]),
    (
        {"student_train.use_dynamic_batching_in_train": True},
        ["max_tokens_per_microbatch_in_train: is missing"],
    ),
    ({"teacher.tag_included": ["code"]}, ["teacher: no teacher accepts tag 'math'"]),
    ({f"student_infer.{MEGATRON}.max_model_len": 32}, ["32 leaves no token for a response after a prompt of 32"]),
    ({f"student_infer.{MEGATRON}.max_model_len": 129}, ["129 is more than the model's 128 positions"]),
    ({f"student_infer.{MEGATRON}.seed": 1}, ["seed: is set by the run"]),
    ({f"student_infer.{MEGATRON}.pipeline_parallel_size": 2}, ["pipeline_parallel_size: only 1"]),
    (
        {"student_infer.model_args.model_name_or_path": "${teacher.model_args.model_name_or_path}"},
        ["is not the model"],
    ),
    ({"exp_name": "a/b"}, ["exp_name: 'a/b' cannot name a directory"]),
    ({"validation.data_args.file_name": "no.jsonl"}, ["validation.data_args.file_name: no file"]),
    ({"exp_name": "${no_such_key}"}, ["exp_name: ", "no_such_key"]),
    ({"exp_name": "???"}, ["exp_name: ", "has no value yet (???)"]),
    ({"actor_train": {}}, ["actor_train: pure distillation names this role 'student_train'"]),
]


@pytest.mark.parametrize(("changes", "parts"), ONE_PROBLEM, ids=lambda value: "-".join(value)[:60])
def test_one_problem_one_sentence(problems: Problems, changes: dict[str, Any], parts: list[str]) -> None:
    found = problems(changes)
    assert len(found) == 1, found
    for part in parts:
        assert part in found[0]


def test_all_problems_come_together_with_their_places(problems: Problems) -> None:
    found = problems(
        {
            "max_stepz": 3,
            "num_nodes": 1,
            "teacher.device_mapping": [3, 9],
            "rollout_batch_size": 9,
            "track_with": "wandbb",
        },
        overrides=("student_train.training_args.lerning_rate=1",),
    )
    assert len(found) == 5
    assert all("(run.yaml:" in text or "(command line)" in text for text in found)
    assert sum("(command line)" in text for text in found) == 1
    numbered = str(ConfigError(found))
    assert numbered.startswith("the configuration has 5 problems:\n  1. ")


def test_line_numbers_are_right(problems: Problems, root: Path) -> None:
    text = problems({"teacher.device_mapping": [3, 9], "num_nodes": 1})[0]
    line = int(text.rpartition(":")[2].rstrip(")"))
    assert "device_mapping:" in (root / "config" / "run.yaml").read_text().splitlines()[line - 1]


def test_a_wrong_section_does_not_hide_the_others(problems: Problems) -> None:
    found = problems({"student_train.infer_batch_size": "a", f"teacher.{MEGATRON}.tensor_model_parallel_size": 4})
    assert any("student_train.infer_batch_size" in text for text in found)
    assert any("teacher.device_mapping: 2 devices hold no" in text for text in found)


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            {"tensor_model_parallel_size": 2},
            "3 attention heads",
        ),
        ({"num_key_value_heads": 1}, {"tensor_model_parallel_size": 2}, "2 exceeds the number of key/value heads"),
        ({"intermediate_size": 33}, {"tensor_model_parallel_size": 2}, "MLP width of teacher (33)"),
        (
            {"num_hidden_layers": 1},
            {"pipeline_model_parallel_size": 2},
            "teacher has only 1 layers for 2 pipeline stages",
        ),
        (
            {"num_hidden_layers": 3},
            {"pipeline_model_parallel_size": 2},
            "3 layers of teacher are not divisible",
        ),
        (
            {"num_hidden_layers": 6},
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "not divisible by 4 stages",
        ),
        (
            {"num_experts": 3},
            {"expert_model_parallel_size": 2},
            "3 experts of teacher are not divisible by 2",
        ),
        ({"model_type": "gpt9"}, {}, "model_type 'gpt9', which is not supported; supported: deepseek_v2"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, {}, "vision-language model"),
        ({"vocab_size": 4}, {}, "uses token id 7, but the model has only 4"),
        ({"hidden_size": None}, {}, "config.json lacks 'hidden_size'"),
        ({"rope_parameters": [1]}, {}, "rope_parameters in config.json should be an object, got [1]"),
        ({"hidden_size": "16"}, {}, "hidden_size in config.json should be an integer, got '16'"),
        ({"max_position_embeddings": 64}, {}, "more than the positions of teacher (64)"),
        (
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64},
            {},
            "teacher (64); lower it (original_max_position_embeddings in",
        ),
    ],
)
def test_teacher_that_does_not_fit(
    problems: Problems, root: Path, config: dict[str, Any], layout: dict[str, int], message: str
) -> None:
    write_model(root / "teacher", seed=2, **config)
    found = problems({f"teacher.{MEGATRON}": layout})
    assert any(message in text for text in found), found


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "is not valid JSON"),
        (lambda path: (path / "model.safetensors").unlink(), "no weights"),
        (lambda path: (path / "model.safetensors").write_bytes(b"short"), "not a safetensors file"),
        (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), ".bin form only"),
        (lambda path: (path / "tokenizer.json").unlink(), "no tokenizer files"),
        (lambda path: (path / "tokenizer.json").write_text('{"added_tokens": [3]}'), "has an unknown format"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]"), "damaged header"),
        (lambda path: _cut(path / "model.safetensors"), "is truncated"),
        (
            lambda path: (
                (path / "model.safetensors").unlink(),
                (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}'),
            ),
            "weight file x.safetensors of the index is missing",
        ),
    ],
)
def test_damaged_teacher(problems: Problems, root: Path, damage: Callable[[Path], Any], message: str) -> None:
    write_model(root / "teacher", seed=2)
    damage(root / "teacher")
    found = problems()
    assert len(found) == 1
    assert message in found[0]


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"end": "<|stop|>"},
            "1 of the student's 8 token ids differ; the first is id 4: '<|end|>' in the student, '<|stop|>' in",
        ),
        ({"vocab": {**VOCABULARY, "x": 7, "y": 6}}, "2 of the student's 8 token ids differ; the first is id 6: 'x' in"),
        (
            {"vocab": {token: id for token, id in VOCABULARY.items() if token != "y"}},
            "id 7: 'y' in the student, none in",
        ),
    ],
)
def test_tokens_that_a_teacher_reads_otherwise(
    problems: Problems, plan: Callable[..., Any], root: Path, changes: dict[str, Any], message: str
) -> None:
    write_tokenizer(root / "teacher", **changes)
    found = problems()
    assert len(found) == 1
    assert message in found[0]
    assert "set teacher_tokenizer_check: align" in found[0]
    assert any(message in text for text in plan({"teacher_tokenizer_check": "warn"}).warnings)
    aligned = plan({"teacher_tokenizer_check": "align"})
    assert any(message in text and "aligned by bytes" in text for text in aligned.warnings)
    (teacher,) = aligned.teachers
    assert teacher.tokenizer == str(root / "teacher")
    assert (teacher.context.template, teacher.context.tokenizer) == ("native", teacher.tokenizer)


def test_a_teacher_without_the_chat_template_of_its_prompts_is_refused(
    problems: Problems, plan: Callable[..., Any], root: Path
) -> None:
    write_tokenizer(root / "teacher", end="<|stop|>", chat_template=None)
    row = {"id": "0", "tag": "math", "ground_truth": "1"}
    (root / "train.jsonl").write_text(json.dumps({**row, "prompt": "a"}))
    plan({"teacher_tokenizer_check": "align"})  # plain prompts need no template
    messages = json.dumps([{"role": "user", "content": "a"}])
    (root / "train.jsonl").write_text(json.dumps({**row, "messages": messages}))
    (refused,) = problems()
    assert refused.startswith("teacher.template: template native") and "template: chatml" in refused
    assert plan({"teacher.template": "chatml"}).teachers[0].context.template == "chatml"
    (root / "teacher/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert plan({"teacher.template": ...}).teachers[0].context.template == "native"


def test_tokens_are_aligned_only_where_they_differ_and_only_for_sampled_tokens(
    problems: Problems, plan: Callable[..., Any], root: Path
) -> None:
    align = {"teacher_tokenizer_check": "align"}
    (same,) = plan(align).teachers
    assert same.tokenizer is None and same.context is None
    assert any("opd_chunk_credit: has no effect" in text for text in plan({"opd_chunk_credit": "mean"}).warnings)
    write_tokenizer(root / "teacher", end="<|stop|>")
    for changes in ({"opd_objective": "topk"}, {"opd_objective": "full"}):
        found = problems({**align, **changes})
        assert any("opd_objective" in text and "a different tokenizer;" in text for text in found)


def test_log_probs_of_single_tokens_read_the_teachers_top_k_and_those_of_chunks_do_not(
    problems: Problems, plan: Callable[..., Any], root: Path
) -> None:
    changes = {"teacher_tokenizer_check": "align", "opd_objective": "sampled", "opd_kl_discount": 0.5}
    assert plan(changes).teachers[0].prefix_topk == 0
    write_tokenizer(root / "teacher", end="<|stop|>")
    found = plan()
    assert found.objective.opd_chunk_credit == "prefix"
    assert found.teachers[0].prefix_topk == min(20, read_model(root / "teacher").vocab)
    (refused,) = problems({"opd_chunk_credit": "whole"})
    assert "opd_kl_discount" in refused and "opd_chunk_credit: prefix" in refused
    assert plan({"opd_kl_discount": 0}).teachers[0].prefix_topk == 0


@pytest.mark.parametrize("server", ["vllm", "vllm_tokens", "sglang", "openai"])
def test_a_server_that_returns_texts_has_no_log_probs_of_single_tokens(
    problems: Problems, plan: Callable[..., Any], root: Path, server: str
) -> None:
    write_tokenizer(root / "teacher", end="<|stop|>")
    changes = {"teacher_tokenizer_check": "align", "opd_objective": "sampled", "opd_kl_discount": 0}
    changes["teacher.http"] = {"url": "http://teacher.example:8000/v1", "server": server, "model_name": "large"}
    if server == "openai":
        (refused,) = problems(changes)
        assert "opd_chunk_credit: prefix needs" in refused and "write whole" in refused
        changes["opd_chunk_credit"] = "whole"
    plan(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat_template": "{{ messages }}"}, "the chat templates differ from line 1 on"),
        ({"chat_template": None}, "only the student has a chat template"),
        ({"merges": ["b a"]}, "merge 0 is 'a b' in the student, 'b a' in the teacher"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer differs"),
        ({"eos": "<|pad|>"}, "eos_token is '<|end|>' in the student, '<|pad|>' in the teacher"),
        ({"vocab": {**VOCABULARY, "z": 8}}, "one token id exists only in the teacher; the first is id 8: 'z'"),
    ],
)
def test_tokenizers_that_differ_otherwise(
    plan: Callable[..., Any], root: Path, changes: dict[str, Any], message: str
) -> None:
    """A base student with an instruct teacher: every id that the student writes is the same token to both."""
    write_model(root / "teacher", seed=2, tokenizer=changes, vocab_size=9)
    assert any(message in text for text in plan().warnings)


def test_ends_of_answers_are_compared(plan: Callable[..., Any], root: Path) -> None:
    for name, ids in (("student", 4), ("teacher", [5, 4])):
        (root / name / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert any("an answer ends with id 4 in the student, 4 and 5 in the teacher" in text for text in plan().warnings)


def test_vocabularies_in_two_formats(plan: Callable[..., Any], problems: Problems, root: Path) -> None:
    (root / "teacher/tokenizer.json").unlink()
    (root / "teacher/vocab.json").write_text(json.dumps(VOCABULARY))
    plan()
    (root / "teacher/vocab.json").write_text(json.dumps(VOCABULARY | {"x": 7, "y": 6}))
    assert "id 6: 'x' in the student, 'y' in the teacher" in problems()[0]


def test_tokenizers_written_differently_are_the_same(plan: Callable[..., Any], root: Path) -> None:
    """Merges as pairs, a special token as an object, the template in its own file: same content."""
    write_tokenizer(root / "teacher", merges=[["a", "b"]], eos={"content": "<|end|>", "lstrip": False})
    settings = json.loads((root / "teacher" / "tokenizer_config.json").read_text())
    (root / "teacher" / "chat_template.jinja").write_text(settings.pop("chat_template"))
    (root / "teacher" / "tokenizer_config.json").write_text(json.dumps(settings))
    plan()


@pytest.mark.parametrize("how", ["path", "symlink", "copy"])
def test_a_teacher_with_the_students_weights_needs_permission(
    problems: Problems, plan: Callable[..., Any], root: Path, how: str
) -> None:
    path = root / "student"
    if how == "symlink":
        path = root / "link"
        path.symlink_to(root / "student")
    elif how == "copy":
        path = write_model(root / "copy", seed=1)
    changes = {"teacher.model_args.model_name_or_path": str(path)}
    found = problems(changes)
    assert len(found) == 1
    assert "the teacher has the student's" in found[0]
    assert "allow_self_teacher" in found[0]
    plan({**changes, "allow_self_teacher": True})


@pytest.mark.parametrize(
    ("train", "teacher", "allowed"),
    [
        ([0, 1], [0, 1], True),
        ([0, 1], [2, 3], True),
        ([0], [0, 1], True),
        ([0, 1, 2, 3], [2, 3], True),
        ([0, 1], [1, 2], False),
    ],
)
def test_overlapping_devices(
    plan: Callable[..., Any], problems: Problems, train: list[int], teacher: list[int], allowed: bool
) -> None:
    changes = {
        "student_train.device_mapping": train,
        "student_infer.device_mapping": train,
        "teacher.device_mapping": teacher,
        "rollout_batch_size": 16,
    }
    if allowed:
        plan(changes)
    else:
        assert all("have only 1 in common" in text for text in problems(changes))


JUNK: list[Any] = [3, -1, 0, "x", "", [], [[]], {}, {"a": 1}, True, 1e99, float("nan"), "1e-6", None]


def test_one_mistake_does_not_cause_others(problems: Problems, root: Path) -> None:
    """A wrong value at the top level affects `pretrain`, and a wrong mapping the devices that the teacher shares."""
    changes = {"pretrain": str(root / "student"), "student_train.model_args.model_name_or_path": ..., "max_steps": 0}
    assert len(problems({**changes, "student_infer.model_args.model_name_or_path": ...})) == 1
    (found,) = problems({"max_steps": 1, "teacher.device_mapping": ..., "student_train.device_mapping": "range(x)"})
    assert found.startswith("student_train.device_mapping: ")


PARTS = 11  # shares no divisor with the number of values of junk: each part has every key and every value


@pytest.mark.extras
@pytest.mark.parametrize("part", tiered(range(PARTS), [0]))
def test_junk_never_ends_in_a_traceback(root: Path, values: dict[str, Any], part: int) -> None:
    """Put junk at every key, one at a time: the answer is a plan or a ConfigError, never another exception."""
    del values["hydra"]  # composing takes it out
    values["student_infer"]["generating_args"]["max_new_tokens"] = 48  # nothing resolves ${...} here
    values |= {
        item.name: item.default for item in fields(Top) if item.default is not MISSING and item.name not in values
    }
    values |= {"tracker_kwargs": {}, "reward_normalization": {}, "validation": None}
    values["train_infer_correction"] = {"is_weight": {"enabled": True}, "filters": [{"enabled": True}]}
    outcomes = {True: 0, False: 0}
    for key, junk in list(product(_dotted(values), JUNK))[part::PARTS]:
        changed = json.loads(json.dumps(values))
        set_key(changed, key, junk)
        try:
            plan_config(LoadedConfig("run", root, changed, {}), pure=True)
            outcomes[True] += 1
        except ConfigError as error:
            assert all(error.problems)
            outcomes[False] += 1
    assert min(outcomes.values()) > 100 // PARTS


def _dotted(values: dict[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys.append(prefix + key)
        if isinstance(value, dict):
            keys += _dotted(value, f"{prefix}{key}.")
    return keys


def test_a_disk_without_room_for_a_checkpoint_is_refused(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real disk cannot be filled here; everything but the number of free bytes is real."""
    real = check_files.shutil.disk_usage
    monkeypatch.setattr(check_files.shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    found = problems()
    assert "output_dir: a checkpoint of 9,648 parameters" in found[0]


def test_output_dir_under_a_file(problems: Problems, root: Path) -> None:
    assert "train.jsonl is a file" in problems({"output_dir": str(root / "train.jsonl")})[0]


def test_logging_dir_must_be_a_place_where_a_directory_can_be_made(
    problems: Problems, plan: Callable[..., Any], root: Path
) -> None:
    assert plan().logging_dir is None
    assert plan({"logging_dir": "logs"}).logging_dir == "logs" and not (root / "logs").exists()
    long = {"exp_name": "a" * 250}  # a directory of logs has exp_name and the id of the run in its name
    for changes in ({"logging_dir": str(root / "train.jsonl")}, {"logging_dir": " "}, {"logging_dir": "x", **long}):
        (found,) = problems(changes)
        assert found.startswith("logging_dir: "), found
    plan({"logging_dir": ..., **long})


def test_planning_writes_nothing(plan: Callable[..., Any], root: Path) -> None:
    plan()
    assert not (root / "output").exists()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"rollout_dump_dir": "x", "student_train.worker_cls": "roll.pipeline.rlvr.actor_worker.ActorWorker"},
            ["no effect", "rollout_dump_dir", "of roles: worker_cls"],
        ),
        ({"student_infer.generating_args.top_p": 0.9}, ["top_p 0.9", "the distribution after this change"]),
        ({"student_infer.generating_args.max_new_tokens": 49}, ["49 is not the response length 48", "the smaller"]),
        ({"adv_estimator": "grpo", "gamma": 1}, ["pure distillation fixes", "adv_estimator grpo, gamma 1"]),
        ({"student_infer.strategy_args": {"strategy_name": "sglang"}}, ["'sglang' does not exist", "'vllm'"]),
        (
            {"student_train.strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": {"a": 1}}},
            ["'fsdp2_train' does not exist", "'megatron_train' takes its place", "dropped: a"],
        ),
    ],
)
def test_settings_without_effect_give_one_warning(
    plan: Callable[..., Any], changes: dict[str, Any], parts: list[str]
) -> None:
    warnings = plan(changes).warnings
    assert len(warnings) == 1
    for part in parts:
        assert part in warnings[0]


def test_strict_strategies(problems: Problems) -> None:
    changes = {"student_infer.strategy_args": {"strategy_name": "sglang"}, "strict_strategies": True}
    assert "strict_strategies is true" in problems(changes)[0]


def test_what_cannot_be_run_yet_is_refused_for_a_run_and_planned_with_a_warning(
    problems: Problems, plan: Callable[..., Any]
) -> None:
    changes = {"student_train.model_args.dtype": "fp16", "strict_strategies": True}
    assert "training in fp16 is not available" in problems(changes)[0]
    assert any("training in fp16 is not available" in text for text in plan(changes, runnable=False).warnings)


def test_what_is_trained_in_fp16_is_trained_in_bf16_with_a_warning(plan: Callable[..., Any]) -> None:
    """Frozen models and engines compute in fp16, as configured."""
    changes = {f"{role}.model_args.dtype": "fp16" for role in ("student_train", "student_infer", "teacher")}
    run = plan(changes)
    assert (run.student.model.dtype, run.rollout.model.dtype, run.teachers[0].source.model.dtype) == (
        "bf16",
        "fp16",
        "fp16",
    )
    (reported,) = [text for text in run.warnings if "fp16" in text]
    assert (
        reported.startswith("student_train.model_args.dtype: training in fp16 is not available") and "bf16" in reported
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", "line 2: not valid YAML"),
        ("a: 1\na: 2\n", "duplicate key a"),
        ("- 1\n", "broken.yaml"),
        ("defaults:\n  - no_such_file\n", "no_such_file"),
        ("a: ${b\n", "broken.yaml"),
    ],
)
def test_yaml_and_hydra_errors_are_sentences(root: Path, text: str, message: str) -> None:
    (root / "broken.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(root), "broken", [])
    assert message in str(caught.value)
    assert "\n  2." not in str(caught.value)


def test_wrong_places_and_overrides(root: Path, values: dict[str, Any]) -> None:
    directory = write_config(root, values)
    for arguments, message in [
        ((str(root / "nowhere"), "run", []), "no such directory"),
        ((directory, "other", []), "no other.yaml in"),
        ((directory, "run", ["max_steps"]), "override 'max_steps' cannot be read"),
        ((directory, "run", ["max_steps=1,2"]), "has several values"),
        ((directory, "run", ["~no_such=1"]), "no_such"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config(*arguments)
        assert message in str(caught.value)


def test_command_line_error_is_quick_and_exits_with_2(root: Path, values: dict[str, Any]) -> None:
    set_key(values, "max_stepz", 1)
    command = [sys.executable, "-m", "roll_opd.commands.main", "plan", "--config_path", write_config(root, values)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*command, "--config_name", "run.yaml"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # its own seconds: beside other tests it waits for a core as long again
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 3
    assert done.returncode == 2
    assert "max_stepz: unknown key; did you mean 'max_steps'? (run.yaml:" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
