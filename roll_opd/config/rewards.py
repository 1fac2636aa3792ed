"""Reads the `rewards` sections: which worker scores which tags, with what arguments and filters."""

import difflib
from collections.abc import Mapping

from roll_opd.config.errors import Findings
from roll_opd.config.frozen import FrozenDict
from roll_opd.config.known_names import (
    DOTTED,
    JUDGE_ENDPOINT_KEYS,
    MOST_REWARD_CALLS,
    REWARD_CALLS,
    REWARD_CLASSES_OF_ROLL,
    REWARD_KEYS_OF_ROLL,
    REWARD_SECONDS,
    REWARD_WORKERS,
    REWARDS_THAT_KEEP_TIME,
)
from roll_opd.config.plan import FilterPlan, Mode, RewardPlan, RewardTerm
from roll_opd.config.schema import Filter, Reward, Term
from roll_opd.config.sections import LOCAL_JUDGE

FILTER_ARGUMENTS = {"mean_filter": ("threshold_up", "threshold_down"), "std_filter": ("std_threshold",)}


def read_rewards(
    rewards: Mapping[str, Reward | None], mode: Mode, responses: int, findings: Findings
) -> tuple[RewardPlan, ...]:
    """Return the reward workers; each tag may belong to one domain only. `responses` are those of a prompt.

    In pure distillation they only look on, so their filters have no effect.
    """
    plans = []
    for domain, reward in rewards.items():
        if reward is None:
            continue
        path = f"rewards.{domain}"
        terms = _terms(path, domain, reward, findings)
        filters = {
            "query_filter": _filter(f"{path}.query_filter_config", reward.query_filter_config, findings),
            "response_filter": _filter(f"{path}.response_filter_config", reward.response_filter_config, findings),
        }
        if mode == "pure":
            for name in [name for name, found in filters.items() if found]:
                findings.ignore(f"{path}.{name}_config")
                filters[name] = None
        else:
            _check_spread(path, filters, responses, findings)
        plans.append(
            RewardPlan(
                domain=domain,
                terms=terms,
                tags=reward.tag_included or None,
                world_size=reward.world_size,
                on_error=reward.on_error,
                max_concurrency=reward.max_concurrency or REWARD_CALLS.get(terms[0].worker, MOST_REWARD_CALLS),
                batch_size=reward.infer_batch_size,
                **filters,
            )
        )
    for index, plan in enumerate(plans):
        for other in plans[:index]:
            shared = _shared_tags(plan.tags, other.tags)
            if shared is not None:
                findings.problem(
                    f"rewards.{plan.domain}.tag_included",
                    f"{shared} also belongs to rewards.{other.domain}; give each tag to one of them",
                )
    return tuple(plans)


def _terms(path: str, domain: str, reward: Reward, findings: Findings) -> tuple[RewardTerm, ...]:
    """The domain's own reward first, named after its worker, then what is added to it."""
    main = _term(path, domain, None, reward, findings)
    added = [_term(f"{path}.terms.{name}", name, name, term, findings) for name, term in reward.terms.items()]
    if reward.args.get("judge_model_type") == LOCAL_JUDGE and main.worker in REWARD_WORKERS.keys() - {"llm_judge"}:
        findings.problem(
            f"{path}.judge_model_type", f"{main.worker} asks no judge, and would have engines for nothing; remove it"
        )
    elif main.args.get("judge_model_type") == LOCAL_JUDGE:
        for key in sorted(JUDGE_ENDPOINT_KEYS & main.args.keys()):
            findings.ignore(f"{path}.{key}")
    for term in added:
        if term.args.get("judge_model_type") == LOCAL_JUDGE:
            findings.problem(
                f"{path}.terms.{term.name}.judge_model_type",
                "a term has no engines of the run's own; make the judge the domain's reward, and the others its terms",
            )
    if main.name in reward.terms:
        findings.problem(f"{path}.terms.{main.name}", f"the reward itself is named {main.name!r}; give it another name")
    return (main, *added)


