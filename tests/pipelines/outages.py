"""Runs in which a service is down or hangs for a while: a program, not a test.

    python tests/pipelines/outages.py PLACE JSON [--seconds N]

The roles start once, and each run is a complete run in which the service ends (SIGKILL), stops (SIGSTOP), answers with
errors, or loses its name and its connections, and returns later. This begins after the first step, with the first
request, or with the first request of a validation. Each run adds a row to JSON; runs that it contains already are left
out.

The program runs in a mount namespace of its own, whose /etc/hosts has the service's name.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import outage_service
from runs import REPOSITORY, SPREAD, newest_run
from stage import PURE, TEACHER, WITH_REWARD, WITH_TEACHER, Stage, optimizer_of

from roll_opd.base.failures import RunError
from roll_opd.cluster import ray_runtime
from roll_opd.cluster.forkserver.forkserver_start import fork_server
from roll_opd.config.plan import RunPlan, TeacherPlan
from roll_opd.planner.load_plan import load_plan
from roll_opd.teachers.http_teacher import http_scorer
from roll_opd.teachers.scoring import Teacher
from roll_opd.teachers.teacher_registry import TeacherStart
from roll_opd.teachers.views import view_of
from roll_opd.tracking.audit import audit
from roll_opd.tracking.run_directory import read_jsonl

STEPS, PROMPTS, GROUP = 5, 8, 4
SHORT = (
    f"max_steps={STEPS}",
    f"rollout_batch_size={PROMPTS}",
    f"num_return_sequences_in_group={GROUP}",
    "validation=null",
    "eval_steps=0",
    "save_steps=0",
    "teacher_preflight=false",
)
NAME = "service.test"  # of the host
HOSTS = "ROLL_OPD_OUTAGES_HOSTS"  # environment variable: the file that is mounted as /etc/hosts
MARK = "20271"  # ground truth of the rows of validation
VALIDATION = ("eval_steps=2", "+validation={data_args: {file_name: PLACE/val.jsonl}, evaluate_teacher: false}")
CORRECTED = "train_infer_correction={is_weight: {enabled: true}}"  # of rewards
WORKFLOW = """
import asyncio
import json
import os
import urllib.request

from roll_opd.workflows import WORKFLOWS, Experience, Workflow


@WORKFLOWS.register_module("asks_a_service")
class AsksAService(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        (response,) = await self.model.chat_async(json.loads(self.task.raw_task["messages"]))
        truth = self.task.raw_task["ground_truth"]
        body = json.dumps({"samples": [response.response_text], "truth": truth}).encode()
        request = urllib.request.Request("ADDRESS/score", body, {"Content-Type": "application/json"})
        answer = await asyncio.to_thread(urllib.request.urlopen, request, timeout=100)
        response.reward = json.loads(answer.read())["rewards"][0]
        return [response]
"""

REWARD = """
import functools
import json
import urllib.request


@functools.cache
def asked(url, text):
    body = json.dumps({"samples": [text]}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=100).read())["rewards"][0]


class AsksSometimes:
    def __init__(self, url):
        self.url = url

    def score(self, samples):
        texts = [sample.response for sample in samples]
        return [asked(self.url, text) if len(text) % 4 else 0.0 for text in texts]
"""


class Service:
    """A server in another process."""

    def __init__(self, environment: str = "", ends_with: str | None = None) -> None:
        """Start the server; it ends with the first request that contains `ends_with`."""
        self._port = random.randrange(20_000, 30_000)  # not among those that connections get while the service is down
        self.away = 0.0  # seconds of the last outage
        self.url, self._environment = f"http://{NAME}:{self._port}", environment
        self.start(*([] if ends_with is None else [ends_with]))

    def start(self, *ends_with: str) -> None:
        served = ["-m", "roll_opd.extras.games.serve", self._environment, "--port", str(self._port)]
        words = served if self._environment else [outage_service.__file__, str(self._port), *ends_with]
        self._process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            except OSError:
                time.sleep(0.05)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def fail(self, how: str, seconds: float) -> None:
        """Be away for some seconds: `down` or as in `SIGNALS`. A start takes longer."""
        began = time.monotonic()
        if how in outage_service.SIGNALS:
            for number, pause in zip(outage_service.SIGNALS[how], (seconds, 0), strict=True):
                self._process.send_signal(number)
                time.sleep(pause)
        elif how == "without its name":
            set_address("")
            self.end()
            self.start()
            time.sleep(seconds)
            set_address("127.0.0.1")
        else:
            self.end()
            time.sleep(seconds)
            self.start()
        self.away = time.monotonic() - began


def set_address(address: str) -> None:
    """Give the service's name an address; without one, it is unknown."""
    Path(os.environ[HOSTS]).write_text(
        f"127.0.0.1 localhost {socket.gethostname()}\n{address and address + ' ' + NAME}\n"
    )


