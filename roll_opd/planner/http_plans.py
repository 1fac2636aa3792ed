"""Plan and check teachers that are reached over HTTP (section `http`)."""

from urllib.parse import urlsplit

from roll_opd.base.addresses import address_fault, server_root
from roll_opd.base.failures import RunError
from roll_opd.config.schema import HttpKeys, ScorerKeys, Top, Worker
from roll_opd.planner.read import Sections
from roll_opd.teachers.kinds import TEACHERS

TINKER_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"  # the default of the package tinker
SERVER = "http.server"  # key of a teacher's section
AT_ONE = {  # protocol -> sentence for the error
    "vllm": "vLLM computes log-probs of a prompt at temperature 1",
    "vllm_tokens": "vLLM computes log-probs of a prompt at temperature 1",
    "sglang": "SGLang computes log-probs of a prompt at temperature 1",
    "openai": "completions with echo return log-probs at temperature 1",
    "tinker": "requests to Tinker have temperature 1",
}


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
                f"{AT_ONE[keys.server]}, but the student samples at {temperature:g}; set generating_args.temperature:"
                " 1.0",
            )
        _check_targets(role, keys, top)


def _check_addresses(keys: HttpKeys) -> None:
    if not keys.url:
        keys.diag.error("url", "is missing; write the server's address, such as http://host:8000")
    for url in keys.url:
        fault = address_fault(url)
        if url.startswith("tinker:"):
            keys.diag.error(
                "url",
                f"is a path of weights; write it in model_name, with server: tinker and url: {TINKER_URL}",
            )
        elif fault:
            keys.diag.error("url", fault)
        elif (parts := urlsplit(url)).username or parts.password or parts.query:
            keys.diag.error("url", f"of {parts.hostname} contains a password or a query; write api_key_env instead")
    if len({server_root(url) for url in keys.url}) != len(keys.url):
        keys.diag.error("url", "lists an address twice; for more requests to one server, raise concurrency")


def _check_targets(role: Worker, keys: HttpKeys, top: Top) -> None:
    """Refuse an objective with targets that the server cannot compute."""
    if top.opd_objective == "full":
        role.diag.error(
            SERVER,
            "opd_objective: full needs the teacher's hidden states, which no server returns; use topk, or sampled",
        )
    elif top.opd_objective == "topk" and keys.server == "openai":
        role.diag.error(
            SERVER,
            "completions with echo return the top-k as texts, without token ids; use opd_objective: sampled, or"
            " another server",
        )
