"""Run directories of random legal histories, written with the writers of a run.

A history has several starts: a new run, resumes from a checkpoint with the same or other settings, or the checkpoint of
another run. Each start may be killed at any write. The order of groups is that of `GroupWindow`.
"""

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from roll_opd.data.prompt_source import epoch_order
from roll_opd.rollout.staleness import GroupWindow, Pace
from roll_opd.tracking.ledger import FATES, Ledger
from roll_opd.tracking.run_directory import (
    LEDGER,
    METRICS,
    PROMPTS,
    RUN_FACTS,
    SAMPLES,
    STEP_FILES,
    RunDirectory,
    checkpoints_of,
    checksum,
    write_atomic,
)
from roll_opd.tracking.summary import write_summary

TEACHED = ("async_generation_ratio", "async_depth", "max_steps", "num_return_sequences_in_group")
CHANGED = (*TEACHED, "rollout_batch_size")


@dataclass(frozen=True)
class Settings:
    groups: int = 2
    samples: int = 2
    bound: int = 0
    depth: int | None = None
    steps: int = 5
    size: int = 20
    rejected: float = 0.2  # share of the groups that are filtered or have failed
    logged: int = 100
    save: int = 2
    demonstrations: int = 0
    supervised: bool = False
    writes_metrics_late: bool = False  # validation on reserved engines

    def config(self, resume: Any) -> dict[str, Any]:
        values = {
            "async_generation_ratio": self.bound,
            "async_depth": self.depth,
            "max_steps": self.steps,
            "num_return_sequences_in_group": self.samples,
            "rollout_batch_size": self.groups,
            "seed": 7,
            "resume_from_checkpoint": resume,
            "validation_engines": int(self.writes_metrics_late),
        }
        return {key: value for key, value in values.items() if value is not None and (value or key != CHANGED[0])}


class Killed(Exception):
    """The run was killed after a write."""


@dataclass
class Source:
    """The prompt source: its position, and later draws that are done."""

    done: set[int] = field(default_factory=set)

    @property
    def position(self) -> int:
        return next(draw for draw in range(len(self.done) + 1) if draw not in self.done)

    def state(self, settings: Settings) -> dict[str, Any]:
        later = sorted(draw for draw in self.done if draw > self.position)
        stream = {"name": "all", "weight": 1.0, "tags": None, "taken": self.position}
        files = [{"name": "rows.jsonl", "prompts": settings.size, "digest": "d"}]
        return {"seed": 7, "files": files, "streams": [stream]} | ({"passed": later} if later else {})


