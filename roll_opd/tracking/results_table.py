"""Texts printed at the end of a run: a table of results, times by phase, and a script that loads the model."""

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_opd.tracking.phase_clock import PHASES

PHASES_SHOWN = 3  # largest ones
MIN_SECONDS = 0.5  # shorter parts of the wall time are not named
SHORT = {
    "generate": "gen",
    "teacher": "teach",
    "old_logprobs": "old",
    "weight_sync": "sync",
    "validate": "val",
    "checkpoint": "save",
}
# (label in the table, name in a summary, base of the ratio in the last column)
ROWS = (
    ("validation accuracy", "val_accuracy", "teacher"),
    ("mean validation reward", "val_reward", "teacher"),
    ("validation loss", "val_loss", "first"),
    ("preference accuracy", "val_preference_accuracy", ""),
    ("val log p student-teach.", "val_log_ratio", ""),
    ("mean training reward", "reward", ""),
    ("training loss", "sft_loss", "first"),
    ("training loss", "dpo_loss", "first"),
    ("reverse KL", "reverse_kl", "first"),
)
STEP_METRICS = ("reward", "sft_loss", "dpo_loss", "reverse_kl")
SEPARATE = {"validate": "validation", "checkpoint": "checkpoints"}  # phases that are not part of steps
PROMPT_COLUMNS = 71  # width of the prompt, so that the line has 80 columns
RULE = 74  # characters


def before_after_table(summary: Mapping[str, Any]) -> str:
    """Return a table that compares the first and last results in `summary.json`. Each measured quantity has a row.

    A missing value is shown as a dash. If settings changed during the run, a note replaces the ratio to the first
    value.
    """
    teacher = summary.get("teacher_val_reward", summary.get("teacher_val_accuracy"))
    rows = []
    for label, name, base in ROWS:
        first, last = (summary.get(f"{name}_{end}") for end in ("first", "last"))
        if first is None and last is None:
            continue
        if name in STEP_METRICS and summary["steps"] < 2:
            last = None
        of_teacher = teacher if base == "teacher" else None
        compared = {"teacher": of_teacher, "first": first}.get(base)
        stderrs = summary.get("val_stderr_last"), summary.get("teacher_val_stderr")
        error = _ratio_stderr(last, compared, *stderrs) if base == "teacher" else None
        ratio = _ratio(last, compared, f"of {base}", error)
        if base == "first" and ratio:
            ratio = changed_settings(summary.get("parts")) or ratio
        rows.append((label, first, last, of_teacher, ratio))
    if not rows:
        return ""
    has_teacher, has_ratio = (any(row[column] not in (None, "") for row in rows) for column in (3, 4))
    lines = [_table_row("", "before", "after", "teacher" if has_teacher else "", "ratio" if has_ratio else "")]
    lines += [
        _table_row(label, _number(first), _number(last), _number(of_teacher) if has_teacher else "", ratio)
        for label, first, last, of_teacher, ratio in rows
    ]
    rule = "-" * RULE
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def _table_row(label: str, before: str, after: str, teacher: str, ratio: str) -> str:
    middle = f"{teacher:>10}" if teacher else ""
    return f"{label:<24}{before:>10}{after:>10}{middle}{ratio:>20}".rstrip()


def totals(summary: Mapping[str, Any], short: Mapping[str, str] = SHORT) -> str:
    """Return a text with the number of steps, the number of tokens, and the wall time with its parts.

    All values come from `summary.json`. `short` maps the name of a phase to a shorter name.
    """
    counts = {what: summary.get(f"{what}_tokens") for what in ("generated", "learned")}
    if counts["learned"] == counts["generated"]:  # the usual case
        del counts["learned"]
    tokens = [f"{count_of(count)} {what} tokens" for what, count in counts.items() if count]
    phases = summary["phase_seconds"]
    of_steps = {f"time/{name}": seconds for name, seconds in phases.items() if name not in SEPARATE}
    steps, startup = sum(of_steps.values()), summary.get("startup_seconds", 0.0)
    parts = {
        "start-up": startup,
        "steps": steps,
        **{SEPARATE[name]: phases[name] for name in SEPARATE},
        "end": summary["wall_seconds"] - startup - sum(phases.values()),
    }
    split = {"steps": phase_split(of_steps, steps, PHASES_SHOWN, short)}
    named = ", ".join(
        f"{name} {duration(seconds)}{split.get(name, '')}" for name, seconds in parts.items() if seconds >= MIN_SECONDS
    )
    slowest = sorted(summary.get("startup_parts", {}).items(), key=lambda part: -part[1])[:PHASES_SHOWN]
    waited = ", ".join(f"{part} {duration(seconds)}" for part, seconds in slowest if seconds >= MIN_SECONDS)
    if named and waited:
        last = summary.get("last_startup_seconds")  # for a resumed run, `startup` is the sum over all parts
        which = "start-up" if last is None else f"last start-up, {duration(last)},"
        named += f"\n  {which} waited for: {waited}"
    tokens += [f"{failed} prompts failed"] if (failed := summary.get("failed_prompts")) else []
    first = ", ".join([f"{summary['steps']} steps", *tokens, f"{duration(summary['wall_seconds'])} wall time"])
    return f"{first}\n  {named}" if named else first


