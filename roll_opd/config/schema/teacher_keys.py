"""Keys of a teacher: those of a role, its context, its updates, and the source of its log-probs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from roll_opd.base.frozen import FrozenDict
from roll_opd.config.schema.key_types import AboveZero, Many, Name, Names, NotNegative, Positive
from roll_opd.config.schema.section import Section, keys_of, ours, shared
from roll_opd.config.schema.worker_keys import Worker

if TYPE_CHECKING:
    from roll_opd.config.role_plans import ExternalPlan


@dataclass(frozen=True, kw_only=True)
class ContextKeys(Section):
    """The teacher's context, which replaces the student's prompt."""

    system_prompt: str | None = ours(None, "system message for the teacher; replaces the system message of the row")
    hint: str | None = ours(
        None,
        "text that only the teacher gets. It is appended to the user's last message. If the text contains"
        " {prompt}, the text replaces the user's last message, and {prompt} is replaced by that message."
        " {ground_truth} and {NAME} are replaced by the row's values in these columns",
    )
    template: str | None = ours(
        None, "template of the teacher's prompt; native: the chat template of the teacher's tokenizer"
    )


@dataclass(frozen=True, kw_only=True)
class FollowKeys(Section):
    """`follows_student`: a teacher that starts with the student's weights and is updated from them during training."""

    update_interval: Positive = ours(1, "number of steps from one update of the teacher's weights to the next")
    ema_decay: Annotated[NotNegative, Field(lt=1)] = ours(
        0.0,
        "decay of the exponential moving average of the student's weights; 0: the teacher's weights are a copy"
        " of the student's",
    )


@dataclass(frozen=True, kw_only=True)
class ExternalKeys(Section):
    """A section that names the source of a teacher's log-probs.

    A teacher without such a section is computed by Megatron processes of the run.
    """

    needs_model: ClassVar[bool] = False  # whether the source reads the weights in model_args.model_name_or_path

    def planned(self, name: str, model: str | None, vocab_size: int | None) -> "ExternalPlan":
        """Return the plan of the source.

        Args:
            name: dotted key of the teacher's section.
            model: the directory of model_args.model_name_or_path.
            vocab_size: number of token ids in that directory's config.json.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method `planned`; write it")


@dataclass(frozen=True, kw_only=True)
class HttpKeys(ExternalKeys):
    """`http`: a teacher on a server that gets token ids and returns log-probs."""

    url: Names = ours(
        (),
        "address of the server, or a list of addresses of servers with the same model; requests are divided"
        " among these servers",
    )
    server: Literal["vllm", "vllm_tokens", "sglang", "openai", "tinker"] = ours(
        "vllm",
        "protocol of the server; vllm: completions with prompt_logprobs; vllm_tokens: /inference/v1/generate,"
        " with exact log-probs of the student's top-k; sglang: /generate; openai: completions with echo;"
        " tinker: requests of the Python package tinker",
    )
    model_name: Name | None = ours(
        None,
        "name of the model on the server; with protocol tinker, a path tinker://... is also accepted. If the"
        " server lists only one model, the default is this model",
    )
    api_key_env: Name | None = ours(None, "environment variable with the API key")
    concurrency: Many = ours(16, "maximum concurrent requests")
    request_seconds: AboveZero = ours(300.0, "timeout of a request")
    retry_seconds: NotNegative | None = ours(
        None, "the run ends if all requests have failed for this time, s; default: the run waits and logs warnings"
    )

    def planned(self, name: str, model: str | None, vocab_size: int | None) -> "ExternalPlan":
        """See `ExternalKeys.planned`."""
        from roll_opd.config.role_plans import HttpPlan  # which imports this module

        keys = {**shared(HttpKeys, self), "url": tuple(url.rstrip("/") for url in self.url)}
        return HttpPlan(**keys, name=name, tokenizer=model, vocab_size=vocab_size)


@dataclass(frozen=True, kw_only=True)
class ScorerKeys(ExternalKeys):
    """`scorer`: a teacher whose log-probs a class of the user computes in the driver's process."""

    name: Name = ours("", "class that computes the log-probs: a registered name, or a dotted path")
    args: dict[str, Any] = ours({}, "arguments of the class")

    def planned(self, name: str, model: str | None, vocab_size: int | None) -> "ExternalPlan":
        """See `ExternalKeys.planned`."""
        from roll_opd.config.role_plans import ScorerPlan

        return ScorerPlan(name, self.name, FrozenDict(self.args), model)


@dataclass(frozen=True, kw_only=True)
class TeacherWorker(Worker, ContextKeys):
    """Keys of a teacher: the keys of a role, and the teacher's context."""

    prompt_length: Positive | None = ours(
        None, "maximum tokens of the teacher's prompt; default: the sum of prompt_length and response_length"
    )
    follows_student: FollowKeys | None = ours(
        None, "updates of the teacher's weights from the student's weights; default: the teacher is frozen"
    )
    http: HttpKeys | None = ours(
        None,
        "server from which the teacher's log-probs are requested. With http, model_args.model_name_or_path is"
        " only the directory of the teacher's tokenizer, without weights; if it is not set, the teacher has the"
        " student's tokenizer",
    )
    scorer: ScorerKeys | None = ours(
        None,
        "class of your own that computes the teacher's log-probs. With scorer, model_args.model_name_or_path is the"
        " directory of the teacher's tokenizer, and of whatever the class reads; if it is not set, the teacher has the"
        " student's tokenizer",
    )

    @property
    def sources(self) -> dict[str, ExternalKeys]:
        """The sections that set a source of log-probs, by key.

        There are none if Megatron processes of the run compute the log-probs.
        """
        sections = {name: getattr(self, name) for name in keys_of(type(self))}
        return {name: section for name, section in sections.items() if isinstance(section, ExternalKeys)}

    @property
    def external(self) -> ExternalKeys | None:
        """See `Worker`."""
        return next(iter(self.sources.values()), None)

    @property
    def has_context(self) -> bool:
        """See `Worker`."""
        return any(getattr(self, name) is not None for name in keys_of(ContextKeys))

    @property
    def follows(self) -> bool:
        """See `Worker`."""
        return self.follows_student is not None