class Recorded:
    """One start of a run: it writes into the directory until its end, or until it is killed."""

    def __init__(self, run: RunDirectory, settings: Settings, rng: random.Random, kill_after: int | None) -> None:
        self.run, self.settings, self.rng, self._left = run, settings, rng, kill_after
        self.ledger = Ledger(run)

    def append(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Write rows as a run does. The kill leaves a part of them."""
        if self._left == 0:
            text = "".join(json.dumps(row) + "\n" for row in rows).encode()
            with (self.run.path / name).open("ab") as file:
                file.write(text[: self.rng.randrange(len(text) + 1)])
            raise Killed
        self._left = None if self._left is None else self._left - 1
        self.run.append_jsonl(name, rows)

    def append_to_ledger(self, *row: Any) -> None:
        before = (self.run.path / LEDGER).stat().st_size if (self.run.path / LEDGER).exists() else 0
        self.ledger.append(*row)
        if self._left == 0:
            data = (self.run.path / LEDGER).read_bytes()
            (self.run.path / LEDGER).write_bytes(data[: self.rng.randrange(before, len(data) + 1)])
            raise Killed
        self._left = None if self._left is None else self._left - 1


def name_of(draw: int, settings: Settings) -> str:
    epoch, place = divmod(draw, settings.size)
    return f"row-{epoch_order(7, epoch, 0, settings.size)[place]}"


def train(record: Recorded, source: Source, done_steps: int) -> None:
    """Train from the step after `done_steps` to the last step."""
    settings, rng = record.settings, record.rng
    pace = Pace.of(settings.groups, settings.bound, settings.depth)
    window = GroupWindow(pace, done_steps, settings.steps)
    drawn, passed_over = source.position, {draw for draw in source.done if draw > source.position}
    draw_of: dict[int, int] = {}
    versions: dict[int, list[int]] = {}
    fate: dict[int, str] = {}
    kept: list[dict[str, Any]] = []
    for version in range(done_steps, settings.steps):
        window.publish(version)
        while (numbers := window.take()) is None:
            while drawn in passed_over or window.room:
                number = window.pass_over() if drawn in passed_over else window.admit(1)[0]
                if drawn not in passed_over:
                    draw_of[number], versions[number] = drawn, [window.version, version]
                drawn += 1
            number = rng.choice([n for n in draw_of if n not in fate])
            fate[number] = rng.choice(FATES[1:]) if rng.random() < settings.rejected else "trained"
            versions[number][1] = version if pace.ahead else versions[number][0]
            window.decide(number, passed=fate[number] == "trained")
        # groups that run ahead end while the learner updates; they have the weights of `version`
        for number in [n for n in draw_of if n not in fate and rng.random() < 0.5]:
            fate[number], versions[number][1] = "trained", version
            window.decide(number, passed=True)
        fates: dict[str, list[int]] = {"trained": [draw_of[n] for n in numbers], "filtered": [], "failed": []}
        for number in sorted(n for n in fate if n <= numbers[-1] and n in draw_of and fate[n] != "trained"):
            fates[fate[number]].append(draw_of[number])
            del draw_of[number]
        pairs = [versions[number] for number in numbers]
        for number in numbers:
            del draw_of[number]
        source.done.update(draw for draws in fates.values() for draw in draws)
        step(record, source, version + 1, fates, pairs, kept)


def step(
    record: Recorded,
    source: Source,
    number: int,
    fates: dict[str, list[int]],
    pairs: list[list[int]],
    kept: list[dict[str, Any]],
) -> None:
    """Write the records of a step and its checkpoint, in the order of a run."""
    settings, rng = record.settings, record.rng
    names = {fate: [name_of(draw, settings) for draw in draws] for fate, draws in fates.items()}
    samples = []
    for place, (draw, name) in enumerate(zip(fates["trained"], names["trained"], strict=True)):
        for run in range(settings.samples):
            length = rng.randint(1, 4)
            spans = [[number - 1, length]]
            if pairs:
                oldest, newest = pairs[place]
                spans = [[oldest, 1], [None, 1], [newest, length]] if run == 0 else [[newest, length]]
            mask = [version is not None for version, count in spans for _ in range(count)]
            samples.append(
                {
                    "step": number,
                    "id": f"{name}#{draw}/{run}",
                    "group_id": f"{name}#{draw}",
                    "demonstration": False,
                    "versions": spans,
                    "tokens": [1] * (3 + len(mask)),
                    "action_mask": mask,
                }
            )
    sampled = sum(map(sum, (sample["action_mask"] for sample in samples)))
    for row in range(settings.demonstrations):
        more = {"group_id": f"d#demonstration{row}", "demonstration": True, "versions": []}
        samples.append({"step": number, "id": "d", **more, "tokens": [1, 1], "action_mask": [True]})
    stride = max(1, len(samples) // max(1, settings.logged))
    metrics: dict[str, Any] = {
        "step": number,
        "data/epoch": source.position / settings.size,
        "tokens/step": float(sum(len(sample["tokens"]) for sample in samples)),
        "tokens/learned": float(sampled),
        "time/step": rng.random(),
        "opd/reverse_kl/mean": rng.choice([rng.random(), float("nan")]),
    }
    if not settings.supervised:
        metrics["rollout/generated_tokens"] = float(sampled + 9 * len(fates["filtered"] + fates["failed"]))
        metrics["rollout/filtered_prompts"] = float(len(fates["filtered"]))
        if fates["failed"]:
            metrics["rollout/failed_prompts"] = float(len(fates["failed"]))
        if settings.bound:
            metrics["rollout/async/age_max"] = float(max(number - 1 - oldest for oldest, _ in pairs))
        record.append(SAMPLES, samples[::stride][: settings.logged])
        record.append_to_ledger(
            number, fates["trained"], fates["filtered"], pairs, *(fates[fate] for fate in FATES[2:])
        )
    ids: dict[str, Any] = {"step": number, "ids": names["trained"]}
    if not settings.supervised:
        ids |= {"filtered": names["filtered"]} | ({"failed": names["failed"]} if names["failed"] else {})
    record.append(PROMPTS, [ids])
    is_saved = number % settings.save == 0 or number == settings.steps
    kept.append(metrics)
    if is_saved or not settings.writes_metrics_late or rng.random() < 0.3:
        for row in kept:
            record.append(METRICS, [row])
        kept.clear()
    if is_saved:
        checkpoint = record.run.checkpoint(number)
        checkpoint.mkdir(parents=True, exist_ok=True)
        parts = [{"first": 1, "last": number, "settings": None}]
        state = {"step": number, "source": source.state(settings), "parts": parts}
        (checkpoint / "run_state.json").write_text(json.dumps(state))


def start(
    rng: random.Random,
    run: RunDirectory,
    settings: Settings,
    parts: list[dict[str, Any]],
    after: int,
    source: Source,
    *,
    is_killed: bool | None = None,
) -> bool:
    """Start a run after the step `after`; return whether it reached its end. `is_killed`: None is chance."""
    is_killed = rng.random() < 0.6 if is_killed is None else is_killed
    config = yaml.safe_dump(settings.config(bool(after)))
    run.write_config(config)
    if after and rng.random() < 0.1:  # killed before it writes run.json
        return False
    facts = {
        "id": run.id,
        "config_checksum": checksum(config),
        "started": f"{rng.random()}",
        "pipeline": "rlvr",
        "parts": parts,
    }
    write_atomic(run.path / RUN_FACTS, json.dumps(facts))
    writes = 4 * max(0, settings.steps - after) + 2
    record = Recorded(run, settings, rng, rng.randrange(writes) if is_killed else None)
    try:
        if not after:
            record.append(METRICS, [{"step": 0, "time/startup": 1.0}])
        train(record, source, after)
    except Killed:
        return False
    ledger = record.ledger
    rows = {"rows": ledger.rows, "checksum": ledger.checksum} if ledger.rows else None
    write_summary(run, seed=7, ledger=rows)
    return True


def legal_run(place: Path, rng: random.Random) -> list[Path]:
    """Write a random history; return the directories of its runs."""
    settings = Settings(
        groups=rng.randint(1, 4),
        samples=rng.randint(1, 3),
        bound=rng.choice((0, 0, 1, 2, 4)),
        steps=rng.randint(1, 7),
        size=rng.choice((3, 11, 40)),
        rejected=rng.choice((0, 0, 0.3, 0.6)),
        logged=rng.choice((0, 2, 100)),
        save=rng.choice((1, 2, 100)),
        demonstrations=rng.choice((0, 0, 2)),
        supervised=rng.random() < 0.1,
        writes_metrics_late=rng.random() < 0.2,
    )
    if settings.supervised:
        settings = replace(settings, bound=0, rejected=0)
    run, source, after = RunDirectory.create(place, "demo"), Source(), 0
    parts: list[dict[str, Any]] = [{"first": 1, "last": None, "changed": {}}]
    paths, settings_of = [run.path], {1: settings}  # first step of a part -> its settings
    start(rng, run, settings, parts, after, source)
    for _ in range(rng.choice((0, 0, 1, 2))):
        saved = list(checkpoints_of(run.path))
        if not saved:
            break
        after = rng.choice((saved[0], rng.choice(saved)))
        state = json.loads((run.checkpoint(after) / "run_state.json").read_text())["source"]
        source = Source({*range(state["streams"][0]["taken"]), *state.get("passed", ())})
        known = [part for part in parts if part["first"] <= after]
        parts, earlier = [*known[:-1], {**known[-1], "last": None}], settings_of[known[-1]["first"]]
        if rng.random() < 0.5 and not settings.supervised:
            new = replace(
                settings,
                bound=rng.choice((0, 1, 2, 4)),
                depth=rng.choice((None, None, 1)),
                groups=rng.randint(1, 4),
                steps=after + rng.randint(0, 4),
            )
            new = replace(new, depth=None) if (new.depth or 0) > new.bound else new
            before, now = ({**dict.fromkeys(CHANGED), **each.config(True)} for each in (earlier, new))
            before[CHANGED[0]], now[CHANGED[0]] = earlier.bound, new.bound
            changed = {key: [before[key], now[key]] for key in CHANGED if before[key] != now[key]}
            if changed:
                added = {"first": after + 1, "last": None, "changed": changed}
                parts = [*known[:-1], {**known[-1], "last": after}, added]
            settings = settings_of[parts[-1]["first"]] = new
        else:
            settings = earlier
        if rng.random() < 0.3:
            run = RunDirectory.create(place, "fork")
            paths.append(run.path)
        else:
            logs = {name: (run.path / name).read_bytes() for name in STEP_FILES if (run.path / name).exists()}
            run = RunDirectory.resume(run.path, after)
            if rng.random() < 0.1:  # killed before it has truncated all logs
                for name in list(logs)[rng.randrange(len(logs)) :]:
                    (run.path / name).write_bytes(logs[name])
                break
        start(rng, run, settings, parts, after, source)
    return paths
