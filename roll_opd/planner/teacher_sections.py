"""Plan the contexts of teachers, and check teachers: followers, other tokenizers, servers and scorers."""

from urllib.parse import urlsplit

from roll_opd.base.addresses import address_fault, server_root
from roll_opd.base.failures import RunError
from roll_opd.config.plan import ContextPlan
from roll_opd.config.schema import ContextKeys, HttpKeys, ScorerKeys, TeacherWorker, Top, Worker, shared
from roll_opd.data.templates import TEMPLATES
from roll_opd.models.model_info import same_weights
from roll_opd.models.tokenizer_files import has_chat_template
from roll_opd.planner.lengths_and_batches import micro_batch
from roll_opd.planner.validate_sections import Sections
from roll_opd.teachers.teacher_registry import TEACHERS

PREFIX_TOPK = 20  # default of --max-logprobs in vLLM's servers
TINKER_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"  # the default of the package tinker
SERVER = "http.server"  # key of a teacher's section


def context_of(name: str, role: Worker, top: Top) -> ContextPlan | None:
    """Return the context of a teacher; None if the teacher reads the student's prompt.

    By default, a hint may be as long as a response, but the model and the micro-batches limit its length.
    """
    if not (role.has_context or role.is_aligned) or not isinstance(role, TeacherWorker):
        return None
    response = top.response_tokens or 0
    limits = [top.prompt_length + 2 * response, *_limits(role).values()]
    keys = shared(ContextKeys, role)
    if role.is_aligned and not role.template and role.info and has_chat_template(role.info.path):
        keys["template"] = "native"  # the student's template is the template of the rows
    return ContextPlan(
        **keys,
        name=name,
        key=role.path,
        prompt_length=role.prompt_length or min(limits) - response,
        tokenizer=str(role.info.path) if (role.template or role.is_aligned) and role.info else None,
        tags=role.tag_included or None,
    )


def prefix_topk(role: Worker, top: Top) -> int:
    """Return the number k of most likely tokens that a teacher must return for each token; 0 if none are needed.

    Only a teacher with a tokenizer other than the student's needs a top-k, because the log-probs of single student
    tokens are computed from the top-k. If log-probs are compared per chunk of text, no top-k is needed.
    """
    if not role.is_aligned or role.info is None or top.opd_chunk_credit != "prefix":
        return 0
    return min(PREFIX_TOPK, role.info.vocab)


def check_teachers(roles: Sections, top: Top) -> None:
    """Check the teachers of a run.

    The checks are about teachers with their own context, teachers whose weights follow the student's, and teachers with
    a tokenizer other than the student's.
    """
    if "opd_chunk_credit" in top.written and not any(role.is_aligned for role in roles.teachers.values()):
        top.diag.note("opd_chunk_credit", "has no effect, as every teacher has the student's tokenizer")
    for role in roles.teachers.values():
        assert isinstance(role, TeacherWorker)
        if role.is_aligned:
            _check_aligned(role, top)
        if role.has_context or role.is_aligned:
            _check_context(role, top.response_tokens or 0)
        elif role.prompt_length:
            role.diag.note("prompt_length", "has no effect without a system_prompt, a hint or a template")
        if role.follows_student and role.external:
            what = "does not get the student's weights; remove this section, or remove follows_student"
            role.diag.error(next(iter(role.sources)), what)
        elif role.follows_student:
            _check_follower(role, roles, top)


def _check_aligned(role: Worker, top: Top) -> None:
    """Check the objective for a teacher whose tokenizer differs from the student's.

    The objective may need only log-probs of text, and the source of the teacher's log-probs must be able to compute
    these log-probs.
    """
    if top.opd_objective != "sampled":
        top.diag.error(
            "opd_objective",
            f"{top.opd_objective} compares token ids, but {role.path} has a different tokenizer; use"
            " opd_objective: sampled, or a teacher with the student's tokenizer",
        )
    keys = http_keys(role)
    if keys and keys.server == "openai" and top.opd_chunk_credit == "prefix":
        top.diag.error(
            "opd_chunk_credit",
            f"prefix needs token ids, but {role.path} returns texts (server: openai); write whole, or use another"
            " server",
        )
    if top.opd_kl_discount and top.opd_chunk_credit != "prefix":
        top.diag.error(
            "opd_kl_discount",
            f"{top.opd_kl_discount:g} needs the KL of each token, but {role.path} has other tokens than the student,"
            " and"
            f" opd_chunk_credit: {top.opd_chunk_credit} gives the KL of chunks; write 0, or opd_chunk_credit: prefix",
        )