def settings_of(kind: str, service: Service, place: Path) -> tuple[tuple[str, str], tuple[str, ...]]:
    """Return (configuration, settings) of a run that needs a service."""
    rewards = {
        "reward": f"{{worker_cls: remote, tag_included: [math_rule], url: {service.url}/score, "
        "retry_seconds: SECONDS}",
        "judge": "{worker_cls: llm_judge, tag_included: [math_rule], judge_model_name: judge, judge_api_url: "
        f"{service.url}/v1, retry_seconds: SECONDS}}",
        "own reward": "{worker_cls: outage_rewards.AsksSometimes, tag_included: [math_rule], url: "
        f"{service.url}/score}}",
    }
    name, _, patience = kind.partition(", ")
    if name in rewards:
        section = rewards[name].replace("SECONDS", patience.removeprefix("retries of ").removesuffix(" s") or "300")
        return WITH_REWARD, ("~rewards", f"+rewards={{math_rule: {section}}}", "use_kl_loss=false")
    if name == "teacher":
        return PURE, ("~teacher", f"+teacher={{http: {{url: '{service.url}'}}}}")
    if name == "workflow":
        (place / "plugins").mkdir(exist_ok=True)
        (place / "plugins/asks_a_service.py").write_text(WORKFLOW.replace("ADDRESS", service.url))
        return WITH_REWARD, (
            "~rewards",
            f"plugin_dir={place}/plugins",
            "workflow=asks_a_service",
            "use_kl_loss=false",
            "workflow_workers=1",
        )
    return WITH_REWARD, (
        "~rewards",
        "~num_return_sequences_in_group",
        f"rollout_batch_size={PROMPTS * GROUP}",
        "sequence_length=250",
        "use_kl_loss=false",
        "custom_envs={Game: {env_type: http, max_steps: 3, env_config: {url: '" + service.url + "', timeout: 100}}}",
        f"train_env_manager={{tags: [Game], num_env_groups: {PROMPTS}, group_size: {GROUP}}}",
        "actor_infer.generating_args.num_return_sequences=1",
        "workflow_workers=1",
    )


class Roles(Stage):
    """Student, engines and a Megatron teacher; a run may have a teacher on a server instead."""

    async def workers(self, plan: RunPlan, placement: Any, answers: Path) -> Any:
        self._run_plan, self._answers = plan, answers
        return await super().workers(plan, placement, answers)

    def _teacher(self, plan: TeacherPlan) -> Teacher:
        start = TeacherStart(self._run_plan, plan, lambda _: self._workers.scorers.teachers[0].scorer, self._answers)
        return Teacher(plan, http_scorer(start), view_of(plan, self._run_plan.student.model))


def ahead(config: tuple[str, str], s: int) -> tuple[str, ...]:
    """Return the settings of a run whose samples may be `s` versions old."""
    return (f"async_generation_ratio={s}", *([] if config == PURE else [CORRECTED])) if s else ()


def trained_by(role: str) -> tuple[str, ...]:
    return (*optimizer_of(role), f"{role}.training_args.per_device_train_batch_size={PROMPTS * GROUP}")


