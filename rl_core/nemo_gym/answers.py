"""The answer of a NeMo-Gym agent to one row: which answers are failures, and the message log of an answer that is none.

An answer holds the output of the Responses API: items of the policy (messages, function calls) and of the environment (outputs of
functions, messages of the user). The last item that the policy made in a turn carries the token ids of the whole turn. Invariant: every
token of a log was read or sampled by the policy as the answer states it; nothing is tokenized again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.api.errors import RolloutDataFailure, shown

ROW_ID = "_row_id"
"""Field of a row with its name within the job: `{group}_g{index}_a{attempt}`."""
TOKEN_KEYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""Fields of an output item with the tokens of a turn."""
POLICY_ITEMS = frozenset({"function_call", "custom_tool_call", "reasoning"})
"""Types of output items that the policy makes, besides messages of the assistant."""


class GymProtocolFailure(RolloutDataFailure, ValueError):
    """A NeMo-Gym server sent an answer that the protocol does not allow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFailure:
    """Why a row has no answer. The row may be sent again."""

    reason: str
    """What happened, with the HTTP status and the beginning of the server's body if there was one."""


def is_masked(answer: Mapping[str, Any]) -> bool:
    """Return whether the environment excludes the row from training: by `mask_sample`, at the top or in `instance_config`."""
    config = answer.get("instance_config")
    return bool(answer.get("mask_sample")) or (isinstance(config, Mapping) and bool(config.get("mask_sample")))


def failure_of(answer: Mapping[str, Any]) -> RowFailure | None:
    """Return the failure that `answer` reports instead of an episode; None if it reports none.

    An answer that is masked or has a `failure_kind` holds a whole episode without a usable reward, and is no failure in this sense.
    """
    kind = answer.get("_ng_failure_class")
    if not kind or is_masked(answer) or answer.get("failure_kind"):
        return None
    stage, message = answer.get("_ng_failure_stage"), answer.get("_ng_failure_message")
    return RowFailure(reason=f"the agent reports {shown(kind)} at stage {shown(stage)}: {shown(message)}")


def row_result(answer: Mapping[str, Any], tokenizer: Any = None) -> dict[str, Any]:
    """Return `{message_log, input_message_log, full_result}` of `answer`; `tokenizer` (None: contents are empty) decodes generations.

    Tokens are lists, and `full_result` is the answer without them. Raises GymProtocolFailure for an answer without tokens or with malformed
    ones, and RolloutDataFailure if a turn lacks its tokens or its prompt does not begin with the tokens of the turns before.
    """
    response = answer.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, Sequence) or not all(isinstance(item, Mapping) for item in output):
        raise GymProtocolFailure(f"an answer must have response.output, a list of objects, got {shown(response)}")
    log: list[dict[str, Any]] = []
    path: list[int] = []
    for turn, item in enumerate(_turns(output, incomplete=is_incomplete(answer))):
        prompt, generated, logprobs = _tokens(item, turn)
        if prompt[: len(path)] != path:
            position = next((i for i, (a, b) in enumerate(zip(path, prompt, strict=False)) if a != b), len(prompt))
            raise RolloutDataFailure(
                f"Non-contiguous messages found: the prompt of turn {turn} must begin with the {len(path)} tokens before it, got another "
                f"token at position {position}; serve the model by an endpoint that keeps the ids of earlier turns"
            )
        log.append({"role": "user", "content": "", "token_ids": prompt[len(path) :]})
        text = "" if tokenizer is None else tokenizer.decode(generated, skip_special_tokens=True)
        log.append({"role": "assistant", "content": text, "token_ids": generated, "generation_logprobs": logprobs})
        path = prompt + generated
    if not log:
        raise GymProtocolFailure(
            f"an answer must have an output item with generation_token_ids, got {len(output)} items without; have the model server return "
            "token ids"
        )
    return {"message_log": log, "input_message_log": [dict(log[0])], "full_result": _without_tokens(answer)}


def is_incomplete(answer: Mapping[str, Any]) -> bool:
    """Return whether a limit cut the last model call of the episode."""
    response = answer.get("response")
    if not isinstance(response, Mapping):
        return False
    return bool(response.get("incomplete_details")) or response.get("status") == "incomplete"


def _turns(output: Sequence[Mapping[str, Any]], *, incomplete: bool) -> list[Mapping[str, Any]]:
    """Return the items with tokens, one per turn. Raises RolloutDataFailure for a turn without tokens.

    Where the context has no room for another turn, the servers end an `incomplete` episode by an empty message: it was never sampled.
    """
    turns: list[Mapping[str, Any]] = []
    pending: list[Mapping[str, Any]] = []
    for item in output:
        if item.get("generation_token_ids"):
            turns.append(item)
            pending = []
        elif _is_policy(item):
            pending.append(item)
        elif pending:
            break
    if pending and not (turns and incomplete and pending[-1] is output[-1] and not any(map(_says_something, pending))):
        raise RolloutDataFailure(
            f"every turn must have generation_token_ids, got none at turn {len(turns)} ({shown(pending[-1].get('type'))}); have the model "
            "server return token ids"
        )
    return turns


def _is_policy(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    return kind in POLICY_ITEMS or (kind == "message" and item.get("role") == "assistant")


def _says_something(item: Mapping[str, Any]) -> bool:
    content = item.get("content") or []
    parts = [content] if isinstance(content, str) else content
    texts = [part.get("text") or part.get("refusal") if isinstance(part, Mapping) else part for part in parts]
    return item.get("type") != "message" or any(texts)


def _tokens(item: Mapping[str, Any], turn: int) -> tuple[list[int], list[int], list[float]]:
    """Return the prompt ids, generated ids and log-probabilities of the turn with the index `turn`."""
    prompt, generated = _ids(item, "prompt_token_ids", turn), _ids(item, "generation_token_ids", turn)
    logprobs = item.get("generation_log_probs")
    if not isinstance(logprobs, list) or not all(type(value) in (int, float) for value in logprobs):
        raise GymProtocolFailure(
            f"generation_log_probs of turn {turn} must be a list of numbers, got {shown(logprobs)}"
        )
    if len(logprobs) != len(generated):
        raise GymProtocolFailure(
            f"generation_log_probs of turn {turn} must have one entry per generated token, {len(generated)}, got {len(logprobs)}"
        )
    return prompt, generated, logprobs


def _ids(item: Mapping[str, Any], key: str, turn: int) -> list[int]:
    ids = item.get(key)
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise GymProtocolFailure(f"{key} of turn {turn} must be a list of token ids, got {shown(ids)}")
    return ids


def _without_tokens(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `answer` without the tokens of its turns, which the message log holds."""
    response = answer["response"]
    output = [{key: value for key, value in item.items() if key not in TOKEN_KEYS} for item in response["output"]]
    other_fields = {key: value for key, value in answer.items() if key != "response"}
    return {**copy.deepcopy(other_fields), "response": {**response, "output": output}}
