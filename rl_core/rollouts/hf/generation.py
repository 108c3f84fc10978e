"""`HFGeneration`: the HF engine as rollouts see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.rollouts.generation import GenerationConfig
from rl_core.rollouts.hf.engine import HFEngine
from rl_core.rollouts.hf.loop import EngineLoop
from rl_core.rollouts.row_generation import RowGeneration


class HFGeneration(RowGeneration):
    """Generates with an `HFEngine` on a thread of its own."""

    def __init__(
        self,
        engine: HFEngine | EngineLoop,
        config: GenerationConfig | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """An EngineLoop may be shared by several generations. `options` as of `RowGeneration`."""
        self.loop = engine if isinstance(engine, EngineLoop) else EngineLoop(engine)
        """The engine's thread."""
        self.engine = self.loop.engine
        super().__init__(
            self.loop,
            config,
            backend="hf",
            tokenizer=self.engine.tokenizer,
            max_seq_len=self.engine.max_seq_len,
            eos_token_ids=self.engine.eos_token_ids,
            **options,
        )
