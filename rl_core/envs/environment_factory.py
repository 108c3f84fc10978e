"""The environment `environment_factory`: episodes of an environment class of TRL, as it is, against the rollout's OpenAI endpoint.

The class has a method `reset(**columns)` that returns None or a text, which is appended to the last message of the prompt; its other public
methods are the tools of the model, described by their signatures and docstrings; `get_reward()` returns the reward of the episode:

    reset -> reply of the model -> its tool calls -> reply -> ... -> a reply without a tool call -> get_reward

Everything is done in the order and form of TRL's `GRPOTrainer`, so that the same class sees the same calls and the model the same messages:
a tool that raises, or that does not exist, answers `{'error': ...}`, and results of async tools follow those of others.
"""

import asyncio
import http.client
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from rl_core.api.errors import ConfigError
from rl_core.api.user_code import describe, import_reference
from rl_core.envs.base import parse_config
from rl_core.envs.programs import ProgramConfig, ProgramEnvironment

Message = dict[str, Any]
OWN_METHODS = ("reset", "get_reward")
FULL = frozenset({"context_length_exceeded", "too_many_calls"})
"""Error codes of the endpoint that end an episode: the limit of the sequence or of the calls of the sample is reached."""
EMPTY_PROMPT = [{"role": "user", "content": ""}]
"""Prompt of a row without a prompt. The text that `reset` returns is appended to it."""


class FactoryConfig(ProgramConfig):
    """Options of `environment_factory`."""

    factory: str = Field(min_length=1)
    """`module:Class`, or `module:NAME` of a mapping of names to classes; `env.factory` in a job."""
    max_tool_calling_iterations: int | None = Field(None, ge=0)
    """Most replies of an episode whose tools are run; null = no limit but maxCalls."""


class EnvironmentFactory(ProgramEnvironment):
    """Runs one episode per row. Instances are built once and reset for each episode; one episode uses an instance at a time."""

    config_model = FactoryConfig

    def __init__(self, cfg: Any = None) -> None:
        """Build an instance of each class. Raises ConfigError for classes that cannot be built or have no `reset` and `get_reward`."""
        self.config = parse_config(FactoryConfig, cfg)
        super().__init__(f"environment {self.config.factory}")
        imported = import_reference(self.config.factory, field="env.factory")
        self._by_name = isinstance(imported, Mapping)
        factories = dict(imported) if isinstance(imported, Mapping) else {None: imported}
        self._kinds = {name: _Kind(factory, self.config.factory) for name, factory in factories.items()}

    async def call(self, row: dict[str, Any], *, base_url: str, api_key: str, model: str) -> Any:
        """Return the reward of an episode of `row`."""
        model_client = ModelClient(base_url, api_key, model)
        loop = asyncio.get_running_loop()
        return await self.in_thread(lambda: self._episode(row, model_client, loop))

    def _episode(self, row: dict[str, Any], client: "ModelClient", loop: asyncio.AbstractEventLoop) -> Any:
        kind = self._kind(row)
        instance = kind.take()
        columns = {key: value for key, value in row.items() if key != "environment"} if self._by_name else row
        messages = first_messages(row.get("prompt", EMPTY_PROMPT), instance.reset(**columns))
        tools = Tools(instance, kind.tools, loop)
        with client:
            reply = client.reply(messages, kind.schemas)
            iterations = 0
            while reply.get("tool_calls") and iterations != self.config.max_tool_calling_iterations:
                messages += [reply, *tools.run(reply["tool_calls"])]
                try:
                    reply = client.reply(messages, kind.schemas)
                except Refusal as refusal:
                    if refusal.code not in FULL:
                        raise
                    break
                iterations += 1
        reward = instance.get_reward()
        if inspect.iscoroutine(reward):
            reward = wait_for(reward, loop)
        kind.give_back(instance)  # The instance of a failed episode is not reused.
        return reward

    def _kind(self, row: Mapping[str, Any]) -> "_Kind":
        name = row.get("environment") if self._by_name else None
        if name not in self._kinds:
            raise ValueError(
                f"column environment must be one of {sorted(map(str, self._kinds))}, got {name!r}; correct the row"
            )
        return self._kinds[name]


