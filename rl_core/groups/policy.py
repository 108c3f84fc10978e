"""The base class of workers that hold the policy: the workers of a group with `weights: pulls`.

groups:
- name: scorer
  worker: own:Scorer
  weights: pulls

The actor sends each version of the weights to the members, as to rollouts, and a version is served only when its checksums are right.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import torch

from rl_core.api.errors import DeadlineExceeded, InfrastructureError
from rl_core.rollouts.hf.generic import compute_head_in_float32, empty_transformers_model, folder_tensors
from rl_core.rollouts.model_files import read_config
from rl_core.rollouts.pausing_target import pausing
from rl_core.rollouts.policy_target import PolicyWeightTarget
from rl_core.rollouts.weight_methods import WeightMethods
from rl_core.weights.receiver_state import ReceiverState


class PolicyWorker(WeightMethods):
    """A worker with the causal language model of the job and the trainer's weights. A subclass uses the model inside `policy`.

    Callers may call the methods of the subclass that its `peer_methods` names; those of this class must stay in it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Keep `config`, the mapping of the group in the job. The model is built by `init_worker`, which the runner calls."""
        self.config = config
        self._model: Any = None
        self._served = -1
        """Version that is served; -1 while none is."""
        self._in_use = asyncio.Lock()
        """Held while the model is used, and until that ends before its weights change."""
        self._changed = asyncio.Event()
        """Set, and replaced by a new event, when another version is served or none any more."""

    def init_worker(self) -> None:
        """Build the model and the receiver of its weights. Does nothing when called again."""
        if self._model is not None:
            return
        if self.job is None:
            raise InfrastructureError("a worker that holds the policy must be a member of a job, got none")
        spec = self.job.spec
        self._model = empty_transformers_model(
            read_config(self.files), dtype=getattr(torch, spec.model.dtype), device=self.device
        )
        if spec.model.float32_head:
            compute_head_in_float32(self._model)
        self._build_receiver(spec, pausing(PolicyWeightTarget(partial(folder_tensors, self._model)), self._pause))

    async def start_serving(self) -> None:
        """Report the version that is served: the hub has forgotten that of a member that lost its connection."""
        self._report_version()

    @asynccontextmanager
    async def policy(self, version: int | None = None, *, seconds: float) -> AsyncIterator[Any]:
        """Yield the model with the weights of `version`, which do not change inside the block. One block runs at a time.

        `version` None means the version that is served. Waits up to `seconds` for it, also where the member is still joining; raises
        DeadlineExceeded when it does not come, and InfrastructureError when the weights are newer already. Compute in a thread
        (`asyncio.to_thread`), so that messages go on.
        """
        try:
            async with asyncio.timeout(seconds):
                while True:
                    while not self._serves(version):
                        await self._changed.wait()
                    await self._in_use.acquire()
                    if self._serves(version):
                        break
                    self._in_use.release()  # an update began while the block waited for its turn
        except TimeoutError as error:
            description = "weights" if version is None else f"version {version} of the weights"
            raise DeadlineExceeded(
                f"{self.identity.name} must serve {description} within {seconds:g} s, it is at {self._served}"
            ) from error
        try:
            if version is not None and self._served != version:
                raise InfrastructureError(
                    f"{self.identity.name} must serve version {version} of the weights, got {self._served}; ask for that one"
                )
            yield self._model
        finally:
            self._in_use.release()

    async def on_new_epoch(self, epoch: int) -> None:
        """Hold no version until one of the restarted trainer is verified."""
        if self._weights is not None:
            self._weights.set_epoch(epoch)

    async def close(self) -> None:
        """Stop receiving. May be called again."""
        await self._close_receiver()

    def status(self) -> dict[str, Any]:
        """Return version and digest of the weights, and the state of their receiver."""
        return self._weights_status()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _serves(self, version: int | None) -> bool:
        """Return whether verified weights are served, of `version` or a newer one."""
        return self._served >= (version or 0)

    async def _pause(self, deadline: float) -> None:
        """Wait until the model is not used any more. Raises DeadlineExceeded after `deadline` seconds."""
        try:
            async with asyncio.timeout(deadline), self._in_use:
                pass
        except TimeoutError as error:
            raise DeadlineExceeded(f"the use of the model must end within {deadline:g} s, it goes on") from error

    def _on_weights(self, state: ReceiverState, version: int, digest: str) -> None:
        self._served = version if state is ReceiverState.SERVING else -1
        super()._on_weights(state, version, digest)
        self._changed.set()
        self._changed = asyncio.Event()
