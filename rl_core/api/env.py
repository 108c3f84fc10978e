"""`spec.env`: the environments of a job."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from rl_core.api.base import rule
from rl_core.api.cel import Cel, literal
from rl_core.api.egress import Egress
from rl_core.api.pods import Words
from rl_core.api.roles import RoleSpec
from rl_core.api.similar import did_you_mean

BUILT_IN_TYPES = (
    "agent",
    "environment_factory",
    "gymnasium_text",
    "math",
    "nemo_gym",
    "reasoning_gym",
    "reward",
    "reward_model",
)
"""Types of environments besides `module:Class` and those that a module of spec.extensions registers."""
SIMULATORS = "gymnasium"
"""Type of environments that run Gymnasium simulators (`program: embodied`)."""
ONE_TURN = ("math", "reasoning_gym", "reward", "reward_model")
"""Built-in types whose episodes end with the first completion, which they score."""
KNOWN_TYPES = sorted((*BUILT_IN_TYPES, SIMULATORS))
TYPE_IS_KNOWN = Cel(
    holds=f"$env.type.contains(':') || $env.type in {literal(KNOWN_TYPES)} || self.?extensions.orValue([]).size() > 0",
    refusal=f"env.type must be one of {', '.join(KNOWN_TYPES)} or module:Class, got %s; correct it, or list in extensions the module that registers it",
    values=("$env.type",),
    field="env.type",
)
"""Rule that `env.type` exists. It is checked on the whole spec, because modules listed in `extensions` may register more types."""
PROGRAMS = frozenset({"agent", "environment_factory", "nemo_gym"})
"""Types of environments whose episodes are programs that call the model themselves."""


class EnvSpec(RoleSpec):
    """The environments, which answer and score completions."""

    type: str = Field("math", min_length=1)
    """Name of a built-in environment (math, reasoning_gym, reward, reward_model, gymnasium_text, agent, environment_factory, nemo_gym), or `module:Class`
    of your own."""
    replicas: int = Field(1, ge=0, le=1024)
    """Number of pods; 0 only with a program of one's own."""
    max_turns: int = Field(1, ge=1, lt=2**31)
    """Largest number of turns of an episode."""
    processes: int = Field(1, ge=1, le=256)
    """Processes per pod that run the code of the environment; one that hangs or dies is replaced."""
    reward: str | None = None
    """`module:function` called f(prompts, completions, **columns) -> list of rewards, which may have parts; for type reward."""
    agent: str | None = None
    """`module:function` called f(row, base_url, api_key, model), which calls the model at base_url and returns a reward; for type agent, without `command`."""
    command: Annotated[Words, Field(min_length=1)] | None = None
    """Program and arguments, run once per sample; it calls the model at OPENAI_BASE_URL and prints a reward. For type agent, without `agent`."""
    factory: str | None = None
    """`module:Class` of an environment of TRL (`reset`, tools, `get_reward`), or of a mapping of names to such; for type environment_factory."""
    options: Annotated[dict[str, Any], Field(max_length=64)] = {}
    """Options of the environment type, checked by its own config model."""
    egress: Egress = []
    """Destinations that env pods may reach besides the job, on a cluster that enforces NetworkPolicies."""

    def _type_hint(self, meant: str) -> str:
        """Return what may be wrong with the type when another field needs the type `meant`, to be added to the error."""
        if "type" not in self.model_fields_set:
            return f" (type is {self.type} where it is left out; write type: {meant})"
        return did_you_mean(self.type, BUILT_IN_TYPES)

    @field_validator("reward", mode="before")
    @classmethod
    def _one_function(cls, value: Any) -> Any:
        """Raise an error for a list of functions, which says how one function returns several rewards."""
        if isinstance(value, list):
            raise PydanticCustomError(
                "string_type",
                'must name one function; for several rewards return {"reward": SUM, "parts": {NAME: NUMBER, ...}} for each completion',
            )
        return value

    @rule(
        Cel(
            holds="($type == 'reward') == has(self.reward)",
            refusal=(
                "reward must be given exactly when type is `reward`, got type %s and reward %s; set both or neither"
            ),
            values=("$type", "has(self.reward) ? self.reward : 'null'"),
            field="reward",
        )
    )
    def _reward(self) -> Iterator[str]:
        if (self.type == "reward") != (self.reward is not None):
            yield (
                f"reward must be given exactly when type is `reward`, got type {self.type} and reward {self.reward or 'null'}; set both or neither"
                + self._type_hint("reward")
            )

    @rule(
        Cel(
            holds="$type == 'agent' ? has(self.agent) != has(self.command) : !has(self.agent) && !has(self.command)",
            refusal="exactly one of agent and command must be given when type is `agent`, none else, got type %s, agent %s and command %s; correct it",
            values=(
                "$type",
                "has(self.agent) ? self.agent : 'null'",
                "has(self.command) ? 'given' : 'null'",
            ),
            field="agent",
        )
    )
    def _agent(self) -> Iterator[str]:
        num_given = (self.agent is not None) + (self.command is not None)
        if num_given != (self.type == "agent"):
            yield (
                f"exactly one of agent and command must be given when type is `agent`, none else, got type {self.type}, "
                f"agent {self.agent or 'null'} and command {'null' if self.command is None else 'given'}; correct it"
                + self._type_hint("agent")
            )

    @rule(
        Cel(
            holds=f"$maxTurns == 1 || !($type in {literal(ONE_TURN)})",
            refusal="maxTurns must be 1 with type %s, which ends an episode with its first completion, got %d; remove it, or name a module:Class",
            values=("$type", "$maxTurns"),
            field="maxTurns",
        )
    )
    def _turns_are_taken(self) -> Iterator[str]:
        if self.type in ONE_TURN and self.max_turns > 1:
            yield (
                f"maxTurns must be 1 with type {self.type}, which ends an episode with its first completion, got {self.max_turns}; "
                "remove it, or name a module:Class"
            )

    @rule(
        Cel(
            holds="($type == 'environment_factory') == has(self.factory)",
            refusal="factory must be given exactly when type is `environment_factory`, got type %s and factory %s; set both or neither",
            values=("$type", "has(self.factory) ? self.factory : 'null'"),
            field="factory",
        )
    )
    def _factory(self) -> Iterator[str]:
        if (self.type == "environment_factory") != (self.factory is not None):
            yield (
                f"factory must be given exactly when type is `environment_factory`, got type {self.type} and "
                f"factory {self.factory or 'null'}; set both or neither" + self._type_hint("environment_factory")
            )

    @property
    def calls_model(self) -> bool:
        """Return whether episodes are programs in the env pods, which call the OpenAI endpoint of rollouts."""
        return self.type in PROGRAMS


def unknown_type(env: EnvSpec, extensions: Sequence[str]) -> Iterator[str]:
    """Yield the violation of TYPE_IS_KNOWN, and suggest the known type that is most similar to a misspelled one."""
    if ":" not in env.type and env.type not in KNOWN_TYPES and not extensions:
        yield (
            f"env.type must be one of {', '.join(KNOWN_TYPES)} or module:Class, got {env.type}; correct it, or list in extensions the module "
            f"that registers it{did_you_mean(env.type, KNOWN_TYPES)}"
        )
