"""Write the report page: one HTML file that contains its data, its styles and its scripts.

The Content-Security-Policy of the page forbids all other content. The scripts (`assets/*.js`) insert all text as plain
text, never as HTML. The data is JSON. It is escaped, so that it cannot close its `<script>` element.
"""

import base64
import hashlib
import html
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import roll_opd
from roll_opd.extras.report import samples
from roll_opd.extras.report.curves import averaged
from roll_opd.extras.report.panels import all_metrics, before_after, charts, with_surprise
from roll_opd.extras.report.run_files import RunRecord, find_run, number, read_run
from roll_opd.extras.report.text import limited, rounded, script_json, visible
from roll_opd.tracking.phase_clock import PHASES
from roll_opd.tracking.results_table import changed_settings
from roll_opd.tracking.run_directory import write_atomic
from roll_opd.tracking.summary import summarize

REPORT = "report.html"
SCRIPTS = ("dom.js", "charts.js", "tokens.js", "sections.js")  # the order in the page
TIME_BARS = 120  # maximum ranges in the chart of seconds per step
MAX_WARNINGS, MAX_FACTS, CONFIG_CHARACTERS = 200, 100, 200_000
MAX_SENTENCE = 2000  # maximum characters of a warning or error from the run's files


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the report of a run atomically, and return its file.

    Raises `NoRun` if there is no run at the path, and `OSError` if the file cannot be written.

    Args:
        run: path of the run.
        output: the file to write; None means a file in the run directory.
    """
    run = find_run(run)
    output = output or run / REPORT
    write_atomic(output, page(contents(read_run(run))))
    return output


def page(data: dict[str, Any]) -> str:
    """Return the HTML page for `data`, the result of `contents`."""
    style, script = _asset("style.css"), "\n".join(_asset(name) for name in SCRIPTS)
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(f"{data['title']}: report"),
        "STYLE": style,
        "DATA": script_json(data),
        "SCRIPT": script,
    }
    head, *rest = _asset("page.html").split("{{")
    return head + "".join(parts[name] + text for name, _, text in (part.partition("}}") for part in rest))


def contents(run: RunRecord, now: datetime | None = None) -> dict[str, Any]:
    """Return all data of the page, as JSON types."""
    mode, rows = limited(run.facts.get("mode")), with_surprise(run.metrics)
    shown, pairs = samples.chosen_samples(run.samples), samples.answers_by_prompt(run.answers)
    everyone = shown + [row for group in pairs for row in group]
    limit = samples.fair_limit([samples.length_of(row) for row in everyone])
    steps = run.samples.steps
    tenth = -(-len(steps) // 10)
    return {
        "title": limited(run.config.get("exp_name") or run.path.parent.name),
        "mode": mode,
        "mode_title": limited(run.facts.get("title") or "training"),
        "run": visible(run.path.name),
        "version": roll_opd.__version__,
        "made": (now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        "state": _state(run),
        "problems": [visible(sentence) for sentence in run.problems],
        "figures": _figures(run),
        "table": [_rounded(row) for row in before_after(rows, mode, comparable=not changed_settings(_parts(run)))],
        "charts": charts(rows, mode, of_games=run.facts.get("pipeline") == "agentic"),
        "metrics": all_metrics(rows),
        "time": _time(run),
        "samples": [samples.shaped(row, limit) for row in shown],
        "pairs": [[samples.shaped(row, limit) for row in group] for group in pairs],
        "edges": [edge for edge in samples.EDGES[1:-1]],
        "agreement": [
            found
            for part in (steps[:tenth], steps[-tenth:])
            if part and (found := samples.agreement(run.samples, part))
        ],
        "preflight": (teachers := _preflight(run.preflight)),
        "preflight_first": any(row["verdict"] == "failed" for one in teachers for row in one["rows"]),
        "warnings": _warnings(run),
        "config": visible(run.config_text[:CONFIG_CHARACTERS]),
        "facts": _facts(run),
    }


def _state(run: RunRecord) -> dict[str, str]:
    """Return the state of the run: finished, stopped or open.

    An open run is still in progress, or it was killed.
    """
    total, done = number(run.config.get("max_steps")), run.last_step
    progress = f"{done} of {int(total)} steps" if total and total > 0 else f"{done} steps"
    ended = run.facts.get("ended")
    if run.summary:
        return {"kind": "finished", "text": f"Finished: {progress}."}
    if isinstance(ended, str):
        return {"kind": "stopped", "text": limited(f"Stopped after {progress}: {ended}", MAX_SENTENCE)}
    when = f", the last one written {run.written:%Y-%m-%d %H:%M} UTC" if run.written and run.metrics else ""
    return {"kind": "open", "text": f"Not finished: {progress}{when}. The run is still in progress, or it was killed."}


def _totals(run: RunRecord) -> dict[str, Any]:
    """Return the summary of the run.

    For an unfinished run, the summary is computed from the steps so far.
    """
    return {**summarize(run.metrics), **run.summary}


def _figures(run: RunRecord) -> dict[str, float]:
    """Return the number of steps, the number of generated tokens and the wall time.

    The final table on the console has the same figures.
    """
    totals = _totals(run)
    found = {name: number(totals.get(name)) or 0.0 for name in ("steps", "generated_tokens", "wall_seconds")}
    return {
        "steps": int(found["steps"]),
        "tokens": rounded(found["generated_tokens"], 12),
        "seconds": rounded(found["wall_seconds"], 9),
    }


def _time(run: RunRecord) -> dict[str, Any]:
    """Return the seconds of the run, and the seconds of its steps.

    The seconds of the run are split into start-up, phases and end. The seconds per step are means over ranges of steps.
    """
    totals = _totals(run)
    given = totals["phase_seconds"] if isinstance(totals["phase_seconds"], dict) else {}
    total = {name: seconds for name, value in given.items() if (seconds := number(value)) and seconds > 0}
    order = {name: place for place, name in enumerate(PHASES)}
    phases = sorted(total, key=lambda name: (order.get(name, len(order)), name))
    startup, wall = (number(totals[name]) or 0.0 for name in ("startup_seconds", "wall_seconds"))
    rows = [row for row in run.metrics if row["step"] > 0]
    bars = averaged(rows, [f"time/{name}" for name in phases], TIME_BARS)
    return {
        "startup": rounded(startup, 6),
        "end": rounded(max(0.0, wall - startup - sum(total.values())), 6),
        "phases": [visible(name) for name in phases],
        "kinds": [order.get(name, len(order)) for name in phases],  # colours, the same in all reports
        "total": [rounded(total[name], 6) for name in phases],
        "steps": [[int(bar["step"]), int(bar["to"])] for bar in bars],
        "bars": [[rounded(bar[f"time/{name}"], 4) for name in phases] for bar in bars],
    }


def _preflight(given: Any) -> list[dict[str, Any]]:
    """Return the preflight table of each teacher, without entries of an unexpected type."""
    if not isinstance(given, dict):
        return []
    cells = ("check", "value", "verdict", "meaning")
    return [
        {
            "teacher": limited(name),
            "rows": [
                {cell: limited(row.get(cell), MAX_SENTENCE) for cell in cells}
                for row in (checks if isinstance(checks, list) else ())
                if isinstance(row, dict)
            ],
        }
        for name, checks in given.items()
    ]


def _warnings(run: RunRecord) -> list[str]:
    """Return the warnings from the start of the run and from its summary, each one once."""
    found = [text for source in (run.facts, run.summary) for text in samples.listed(source.get("warnings"))]
    return [limited(text, MAX_SENTENCE) for text in list(dict.fromkeys(map(str, found)))[:MAX_WARNINGS]]


def _facts(run: RunRecord) -> list[list[str]]:
    """Return [name, value] pairs: the run directory, changed settings, models, machine and versions."""
    found = {"run directory": str(run.path)}
    found |= _changes(run)
    for part in ("models", "machine", "versions"):
        given = run.facts.get(part) or (run.summary.get(part) if part == "versions" else None)
        found |= {str(name): str(value) for name, value in (given if isinstance(given, dict) else {}).items() if value}
    return [[limited(name), limited(value, MAX_SENTENCE)] for name, value in list(found.items())[:MAX_FACTS]]


def _parts(run: RunRecord) -> list[Any]:
    return samples.listed(run.summary.get("parts") or run.facts.get("parts"))


def _changes(run: RunRecord) -> dict[str, str]:
    """Return the settings that changed at each resume, as text.

    The keys are "changed from step N".
    """
    found = {}
    for part in _parts(run)[1:]:
        changed = part.get("changed") if isinstance(part, dict) else None
        changes = changed.items() if isinstance(changed, dict) else ()
        texts = [f"{key}: {' → '.join(map(str, change))}" for key, change in changes if isinstance(change, list)]
        if isinstance(part, dict):
            name = f"changed from step {part.get('first')}"
            found[name] = "; ".join(texts) or "unknown: the checkpoint was saved without settings"
    return found


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: rounded(value, 6) if isinstance(value, float) else value for name, value in row.items()}


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
