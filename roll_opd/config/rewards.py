"""Reads the `rewards` sections: which worker scores which tags, with what arguments and filters."""

from collections.abc import Mapping, Sequence
from typing import Any

from roll_opd.algorithms.filters import FILTERS
from roll_opd.config.check_files import shared_tags
from roll_opd.config.errors import Diagnostics
from roll_opd.config.legacy_roll import DOTTED, REWARD_CLASSES_OF_ROLL, REWARD_KEYS_OF_ROLL
from roll_opd.config.plan import FilterPlan, RewardPlan, RewardTerm
from roll_opd.config.read import LOCAL_JUDGE, SHARED_JUDGE
from roll_opd.config.schema import Filter, Reward, RewardKeys, Term, changed, shared
from roll_opd.extensions import annotations, arguments, type_problem
from roll_opd.frozen import FrozenDict
from roll_opd.hints import nearest
from roll_opd.rewards.interface import RewardError
from roll_opd.rewards.registry import REWARDS, check, reward_arguments
from roll_opd.tracking.secrets import is_secret

REWARD_SECONDS = 60.0  # a sample may take, of a reward that does not keep time itself
MOST_REWARD_CALLS = 256  # under way in a worker


def read_rewards(
    rewards: Mapping[str, Reward | None], mode: str, responses: int, diagnostics: Diagnostics
) -> tuple[RewardPlan, ...]:
    """Return the reward workers; each tag may belong to one domain only. `responses` are those of a prompt.

    In pure distillation they only look on, so their filters have no effect.
    """
    plans = []
    for domain, reward in rewards.items():
        if reward is None:
            continue
        path = f"rewards.{domain}"
        before = len(diagnostics.problems)
        terms = _terms(path, domain, reward, diagnostics)
        if len(diagnostics.problems) == before:
            _check_terms(path, terms, diagnostics)
        filters: dict[str, Any] = {
            "query_filter": _filter(f"{path}.query_filter_config", reward.query_filter_config, diagnostics),
            "response_filter": _filter(f"{path}.response_filter_config", reward.response_filter_config, diagnostics),
        }
        if mode == "pure":
            for name in [name for name, found in filters.items() if found]:
                diagnostics.ignore(f"{path}.{name}_config")
                filters[name] = None
        else:
            _check_spread(path, filters, responses, diagnostics)
        plans.append(
            RewardPlan(
                domain=domain,
                terms=terms,
                tags=reward.tag_included or None,
                max_concurrency=reward.max_concurrency or _calls(terms[0].worker),
                batch_size=reward.infer_batch_size,
                **filters,
                **shared(RewardKeys, reward),
            )
        )
    for index, plan in enumerate(plans):
        for other in plans[:index]:
            both = shared_tags(plan.tags, other.tags)
            if both is not None:
                diagnostics.problem(
                    f"rewards.{plan.domain}.tag_included",
                    f"{both} also belongs to rewards.{other.domain}; give each tag to one of them",
                )
    return tuple(plans)


def _terms(path: str, domain: str, reward: Reward, diagnostics: Diagnostics) -> tuple[RewardTerm, ...]:
    """The domain's own reward first, named after its worker, then what is added to it."""
    if reward.args.get("judge_model_type") == SHARED_JUDGE:
        diagnostics.block(
            f"{path}.judge_model_type",
            f"{SHARED_JUDGE!r} has the engine of the section reward_model, which one reward alone can have here;"
            f" write {LOCAL_JUDGE}, with model_args, strategy_args and device_mapping in this section",
        )
        args = {key: value for key, value in reward.args.items() if key != "judge_model_type"}
        reward = changed(reward, {"args": args})
    main = _term(path, domain, None, reward, diagnostics)
    added = [_term(f"{path}.terms.{name}", name, name, term, diagnostics) for name, term in reward.terms.items()]
    if (
        reward.args.get("judge_model_type") == LOCAL_JUDGE
        and main.worker in REWARDS.builtin
        and main.worker != "llm_judge"
    ):
        diagnostics.problem(
            f"{path}.judge_model_type", f"{main.worker} asks no judge, and would have engines for nothing; remove it"
        )
    elif main.args.get("judge_model_type") == LOCAL_JUDGE:
        for key in (
            sorted(REWARDS.facts(main.worker).endpoint_arguments & main.args.keys())
            if main.worker in REWARDS.builtin
            else ()
        ):
            diagnostics.ignore(f"{path}.{key}")
    for term in added:
        if term.args.get("judge_model_type") == LOCAL_JUDGE:
            diagnostics.problem(
                f"{path}.terms.{term.name}.judge_model_type",
                "a term has no engines of the run's own; make the judge the domain's reward, and the others its terms",
            )
    if main.name in reward.terms:
        diagnostics.problem(
            f"{path}.terms.{main.name}", f"the reward itself is named {main.name!r}; give it another name"
        )
    return (main, *added)


