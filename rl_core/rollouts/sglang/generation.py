"""`SGLangGeneration`: the SGLang engine as rollouts see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.rollouts.generation import GenerationConfig
from rl_core.rollouts.row_generation import RowGeneration
from rl_core.rollouts.sglang.engine import SGLangEngine


class SGLangGeneration(RowGeneration):
    """Generates with a `SGLangEngine`. Samples of one prompt share its computed prefix."""

    honours_seeds = False

    def __init__(
        self,
        engine: SGLangEngine,
        config: GenerationConfig | Mapping[str, Any] | None = None,
        *,
        tokenizer: Any,
        **options: Any,
    ) -> None:
        """`options` as of `RowGeneration`."""
        self.engine = engine
        super().__init__(
            engine,
            config,
            backend="sglang",
            tokenizer=tokenizer,
            max_seq_len=engine.max_seq_len,
            eos_token_ids=engine.eos_token_ids,
            **options,
        )