def loading(directory: Path | str, prompt: str, *, is_chat: bool = True) -> Sequence[str]:
    """Return the lines of a script that loads the model in `directory` with transformers and with vLLM.

    The script works with and without a GPU. It generates an answer to the beginning of `prompt`. If `is_chat` is set,
    the prompt is rendered with the model's chat template.
    """
    path = json.dumps(str(directory), ensure_ascii=False)  # quotes and escapes
    generate = 'llm.chat([{"role": "user", "content": prompt}])' if is_chat else "llm.generate(prompt)"
    return (
        f"model_dir = {path}",
        f"prompt = {_literal(prompt, PROMPT_COLUMNS)}",
        "",
        'if __name__ == "__main__":  # vLLM starts processes, which import this file',
        "    import torch",
        "    from transformers import AutoModelForCausalLM, AutoTokenizer",
        "    from vllm import LLM",
        "",
        "    tokenizer = AutoTokenizer.from_pretrained(model_dir)",
        "    model = AutoModelForCausalLM.from_pretrained(model_dir)",
        "",
        "    # without a GPU: no compilation, as it takes minutes; a KV cache of 4 GiB",
        '    on_cpu = {"enforce_eager": True, "kv_cache_memory_bytes": 4 * 2**30}',
        "    llm = LLM(model_dir, **({} if torch.cuda.is_available() else on_cpu))",
        f"    print({generate}[0].outputs[0].text)",
    )


def _literal(text: str, columns: int) -> str:
    """Return `text` as a Python string literal that is at most `columns` wide. A longer text is cut between words.

    Args:
        text: any text. White space at both ends is dropped.
        columns: maximum width, including the quotes.
    """
    text, shown, width = text.strip(), "", 2  # the quotes
    for place, character in enumerate(text):
        written = _escaped(character)
        width += sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in written)
        if width > columns:
            words = re.match(r"(?s)(.+)\s", text[: place + 1])
            kept = words[1].rstrip() if words and len(words[1]) > place // 2 else text[:place]
            return f'"{"".join(map(_escaped, kept))}"'
        shown += written
    return f'"{shown}"'


def _escaped(character: str) -> str:
    if character < " " or character in '"\\':
        return json.dumps(character)[1:-1]
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def phase_split(metrics: Mapping[str, float], seconds: float, count: int, short: Mapping[str, str]) -> str:
    if seconds <= 0:
        return ""
    shares = {phase: metrics.get(f"time/{phase}", 0.0) / seconds for phase in PHASES}
    largest = sorted((phase for phase in PHASES if shares[phase] >= 0.005), key=lambda phase: -shares[phase])
    shown = " ".join(f"{short.get(phase, phase)} {shares[phase]:.0%}" for phase in largest[:count])
    return f" ({shown})" if shown else ""


def duration(seconds: float) -> str:
    """Return a duration as text, for example `45s`, `4m12s`, `1h05m` or `2d03h`."""
    whole = round(max(0.0, seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def count_of(value: float) -> str:
    """Return a count as text, for example `950`, `10.2k` or `3.4M`."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.1f}{suffix}"
    return f"{value:.0f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _ratio(value: float | None, base: float | None, of: str, stderr: float | None = None) -> str:
    """Return the ratio of `value` to `base` as text, for example `0.95 of teacher`.

    If the standard error is known, two standard errors are added: `0.95±.03 of teacher`.
    """
    if value is None or not base:
        return ""
    bounds = f"±{f'{2 * stderr:.2f}'.lstrip('0')}" if stderr else ""
    return f"{value / base:.2f}{bounds} {of}"


def _ratio_stderr(
    value: float | None, base: float | None, stderr: float | None, base_stderr: float | None
) -> float | None:
    """Return the first-order standard error of value / base, or None if no standard error is known."""
    if value is None or not base or (stderr is None and base_stderr is None):
        return None
    return math.hypot(stderr or 0.0, (base_stderr or 0.0) * value / base) / abs(base)


# keys of optimization, placement and validation do not change the definition of a step's metrics
HARMLESS = re.compile(
    r"max_steps|num_train_epochs|seed|ppo_epochs|rollout_batch_size|num_return_sequences_in_group|eval_steps"
    r"|num_nodes|num_gpus_per_node|is_offload_states|weight_sync|deterministic|teacher_preflight"
    r"|(.*\.)?(training_args\..*|learning_rate|max_grad_norm|device_mapping|infer_batch_size|sleep_level)"
    r"|.*\.(max_tokens_per_microbatch_in_\w+|max_running_requests)|max_additional_running_prompts"
    r"|.*\.strategy_config\.(\w+_parallel\w*|sequence_parallel|overlap_\w+|\w+_optimizer|enforce_eager|max_num_seqs)"
    r"|validation\.(generating_args\..*|evaluate_teacher)"
)


def changed_settings(parts: Any) -> str:
    """Return why the metrics of a run's parts cannot be compared, or "" if they can be compared.

    `parts` is the list of parts in `summary.json`, each with the settings that changed at its start.
    """
    later = parts[1:] if isinstance(parts, Sequence) and not isinstance(parts, str) else ()
    changes = [part.get("changed") if isinstance(part, dict) else None for part in later]
    if any(not HARMLESS.fullmatch(str(key)) for change in changes if isinstance(change, dict) for key in change):
        return "settings changed"
    return "settings unknown" if any(not isinstance(change, dict) for change in changes) else ""