def _check_terms(path: str, terms: Sequence[RewardTerm], diagnostics: Diagnostics) -> None:
    """Say what the built-in rewards of a domain would say when they are made; a user's own are made in the run."""
    for term in terms:
        if term.worker in REWARDS.builtin:
            where = path if term is terms[0] else f"{path}.terms.{term.name}"
            try:
                check(term.worker, dict(term.args))
            except RewardError as error:
                diagnostics.block(where, str(error))


def _term(path: str, default: str, name: str | None, term: Term, diagnostics: Diagnostics) -> RewardTerm:
    worker = _worker(path, term.worker_cls or default, diagnostics)
    builtin = worker in REWARDS.builtin
    args, timeout = _arguments(path, worker, term.args, diagnostics), term.timeout
    if timeout is None:
        timeout = None if builtin and REWARDS.facts(worker).keeps_time else REWARD_SECONDS
    elif builtin and "timeout" in reward_arguments(worker):
        args, timeout = {**args, "timeout": timeout}, None
    return RewardTerm(name or worker.rpartition(".")[2], worker, FrozenDict(args), term.weight, timeout)


def _calls(worker: str) -> int:
    known = REWARDS.facts(worker).max_concurrency if worker in REWARDS.builtin else None
    return known or MOST_REWARD_CALLS


def _worker(path: str, name: str, diagnostics: Diagnostics) -> str:
    """Return the worker's built-in name or dotted path; a class of ROLL's becomes the name of its counterpart."""
    class_name = name.rpartition(".")[2]
    known = REWARD_CLASSES_OF_ROLL.get(class_name, name)
    if known in REWARDS.builtin:
        return known
    names = (*REWARD_CLASSES_OF_ROLL, *REWARDS.builtin)
    near = nearest(class_name, names)
    if DOTTED.fullmatch(known) and not (known.startswith("roll.") and near):
        return known
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(sorted(set(names)))}"
    diagnostics.problem(
        f"{path}.worker_cls", f"no reward worker {name!r}; {hint} Or write the dotted path of your own class"
    )
    return known


def _arguments(path: str, worker: str, args: Mapping[str, object], diagnostics: Diagnostics) -> dict[str, object]:
    """Return what the worker is made with: a key of ROLL's that it does not take has no effect, others are wrong."""
    if worker not in REWARDS.builtin:
        return dict(args)
    taken = reward_arguments(worker)
    for key in sorted(args.keys() - taken.keys()):
        if key in REWARD_KEYS_OF_ROLL:
            diagnostics.ignore(f"{path}.{key}")
        else:
            known = ", ".join(sorted(taken)) or "none"
            diagnostics.problem(f"{path}.{key}", f"unknown key; {worker} takes these arguments: {known}; remove it")
    kept = {key: value for key, value in args.items() if key in taken}
    for key, value in kept.items():
        problem = type_problem(annotations(REWARDS.find(worker)).get(key, Any), value)
        if problem:
            told = problem.partition(", got ")[0] if is_secret(key) else problem  # a message may be shown around
            diagnostics.problem(f"{path}.{key}", told)
    return kept


def _check_spread(
    path: str, filters: Mapping[str, FilterPlan | None], responses: int, diagnostics: Diagnostics
) -> None:
    """One reward has no spread, so a std_filter that sees only one lets nothing pass."""
    query, response = filters["query_filter"], filters["response_filter"]
    if response and response.type == "std_filter":
        diagnostics.problem(
            f"{path}.response_filter_config.type",
            "std_filter sees one reward at a time, whose deviation is 0, and lets nothing pass; use mean_filter, or"
            " std_filter in query_filter_config",
        )
    if query and query.type == "std_filter" and responses == 1:
        diagnostics.problem(
            f"{path}.query_filter_config.type",
            "std_filter lets nothing pass with one response a prompt; set num_return_sequences_in_group to 2 or more,"
            " or use mean_filter",
        )


def _filter(path: str, section: Filter, diagnostics: Diagnostics) -> FilterPlan | None:
    if section.type == "no_filter":
        if section.filter_args:
            diagnostics.ignore(f"{path}.filter_args")
        return None
    if not diagnostics.is_one_of(f"{path}.type", section.type, ("no_filter", *FILTERS)):
        return None
    written = {key: value for key, value in section.filter_args.items() if value is not None}
    wanted = arguments(FILTERS[section.type], given_by_us=1)
    for key in wanted:
        if key not in written:
            diagnostics.problem(f"{path}.filter_args.{key}", f"is missing; {section.type} needs it, write a number")
    for key in sorted(written.keys() - wanted.keys()):
        diagnostics.problem(f"{path}.filter_args.{key}", f"{section.type} does not take it; remove it")
    up, down = written.get("threshold_up"), written.get("threshold_down")
    if section.type == "mean_filter" and up is not None and down is not None and up <= down:
        diagnostics.problem(
            f"{path}.filter_args.threshold_up", f"{up:g} is not above threshold_down {down:g}; nothing would be left"
        )
    return FilterPlan(section.type, FrozenDict(written))
