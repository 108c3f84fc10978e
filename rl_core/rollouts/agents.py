"""`AgentRolloutImpl`: runs prompt groups whose episodes are driven by a program of the user that calls the rollout's own endpoint.

    open a session -> environment step: an env worker runs the program -> calls at the endpoint are recorded in the session
                                                                       -> its reward -> close the session -> sample

Everything but the middle is that of `multi_turn`: seeds, groups, deadlines, failures. A program that fails, is late or never calls the
model fails its sample; it is never a reward of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rl_core.api.errors import ConfigError, GymTransportError, RolloutDataFailure, RolloutTimeout
from rl_core.api.records import Completion, FinishReason, PromptGroupRecord
from rl_core.api.rewards import EXPLANATION
from rl_core.messages.agents import BRANCHES, MAX_CALLS, MODEL_NAME, REQUEST, RESULT, AgentRequest, AgentResult
from rl_core.rollouts.chat_template import ChatTemplate
from rl_core.rollouts.endpoint.episodes import AgentEpisode, Episodes
from rl_core.rollouts.endpoint.server import Endpoint
from rl_core.rollouts.endpoint.session import Branch, Turn
from rl_core.rollouts.episode import Episode, group_name
from rl_core.rollouts.failed_sample import attach_sample
from rl_core.rollouts.message_log import as_token_tensor, common_prefix
from rl_core.rollouts.multi_turn import AsyncRolloutImpl
from rl_core.rollouts.sampling import sample_seed
from rl_core.rollouts.scoring import one_reward

if TYPE_CHECKING:
    from rl_core.api.job import RLJobSpec
    from rl_core.data.tokenizer import Tokenizer
    from rl_core.rollouts.engine import Engine

TIME_SHARE = 0.9
"""Share of the deadline of an environment step that a program gets, so that its own failure arrives before that of the step."""


class AgentEndpoint:
    """The endpoint of a rollout worker, and what the runs of its groups need of it."""

    def __init__(self, spec: RLJobSpec, tokenizer: Tokenizer, engine: Engine, template: ChatTemplate) -> None:
        """Create the endpoint by which agent programs of the job `spec` generate with `engine`.

        Raises ConfigError if there is no chat template.
        """
        sampling = spec.rollout.sampling
        if not template.present:
            raise ConfigError(
                "the OpenAI endpoint needs a chat template, got a tokenizer without one; save it with the tokenizer or set data.chatTemplate"
            )
        max_calls = int(spec.env.options.get("maxCalls", MAX_CALLS))  # ProgramConfig checks its bounds
        self._episodes = Episodes(template, max_seq_len=engine.max_seq_len, max_calls=max_calls)
        self._server = Endpoint(self._episodes, tokenizer, model=MODEL_NAME, max_new_tokens=sampling.max_new_tokens)
        self._branches = spec.env.options.get("branches", BRANCHES)
        self._max_staleness = spec.algorithm.max_staleness
        self._host = ""

    async def start(self, host: str, port: int = 0) -> None:
        """Listen on `host`, unless it does so already; `port` 0 takes a free one."""
        if not self._host:
            await self._server.start(host, port)
            self._host = host

    async def close(self) -> None:
        """Stop listening; idempotent."""
        await self._server.close()

    @property
    def base_url(self) -> str:
        """Return the address that OpenAI clients take."""
        return f"http://{self._host}:{self._server.port}/v1"

    def rollout_options(self, *, training: bool) -> dict[str, Any]:
        """Return the arguments of `RolloutManager` that make it run agent programs. Validation has one sample per episode."""
        return {
            "branches": self._branches if training else "last",
            "implementation": AgentRolloutImpl,
            "episodes": self._episodes,
            "base_url": lambda: self.base_url,
            "model": MODEL_NAME,
            "max_staleness": self._max_staleness if training else 0,
        }


class AgentRolloutImpl(AsyncRolloutImpl):
    """Runs prompt groups of agent programs."""

    def __init__(
        self,
        *arguments: Any,
        episodes: Episodes,
        base_url: Callable[[], str],
        model: str,
        branches: str = BRANCHES,
        max_staleness: int = 0,
        **options: Any,
    ) -> None:
        """Serve sessions of `episodes` at `base_url()` as the model `model`; other arguments are those of `AsyncRolloutImpl`.

        A run that goes on from another rollout may have tokens that are `max_staleness` versions old.

        `branches` says what part of an episode's reward each branch of its conversation gets: the `whole`, an `equal` part, or only the
        `last` branch is a sample.
        """
        super().__init__(*arguments, **options)
        self._branches = branches
        self._max_staleness = max_staleness
        self._episodes, self._base_url, self._model = episodes, base_url, model

    async def run_rollout(self, input_sample: Mapping[str, Any]) -> PromptGroupRecord:
        """Return the group of `input_sample`; its prompt is what the first inputs of all samples have in common."""
        locate = getattr(self.task_to_env.get(input_sample.get("task_name")), "locate", None)
        if locate is not None and input_sample.get("resumed"):
            names = [f"{group_name(input_sample)}_g{index}" for index in range(self.num_generations_per_prompt)]
            await locate(names)
        record = await super().run_rollout(input_sample)
        first_message = record.completions[0].message_log[0]
        record.prompt = [{**first_message, "token_ids": common_prefix(record.completions)}]
        return record

    async def _run_samples(
        self, input_sample: Mapping[str, Any], traj_idx: int
    ) -> list[tuple[Completion, dict[str, Any]]]:
        """Return the branches of episode `traj_idx`, the one that ended last first."""
        group_id, attempt = group_name(input_sample), input_sample.get("attempt", 1)
        seed = sample_seed(self.seed, group_id, traj_idx, attempt)
        episode = Episode(
            input_sample, seed=seed if self._generator.honours_seeds else None, key=f"{group_id}_g{traj_idx}"
        )
        agent = self._episodes.open(episode.key, self._generator, seed=seed, greedy=self.greedy)
        episode.env_info = {**(episode.env_info or {}), REQUEST: self._request(agent, input_sample)}
        location = f"prompt_idx={episode.prompt_idx} traj_idx={traj_idx}"
        try:
            env_return = await self._env_step(episode)
            result: AgentResult = (env_return.metadata[0] or {})[RESULT]
            _check(result, agent, location)
        except Exception as error:
            if branches := agent.session.branch_samples():
                self._fill(episode, branches[0], None)
            attach_sample(error, traj_idx, episode.log)
            raise
        finally:
            self._episodes.close(agent)
            self._release(episode)
        _, reward = one_reward(env_return.rewards, self._env(episode), location)
        branches = agent.session.branch_samples()[: 1 if self._branches == "last" else None]
        share = 1.0 / len(branches) if self._branches == "equal" else 1.0
        samples = []
        for index, branch in enumerate(branches):
            sample = Episode(input_sample, seed=episode.seed, key=episode.key)
            sample.reward_components = {name: share * value for name, value in result["parts"].items()}
            sample.add_reward(None if reward is None else share * reward)
            self._fill(sample, branch, agent.cut if index == 0 else None)
            if text := result.get("explanation"):
                sample.env_info = {EXPLANATION: text}
            # These counters are per episode, so only its first sample reports them.
            session = agent.session if index == 0 else None
            metrics = sample.metrics() | {name: getattr(session, name, 0) for name in ("branches", "unspliced")}
            completion = sample.completion(default_version=self.policy_version)
            completion.metrics["reward_share"] = share
            samples.append((completion, metrics))
        return samples

    def _request(self, agent: AgentEpisode, sample: Mapping[str, Any]) -> AgentRequest:
        return AgentRequest(
            base_url=self._base_url(),
            api_key=agent.key,
            model=self._model,
            seconds=TIME_SHARE * self.env_step_seconds,
            attempt=sample.get("attempt", 1),
            resumed=sample.get("resumed", False),
            oldest_version=self.policy_version - self._max_staleness,
        )

    def _fill(self, episode: Episode, branch: Branch, cut_reason: str | None) -> None:
        """Write a branch into `episode`: the tokens that the policy read and those that it sampled, in turns.

        `cut_reason` is the reason why the branch could not be continued; None if it was not cut off.
        """
        episode.log, episode.env_info = [], None
        line = branch.turns
        length = 0
        episode.times = [line[0].times[0]]
        for turn, following, trains in zip(line, [*line[1:], None], branch.trains, strict=True):
            length += len(turn.prompt)
            assistant = self._assistant(turn.output)
            if not trains:
                assistant["token_loss_mask"] = torch.zeros(len(turn.output.ids))
            _add_turn(episode, turn, assistant, length)
            length += len(turn.output.ids)
            episode.times.append(turn.times[1])
            if following is not None:
                episode.times.append(following.times[0])
        episode.mark()
        finish_reason = line[-1].output.finish_reason
        episode.cut = finish_reason if FinishReason(finish_reason).truncated else cut_reason
        episode.truncated = episode.cut is not None
        episode.terminated = not episode.truncated

    def _aggregate_rollout_metrics(
        self, completions: Sequence[Completion], all_sample_metrics: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the group's metrics, with the numbers of branches and of calls that could not be spliced."""
        metrics = super()._aggregate_rollout_metrics(completions, all_sample_metrics)
        return metrics | {name: sum(row[name] for row in all_sample_metrics) for name in ("branches", "unspliced")}


