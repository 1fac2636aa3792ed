"""Plan the sections in `rewards`: the reward workers with their tags, arguments and filters."""

from collections.abc import Mapping
from typing import Any

from roll_opd.base.failures import did_you_mean
from roll_opd.base.frozen import FrozenDict
from roll_opd.base.registry import annotations, arguments, type_problem
from roll_opd.base.user_modules import FILE, dotted_path
from roll_opd.config.plan import FilterPlan, RewardPlan, RewardTerm
from roll_opd.config.roll_keys import DOTTED, REWARD_CLASSES_OF_ROLL, REWARD_KEYS_OF_ROLL
from roll_opd.config.schema import Filter, Reward, RewardKeys, Term, changed, shared
from roll_opd.objective.filters import FILTERS
from roll_opd.planner.row_plans import shared_tags
from roll_opd.planner.validate_sections import LOCAL_JUDGE, SHARED_JUDGE
from roll_opd.rewards.interface import RewardError
from roll_opd.rewards.reward_registry import REWARDS, RewardFacts, check, reward_arguments
from roll_opd.tracking.secrets import is_secret

REWARD_SECONDS = 60.0  # seconds per sample for a reward that sets no time limit itself
MAX_REWARD_CALLS = 256  # calls of a worker that run at the same time


def read_rewards(rewards: Mapping[str, Reward | None], mode: str, responses: int) -> tuple[RewardPlan, ...]:
    """Return the plan of each reward domain; report a tag that belongs to more than one domain.

    In pure distillation, rewards are only monitored, so their filters have no effect.

    Args:
        responses: number of responses per prompt.
    """
    plans: list[RewardPlan] = []
    for domain, reward in rewards.items():
        if reward is None:
            continue
        terms = _terms(domain, reward)
        query, response = _filter(reward.query_filter_config), _filter(reward.response_filter_config)
        if mode == "pure":
            filters = {"query_filter_config": query, "response_filter_config": response}
            reward.diag.unused(*(key for key, found in filters.items() if found))
            query = response = None
        _check_spread(reward, query, response, responses)
        tags = reward.tag_included or None
        for other in plans:
            if both := shared_tags(tags, other.tags):
                text = f"{both} also belongs to rewards.{other.domain}; give each tag to one domain"
                reward.diag.error("tag_included", text)
        plan = RewardPlan(
            domain=domain,
            terms=terms,
            tags=tags,
            max_concurrency=reward.max_concurrency or _facts(terms[0].worker).max_concurrency or MAX_REWARD_CALLS,
            batch_size=reward.infer_batch_size,
            query_filter=query,
            response_filter=response,
            **shared(RewardKeys, reward),
        )
        plans.append(plan)
    return tuple(plans)


def _terms(domain: str, reward: Reward) -> tuple[RewardTerm, ...]:
    """Return the terms of a domain.

    The first term is the domain's own reward. Its name is the name of the reward worker.
    """
    problems = reward.diag.problems
    before = len(problems)
    if reward.args.get("judge_model_type") == SHARED_JUDGE:
        reward.diag.unsupported(
            "judge_model_type",
            f"{SHARED_JUDGE!r} uses the engine of section reward_model, which only one reward can use; write"
            f" {LOCAL_JUDGE},"
            " with model_args, strategy_args and device_mapping in this section",
        )
        args = {key: value for key, value in reward.args.items() if key != "judge_model_type"}
        reward = changed(reward, {"args": args})
    main = _term(reward, domain, None)
    if reward.args.get("judge_model_type") == LOCAL_JUDGE:
        reward.diag.unused(*_facts(main.worker).endpoint_arguments & main.args.keys())
        if main.worker in REWARDS.builtin and main.worker != "llm_judge":
            text = f"{main.worker} uses no judge, so the engines of this section would be idle; remove this key"
            reward.diag.error("judge_model_type", text)
    if main.name in reward.terms:
        reward.diag.error(f"terms.{main.name}", f"the reward itself is named {main.name!r}; give the term another name")
    found: list[tuple[Term, RewardTerm]] = [(reward, main)]
    for name, section in reward.terms.items():
        term = _term(section, name, name)
        if term.args.get("judge_model_type") == LOCAL_JUDGE:
            section.diag.error(
                "judge_model_type",
                "a term cannot have engines; make the judge the domain's reward, and the others its terms",
            )
        found.append((section, term))
    for section, term in found if len(problems) == before else ():
        if term.worker.startswith("roll."):
            section.diag.unsupported(
                "", f"{term.worker!r} is not available; use {', '.join(REWARDS.builtin)}, or a dotted path"
            )
            continue
        try:  # a user's class is only instantiated when the run starts
            check(term.worker, dict(term.args))
        except RewardError as error:
            # packages and API keys may exist only on the machine of the run
            is_builtin = term.worker in REWARDS.builtin
            (section.diag.unsupported if is_builtin else section.diag.error)("", str(error))
    return tuple(term for _, term in found)