class _Kind:
    """One environment class, with the schemas of its tools and its unused instances."""

    def __init__(self, factory: Callable[[], Any], location: str) -> None:
        self._factory = factory
        try:
            instance = factory()
        except Exception as error:  # User code may raise anything.
            raise ConfigError(f"env.factory: {location} could not be built: {describe(error)}; correct it") from error
        methods = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
        missing = [name for name in OWN_METHODS if name not in methods]
        if missing:
            raise ConfigError(
                f"env.factory: {location} must define {' and '.join(missing)}, got methods {methods}; add what is missing"
            )
        self.tools = [name for name in methods if not name.startswith("_") and name not in OWN_METHODS]
        self.schemas = [schema_of(getattr(instance, name), location) for name in self.tools]
        self._free = [instance]

    def take(self) -> Any:
        """Take an instance out of the pool for one episode. Creates a new one if all are in use."""
        try:
            return self._free.pop()  # `pop` is atomic, which is needed because episodes run in threads.
        except IndexError:
            return self._factory()

    def give_back(self, instance: Any) -> None:
        """Put `instance` back into the pool after its episode. A later `take` returns it."""
        self._free.append(instance)


def schema_of(tool: Callable[..., Any], where: str) -> dict[str, Any]:
    """Return the JSON schema of a tool by its signature and docstring, as chat templates get it from TRL. Raises ConfigError."""
    try:
        from transformers.utils.chat_template_utils import get_json_schema
    except ImportError as error:
        raise ConfigError(
            "env.type environment_factory: the package transformers describes tools, got none; give env.image one that has it"
        ) from error
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # The library raises exceptions of its own that are no ValueError.
        raise ConfigError(f"env.factory: {where}: a tool needs types and a docstring: {describe(error)}") from error
    return schema


def first_messages(prompt: Any, observation: Any) -> list[Message]:
    """Return the messages of the prompt, with the result of `reset` appended to the last one. A prompt that is a text is a user message."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if observation is None:
        return messages
    content = messages[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*messages[:-1], {**messages[-1], "content": content + observation}]


class Tools:
    """The tools of one instance."""

    def __init__(self, instance: Any, names: list[str], loop: asyncio.AbstractEventLoop) -> None:
        self._tools = {name: getattr(instance, name) for name in names}
        self._loop = loop

    def run(self, calls: list[Mapping[str, Any]]) -> list[Message]:
        """Run tool calls, and return one message per call. The messages of async tools come last."""
        messages: list[Message] = []
        waiting: list[tuple[str, str, Coroutine[Any, Any, Any]]] = []
        for call in calls:
            name, key = call["function"]["name"], call["id"]
            try:
                if name not in self._tools:
                    raise ValueError(f"Tool {name} not found.")
                result = self._tools[name](**json.loads(call["function"]["arguments"]))
            except Exception as error:  # noqa: BLE001 - the error is the tool's answer to the model
                messages.append(_tool_message(name, key, {"error": str(error)}))
            else:
                if inspect.iscoroutine(result):
                    waiting.append((name, key, result))
                else:
                    messages.append(_tool_message(name, key, result))
        if waiting:
            results = wait_for(_all([work for _, _, work in waiting]), self._loop)
            for (name, key, _), result in zip(waiting, results, strict=True):
                messages.append(
                    _tool_message(name, key, {"error": str(result)} if isinstance(result, Exception) else result)
                )
        return messages


async def _all(work: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*work, return_exceptions=True)


def wait_for(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
    """Run the coroutine `work` on the event loop `loop` and wait for its result. Called in another thread than that of the loop."""
    return asyncio.run_coroutine_threadsafe(work, loop).result()


def _tool_message(name: str, key: str, result: Any) -> Message:
    content = result if isinstance(result, list) else str(result)
    return {"role": "tool", "name": name, "tool_call_id": key, "content": content}


class Refusal(Exception):
    """A call that the endpoint refused."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.code = code


class ModelClient:
    """Calls the model of the rollout; a context manager that closes the connection."""

    def __init__(self, base_url: str, api_key: str, model: str) -> None:
        address = urlsplit(base_url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port)
        self._path = f"{address.path}/chat/completions"
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._model = model

    def __enter__(self) -> "ModelClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def reply(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
        """Return the model's reply to `messages`. Raises Refusal."""
        body = {"model": self._model, "messages": messages} | ({"tools": tools} if tools else {})
        self._connection.request("POST", self._path, json.dumps(body), self._headers)
        with self._connection.getresponse() as response:
            answer = json.loads(response.read())
        if response.status != http.HTTPStatus.OK:
            error = answer.get("error", {})
            raise Refusal(
                f"the endpoint refused a call with status {response.status}: {error.get('message')}", error.get("code")
            )
        reply: Message = answer["choices"][0]["message"]
        return reply