def _check(result: AgentResult, agent: AgentEpisode, sample: str) -> None:
    """Raise the failure of a run that has no reward, or none that belongs to the recorded calls."""
    if result["late"]:
        raise RolloutTimeout(f"{result['error']} ({sample}); raise runtime.deadlines.envStep")
    if result["unavailable"]:
        raise GymTransportError(f"{result['error']} ({sample})")
    if result["error"]:
        raise RolloutDataFailure(f"{result['error']} ({sample})")
    if agent.run != result["run"] or not agent.session.turns:
        raise RolloutDataFailure(
            f"an agent must call the model at its base_url before it returns a reward, it did not ({sample}); "
            "a reward without tokens trains nothing"
        )
    recorded = [turn.output.ids for turn in agent.session.turns]
    for turn_index, ids in enumerate(result["generated"]):
        if ids not in recorded:
            raise RolloutDataFailure(
                f"the tokens of turn {turn_index} of an episode must be those of a call in its session, got {len(ids)} others ({sample}); "
                "the reward is that of another episode"
            )


def _add_turn(episode: Episode, turn: Turn, assistant: dict[str, Any], input_length: int) -> None:
    """Append a call to the log: the ids that the policy read, then the ids that it sampled."""
    role = str(turn.messages[-1]["role"]) if turn.messages else "user"
    episode.log.append({"role": role, "content": _sent_text(turn), "token_ids": as_token_tensor(turn.prompt)})
    if turn.parent is not None:
        episode.env_tokens += len(turn.prompt)
    output = turn.output
    episode.add_response(
        {**assistant, "content": turn.text},
        input_length,
        {
            "gen_leader_worker_idx": output.worker,
            "gen_tokens": len(output.ids),
            "truncated": FinishReason(output.finish_reason).truncated,
            "finish_reason": output.finish_reason,
        },
    )


def _sent_text(turn: Turn) -> str:
    """Return what the program sent in this call, each message under its role where there are several; empty for a call with token ids."""
    if len(turn.messages) == 1:
        return str(turn.messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in turn.messages)