def _term(section: Term, default: str, name: str | None) -> RewardTerm:
    worker = _worker(section, section.worker_cls or default)
    args, timeout = _arguments(section, worker), section.timeout
    if timeout is None:
        timeout = None if _facts(worker).keeps_time else REWARD_SECONDS
    elif worker in REWARDS.builtin and "timeout" in reward_arguments(worker):
        args, timeout = {**args, "timeout": timeout}, None
    return RewardTerm(name or worker.rpartition(".")[2], worker, FrozenDict(args), section.weight, timeout)


def _facts(worker: str) -> RewardFacts:
    """Return the facts of a reward worker.

    A built-in reward has registered facts. A class of the user is not imported, so it gets the default facts.
    """
    return REWARDS.facts(worker) if worker in REWARDS.builtin else RewardFacts()


def _worker(section: Term, name: str) -> str:
    """Return the built-in name or the dotted path of a reward worker.

    A class of ROLL is replaced by the built-in reward that does the same work. `path/to/file.py:name` becomes a dotted
    path.
    """
    with section.diag.catching("worker_cls"):
        name = dotted_path(name)
    class_name = name.rpartition(".")[2]
    of_roll = name == class_name or name.startswith("roll.")
    known = REWARD_CLASSES_OF_ROLL.get(class_name, name) if of_roll else name
    if known in REWARDS.builtin:
        return known
    names = (*REWARD_CLASSES_OF_ROLL, *REWARDS.builtin)
    near = did_you_mean(class_name, names)
    if DOTTED.fullmatch(known) and not (known.startswith("roll.") and near):
        return known
    if FILE.fullmatch(name):
        return name  # reported above
    hint = near or f"known: {', '.join(sorted(set(names)))}."
    own = "Or write your own as module.function or path/to/file.py:function"
    section.diag.error("worker_cls", f"no reward worker {name!r}; {hint} {own}")
    return known


def _arguments(section: Term, worker: str) -> dict[str, object]:
    """Return the arguments of a reward worker.

    The arguments of a built-in worker are checked. An unknown argument is an error. An argument that only ROLL's
    rewards have is reported as a key without effect.
    """
    if worker not in REWARDS.builtin:
        return dict(section.args)
    taken, types = reward_arguments(worker), annotations(REWARDS.find(worker))
    section.diag.unused(*(key for key in section.args if key not in taken and key in REWARD_KEYS_OF_ROLL))
    for key in sorted(section.args.keys() - taken.keys() - REWARD_KEYS_OF_ROLL):
        known = ", ".join(sorted(taken)) or "none"
        section.diag.error(key, f"unknown key; {worker} takes these arguments: {known}; remove it")
    kept = {key: value for key, value in section.args.items() if key in taken}
    for key, value in kept.items():
        problem = type_problem(types.get(key, Any), value)
        if problem:
            shown = problem.partition(", got ")[0] if is_secret(key) else problem
            section.diag.error(key, shown)
    return kept


def _check_spread(reward: Reward, query: FilterPlan | None, response: FilterPlan | None, responses: int) -> None:
    """Refuse a std_filter on single responses, and on groups of one response.

    The standard deviation of a single reward is always 0.
    """
    if response and response.type == "std_filter":
        reward.diag.error(
            "response_filter_config.type",
            "std_filter accepts no response, as a single reward has deviation 0; use mean_filter, or std_filter in"
            " query_filter_config",
        )
    if query and query.type == "std_filter" and responses == 1:
        reward.diag.error(
            "query_filter_config.type",
            "std_filter accepts no prompt with one response, as a single reward has deviation 0; set"
            " num_return_sequences_in_group to 2 or more, or use mean_filter",
        )


def _filter(section: Filter) -> FilterPlan | None:
    if section.type == "no_filter":
        section.diag.unused(*(["filter_args"] if section.filter_args else []))
        return None
    if not section.diag.is_one_of("type", section.type, ("no_filter", *FILTERS)):
        return None
    written = {key: value for key, value in section.filter_args.items() if value is not None}
    wanted = arguments(FILTERS[section.type], given_by_us=1)
    for key in wanted:
        if key not in written:
            section.diag.error(f"filter_args.{key}", f"is missing; write the number that {section.type} needs")
    for key in sorted(written.keys() - wanted.keys()):
        section.diag.error(f"filter_args.{key}", f"{section.type} has no such argument; remove it")
    up, down = written.get("threshold_up"), written.get("threshold_down")
    if section.type == "mean_filter" and up is not None and down is not None and up <= down:
        section.diag.error(
            "filter_args.threshold_up", f"{up:g} is not above threshold_down {down:g}, which leaves no sample; raise it"
        )
    return FilterPlan(section.type, FrozenDict(written))