def _term(path: str, default: str, name: str | None, term: Term, findings: Findings) -> RewardTerm:
    worker = _worker(path, term.worker_cls or default, findings)
    args, timeout = _arguments(path, worker, term.args, findings), term.timeout
    if timeout is None:
        timeout = None if worker in REWARDS_THAT_KEEP_TIME else REWARD_SECONDS
    elif "timeout" in REWARD_WORKERS.get(worker, ()):
        args, timeout = {**args, "timeout": timeout}, None
    return RewardTerm(name or worker.rpartition(".")[2], worker, FrozenDict(args), term.weight, timeout)


def _shared_tags(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> str | None:
    if one is None or other is None:
        return "every tag (tag_included is not written)"
    return next((f"tag {tag!r}" for tag in one if tag in other), None)


def _worker(path: str, name: str, findings: Findings) -> str:
    """Return the worker's registered name or dotted path; a class of ROLL's becomes the name of its counterpart."""
    classes = REWARD_CLASSES_OF_ROLL
    class_name = name.rpartition(".")[2]
    known = classes.get(class_name, name)
    if known in REWARD_WORKERS:
        return known
    near = difflib.get_close_matches(class_name, (*classes, *REWARD_WORKERS), n=1, cutoff=0.8)
    if DOTTED.fullmatch(known) and not (known.startswith("roll.") and near):
        return known
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted({*REWARD_WORKERS, *classes}))}"
    findings.problem(
        f"{path}.worker_cls", f"no reward worker {name!r}; {hint} Or write the dotted path of your own class"
    )
    return known


def _arguments(path: str, worker: str, args: Mapping[str, object], findings: Findings) -> dict[str, object]:
    """Return what the worker is made with: a key of ROLL's that it does not take has no effect, others are wrong."""
    if worker not in REWARD_WORKERS:
        return dict(args)
    taken = REWARD_WORKERS[worker]
    for key in sorted(set(args) - taken):
        if key in REWARD_KEYS_OF_ROLL:
            findings.ignore(f"{path}.{key}")
        else:
            known = ", ".join(sorted(taken)) or "none"
            findings.problem(f"{path}.{key}", f"unknown key; {worker} takes these arguments: {known}; remove it")
    return {key: value for key, value in args.items() if key in taken}


def _check_spread(path: str, filters: Mapping[str, FilterPlan | None], responses: int, findings: Findings) -> None:
    """One reward has no spread, so a std_filter that sees only one lets nothing pass."""
    query, response = filters["query_filter"], filters["response_filter"]
    if response and response.type == "std_filter":
        findings.problem(
            f"{path}.response_filter_config.type",
            "std_filter sees one reward at a time, whose deviation is 0, and lets nothing pass; use mean_filter, or"
            " std_filter in query_filter_config",
        )
    if query and query.type == "std_filter" and responses == 1:
        findings.problem(
            f"{path}.query_filter_config.type",
            "std_filter lets nothing pass with one response a prompt; set num_return_sequences_in_group to 2 or more,"
            " or use mean_filter",
        )


def _filter(path: str, section: Filter, findings: Findings) -> FilterPlan | None:
    if section.type == "no_filter":
        return None
    written = section.filter_args.model_dump(exclude_none=True)
    wanted = FILTER_ARGUMENTS[section.type]
    for key in wanted:
        if key not in written:
            findings.problem(f"{path}.filter_args.{key}", f"is missing; {section.type} needs it, write a number")
    for key in sorted(set(written) - set(wanted)):
        findings.problem(f"{path}.filter_args.{key}", f"{section.type} does not take it; remove it")
    up, down = written.get("threshold_up"), written.get("threshold_down")
    if section.type == "mean_filter" and None not in (up, down) and up <= down:
        findings.problem(
            f"{path}.filter_args.threshold_up", f"{up:g} is not above threshold_down {down:g}; nothing would be left"
        )
    return FilterPlan(section.type, FrozenDict(written))