def _check_context(role: TeacherWorker, response: int) -> None:
    if role.template is not None:
        role.diag.is_one_of("template", role.template, TEMPLATES)
    if role.prompt_length is None:
        return
    for what, limit in _limits(role).items():
        if role.prompt_length + response > limit:
            role.diag.error(
                "prompt_length", f"{role.prompt_length} + a response of {response} exceed {what} ({limit}); lower it"
            )


def _limits(role: Worker) -> dict[str, int]:
    """Return the maximum number of tokens in a teacher's sequence, by the name of the limit."""
    found = {}
    if role.info:
        found["the positions of its model"] = role.info.max_positions
    if tokens := micro_batch(role, False).tokens:
        found["the tokens of its micro-batches"] = tokens
    return found


def _check_follower(role: TeacherWorker, roles: Sections, top: Top) -> None:
    """Check a teacher whose weights follow the student's.

    Such a teacher must start with the student's weights. After that, it must have a different context or older weights,
    because otherwise every reverse KL is 0.
    """
    assert role.follows_student
    follow = role.follows_student
    if roles.train and roles.train.info and role.info and not same_weights(roles.train.info, role.info):
        role.diag.error(
            "follows_student",
            f"starts with the student's weights, but {role.info.path} has other weights; remove"
            " model_args.model_name_or_path",
        )
    if role.has_context:
        return
    if follow.update_interval == 1 and not follow.ema_decay:
        role.diag.error(
            "follows_student",
            "the teacher is the student with the same context, so every reverse KL is 0; give it a hint or a"
            " system_prompt,"
            " or set ema_decay",
        )
    elif roles.mode == "pure" and not top.allow_self_teacher:
        role.diag.error(
            "follows_student",
            "the teacher is an older student with the same context, so it knows no more; give it a hint or a"
            " system_prompt,"
            " or set allow_self_teacher: true",
        )


def http_keys(role: Worker) -> HttpKeys | None:
    """Return the `http` section of a teacher that is reached over HTTP; None for any other role."""
    return role.external if isinstance(role.external, HttpKeys) else None


def check_scorers(roles: Sections) -> None:
    """Check that the classes of teachers with a section `scorer` exist. A run checks their arguments at its start."""
    for role in roles.teachers.values():
        if isinstance(keys := role.external, ScorerKeys):
            if not keys.name or keys.name in TEACHERS.builtin:
                keys.diag.error("name", f"should be a class of your own, such as {TEACHERS.example}, got {keys.name!r}")
                continue
            with keys.diag.catching("name", RunError):
                TEACHERS.find(keys.name)


def check_http_teachers(roles: Sections, top: Top) -> None:
    """Check the teachers that are reached over HTTP.

    Their addresses must be valid, and their servers must compute the log-probs that the objective needs.
    """
    temperature = roles.infer.generating_args.temperature if roles.infer else 1.0
    for role in roles.teachers.values():
        keys = http_keys(role)
        if keys is None:
            continue
        _check_addresses(keys)
        if keys.server == "tinker" and not keys.model_name:
            keys.diag.error("model_name", "is missing; write the name of a base model, or a path tinker://...")
        if temperature != 1:
            role.diag.error(
                SERVER,
                f"{keys.server} returns log-probs of a prompt at temperature 1, but the student samples at"
                f" {temperature:g}; set generating_args.temperature: 1.0",
            )
        _check_targets(role, keys, top)


def _check_addresses(keys: HttpKeys) -> None:
    if not keys.url:
        keys.diag.error("url", "is missing; write the server's address, such as http://host:8000")
    for url in keys.url:
        fault = address_fault(url)
        if url.startswith("tinker:"):
            keys.diag.error("url", f"is a path of weights; write it in model_name, server: tinker, url: {TINKER_URL}")
        elif fault:
            keys.diag.error("url", fault)
        elif (parts := urlsplit(url)).username or parts.password or parts.query:
            keys.diag.error("url", f"of {parts.hostname} contains a password or a query; write api_key_env instead")
    if len({server_root(url) for url in keys.url}) != len(keys.url):
        keys.diag.error("url", "lists an address twice; for more requests to one server, raise concurrency")


def _check_targets(role: Worker, keys: HttpKeys, top: Top) -> None:
    """Refuse an objective with targets that the server cannot compute."""
    if top.opd_objective == "full":
        role.diag.error(SERVER, "opd_objective: full needs hidden states, which no server has; use topk or sampled")
    elif top.opd_objective == "topk" and keys.server == "openai":
        role.diag.error(SERVER, "completions with echo have no token ids; use opd_objective: sampled or another server")