@contextmanager
def started(place: Path) -> Iterator[Roles]:
    place.mkdir(parents=True, exist_ok=True)
    lines = (REPOSITORY / "examples/demo/data/val.jsonl").read_text().splitlines()[:16]
    rows = [json.loads(line) | {"ground_truth": MARK} for line in lines]
    (place / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    longest = "prompt_length=1024"  # of the turns of a game
    plan = load_plan(*WITH_TEACHER, [*SHORT, longest, *trained_by("actor_train"), TEACHER], pure=False)
    with fork_server() as server, ray_runtime.ray_cluster(plan.devices_per_node), asyncio.Runner() as runner:
        server.serve(plan)
        yield Roles(plan, place, runner.get_loop())


def run(roles: Roles, kind: str, how: str, seconds: float, s: int, name: str) -> dict[str, Any]:
    """Make a run in which a service is away for some seconds; `how` is a fault, or a fault and its time."""
    fault, _, when = how.partition(", ")
    service = Service("number_sum" if kind == "environment" else "", {FIRST: "", VALIDATING: MARK}.get(when))
    config, settings = settings_of(kind, service, roles.place)
    if when == VALIDATING:
        settings += tuple(setting.replace("PLACE", str(roles.place)) for setting in VALIDATION)
    train = "student_train" if config == PURE else "actor_train"
    failed: list[float] = []

    def fail_after_a_step() -> None:
        while not failed:
            directory = newest_run(roles.place / name)
            rows = read_jsonl(directory / "metrics.jsonl") if (directory / "metrics.jsonl").exists() else []
            if service.has_ended if when else any(row["step"] >= 1 for row in rows):
                failed.append(time.monotonic())
                service.fail(fault, seconds)
            time.sleep(0.02)

    watcher = threading.Thread(target=fail_after_a_step, daemon=True)
    watcher.start()
    began = time.monotonic()
    try:
        made = roles.run(
            *SHORT,
            *trained_by(train),
            *settings,
            *ahead(config, s),
            config=config,
            name=name,
            place=roles.place,
        )
    finally:
        failed.append(0.0)
        watcher.join()
        service.end()
    measured = {"seconds unreachable": round(service.away, 1), "seconds": took(began)}
    return {**cell_of(kind, how, seconds, s), "exit": made.code, **fates(made.path), **measured}


def resumed(kind: str, s: int, place: Path) -> dict[str, Any]:
    """Stop a run by SIGTERM while its service is down, and resume it when the service is back."""
    service, began = Service("number_sum" if kind == "environment" else ""), time.monotonic()
    place.mkdir(parents=True, exist_ok=True)
    config, settings = settings_of(kind, service, place)
    train, spread = ("student_train", SPREAD) if config == PURE else ("actor_train", ())
    written = ["--config_path", config[0], "--config_name", config[1], f"output_dir={place}", "exp_name=resumed"]
    written += [*SHORT, *trained_by(train), *spread, *settings, *ahead(config, s), "save_steps=1"]
    command = [sys.executable, "-m", "roll_opd", "run", *written, "shutdown_timeout_s=2"]
    codes = []
    try:
        for again in ("false", "true"):
            with (place / f"log_{again}").open("w") as log:
                process = subprocess.Popen([*command, f"resume_from_checkpoint={again}"], stdout=log, stderr=log)
                while again == "false" and process.poll() is None:
                    file = newest_run(place / "resumed") / "metrics.jsonl"
                    if file.exists() and any(row["step"] >= 2 for row in read_jsonl(file)):
                        service.end()
                        time.sleep(1)
                        process.send_signal(signal.SIGTERM)
                        process.wait(60)
                        service.start()
                    time.sleep(0.02)
                codes.append(process.wait(200))
    finally:
        service.end()
    path = newest_run(place / "resumed").resolve()
    return {**cell_of(kind, RESUMED, 0, s), "exits": codes, "exit": codes[-1], **fates(path), "seconds": took(began)}


def cell_of(kind: str, how: str, seconds: float, s: int) -> dict[str, Any]:
    return {"kind": kind, "how": how, "seconds away": seconds, "S": s}


def took(began: float) -> float:
    return round(time.monotonic() - began, 1)


def fates(path: Path) -> dict[str, Any]:
    """Return what became of the prompts of a run."""
    counts, problems = audit(path)
    rows = [row for row in read_jsonl(path / "metrics.jsonl") if row["step"]]
    total = {word: sum(row.get(word, 0) for row in rows) for row in rows for word in row if "outage_seconds" in word}
    return {
        "steps": len(rows),
        "trained": counts["trained"],
        "failed": counts["failed"],
        "filtered": counts["filtered"],
        "audit": problems,
        "outage": {word: round(value, 1) for word, value in total.items()},
    }


FIRST, VALIDATING = "first batch", "validation"
RESUMED = "down, stopped and resumed"
KINDS = ("workflow", "environment", "reward", "reward, retries of 0.5 s", "judge", "judge, retries of 0.5 s", "teacher")
KINDS += ("own reward",)  # that stores its answers, and asks for three of four samples
ANSWERED = ("workflow", "reward, retries of 0.5 s", "judge, retries of 0.5 s", "teacher")
EARLY = ("workflow", "reward", "reward, retries of 0.5 s", "judge, retries of 0.5 s", "own reward")
CELLS = [
    *((kind, how, seconds, s) for seconds, how in ((1, "down"), (5, "hangs")) for kind in KINDS for s in (0, 1)),
    *((kind, "down", 15, number % 2) for number, kind in enumerate(KINDS)),
    *((kind, "down", 60, s) for kind, s in (("workflow", 1), ("reward", 0), ("environment", 1), ("teacher", 0))),
    *((kind, "down", 60, s) for kind, s in (("judge, retries of 0.5 s", 0), ("own reward", 1))),
    *((kind, how, 5, s) for s, how in enumerate(("answers 503", "answers with garbage")) for kind in ANSWERED),
    *((kind, f"down, {FIRST}", 15, s) for kind in EARLY for s in (0, 1)),
    *((kind, f"down, {FIRST}", 60, 0) for kind in ("workflow", "judge, retries of 0.5 s")),
    *((kind, f"down, {VALIDATING}", 15, s) for kind in EARLY[:-1] for s in (0, 1)),
    *((kind, "without its name", 15, s) for kind in ("teacher", *EARLY[:-1]) for s in (0, 1)),
    *((kind, "hangs", 30, s) for kind, s in (("environment", 0), ("judge", 1), ("teacher", 1), ("workflow", 0))),
]


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("place", type=Path)
    parser.add_argument("json", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this time")
    parser.add_argument("--resumed", action="store_true", help="stop and resume runs while the service is down")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--how", nargs="*", help="the faults, such as 'down'; the default is all")
    parsed = parser.parse_args()
    users = parsed.place.absolute() / "users"
    users.mkdir(parents=True, exist_ok=True)
    if HOSTS not in os.environ:
        os.environ[HOSTS] = str(users / "hosts")
        set_address("127.0.0.1")
        mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
        os.execvp("unshare", ["unshare", "-m", "sh", "-c", mount, os.environ[HOSTS], sys.executable, *sys.argv])
    parsed.place = parsed.place.absolute()
    parsed.json = parsed.json.absolute()
    os.chdir(REPOSITORY)
    (users / "outage_rewards.py").write_text(REWARD)
    os.environ["PYTHONPATH"] = f"{users}:{os.environ.get('PYTHONPATH', '')}"
    sys.path.insert(0, str(users))
    begun = time.monotonic()
    done = json.loads(parsed.json.read_text()) if parsed.json.exists() else []
    there = {(row["kind"], row["how"], row["seconds away"], row["S"]) for row in done}
    if parsed.resumed:
        for kind in parsed.kinds:
            for s in (0, 1):
                if (kind, RESUMED, 0, s) not in there and time.monotonic() - begun < parsed.seconds:
                    done.append(resumed(kind, s, parsed.place / f"{time.time_ns()}"))
                    print(json.dumps(done[-1]), flush=True)
                    write(parsed.json, done)
        return 0
    wanted = [(number, cell) for number, cell in enumerate(CELLS) if cell not in there and cell[0] in parsed.kinds]
    wanted = [(number, cell) for number, cell in wanted if parsed.how is None or cell[1] in parsed.how]
    if not wanted:
        return 0
    with started(parsed.place / str(time.time_ns())) as roles:
        for number, cell in wanted:
            if time.monotonic() - begun + cell[2] > parsed.seconds:
                continue
            try:
                row = run(roles, *cell, name=f"run{number}")
            except (RunError, AssertionError, OSError) as error:
                row = {**dict(zip(("kind", "how", "seconds away", "S"), cell, strict=True)), "error": str(error)}
            done.append(row)
            print(json.dumps(row), flush=True)
            write(parsed.json, done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
