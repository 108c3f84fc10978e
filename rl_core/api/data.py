"""`spec.data`: one data set of prompts, or several that are mixed."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import lcm
from typing import Annotated, Literal

from pydantic import Field

from rl_core.api.base import Spec, rule
from rl_core.api.bounds import Pattern
from rl_core.api.cel import Cel, unique

Template = Annotated[str, Field(max_length=65536)]
Column = Annotated[str, Field(min_length=1, max_length=256)]
Reference = Annotated[str, Field(min_length=1, max_length=1024)]
SetName = Annotated[
    str,
    Field(max_length=32),
    Pattern(
        regex=r"[a-zA-Z0-9]([-a-zA-Z0-9_.]*[a-zA-Z0-9])?",
        rule="at most 32 letters, digits, -, _ and .",
        way_out="rename it",
    ),
]
"""Name of a data set, a part of the names of its metrics."""


class DataSetSpec(Spec):
    """One of several data sets."""

    name: SetName
    """Name in metrics; rows without a column data_source get it as that column."""
    train: Reference | None = None
    """Training prompts; null = only validation."""
    validation: Reference | None = None
    """Validation prompts, with metrics of their own; null = none."""
    weight: float | None = Field(None, gt=0, le=1e6)
    """Relative share of the training prompts; null in all sets = by number of prompts."""
    prompt_key: Column | None = None
    """null = data.promptKey."""
    answer_key: Column | None = None
    """null = data.answerKey."""

    @rule(
        Cel(
            holds="has(self.train) || has(self.validation)",
            refusal="a data set must have train or validation, got neither; add one",
        )
    )
    def _has_prompts(self) -> Iterator[str]:
        if self.train is None and self.validation is None:
            yield "a data set must have train or validation, got neither; add one"

    @rule(
        Cel(
            holds="!has(self.weight) || has(self.train)",
            refusal="weight is for training prompts, got no train; remove weight or add train",
            field="weight",
        )
    )
    def _weight_has_prompts(self) -> Iterator[str]:
        if self.weight is not None and self.train is None:
            yield "weight is for training prompts, got no train; remove weight or add train"


class DataSpec(Spec):
    """Prompts. A file is .jsonl or .parquet; `hf://owner/name[@revision]/FILE` or `?config=C&split=S` is fetched first;
    `reasoning-gym://task?size=N&seed=S` is generated.
    """

    train: Annotated[str, Field(min_length=1)] | None = None
    """Training prompts; null = those of sets."""
    validation: str | None = None
    """Validation prompts; null = no validation."""
    sets: Annotated[list[DataSetSpec], Field(max_length=64)] = []
    """Several data sets, mixed by weight, instead of train and validation."""
    prompt_key: str = "prompt"
    """Column with the prompt: text or a list of {role, content}."""
    answer_key: str = "answer"
    """Column with the ground truth."""
    chat: bool = False
    """Make each text prompt a user message, rendered with the chat template; false: it is tokenized as it is."""
    chat_template: Template | None = None
    """Jinja chat template for message lists; null = the tokenizer's."""
    system_prompt: Template | None = None
    """System message placed before the messages of each prompt; null = none."""
    shuffle: bool = True
    """Shuffle each data epoch with algorithm.seed."""
    max_bad_rows: int = Field(0, ge=0, lt=2**31)
    """Most malformed lines of a file, and most rows that cannot be used, that are logged and left out; with more the job is refused."""
    on_overlong: Literal["drop", "refuse"] = "drop"
    """Prompts that leave no room for a completion. drop: leave them out and count them; refuse: end the run."""

    @rule(
        Cel(
            holds="has(self.train) != (has(self.sets) && self.sets.size() > 0)",
            refusal="exactly one of train and sets must be given; write train for one data set, sets for several",
        )
    )
    def _one_form(self) -> Iterator[str]:
        if (self.train is None) != bool(self.sets):
            yield "exactly one of train and sets must be given; write train for one data set, sets for several"

    @rule(
        Cel(
            holds="!has(self.validation) || !has(self.sets) || self.sets.size() == 0",
            refusal="validation must not be given beside sets; give the set that it belongs to, or one more set, its own validation",
            field="validation",
        )
    )
    def _validation_of_sets(self) -> Iterator[str]:
        if self.validation is not None and self.sets:
            yield "validation must not be given beside sets; give the set that it belongs to, or one more set, its own validation"

    @rule(
        unique("sets", "name"),
        Cel(
            holds="!has(self.sets) || self.sets.size() == 0 || self.sets.exists(one, has(one.train))",
            refusal="at least one of sets must have train, got none; add it",
            field="sets",
        ),
        Cel(
            holds=(
                "!has(self.sets) || self.sets.all(one, !has(one.train) || has(one.weight)) "
                "|| !self.sets.exists(one, has(one.weight))"
            ),
            refusal="weight must be given for each of sets with train, or for none; add or remove weights",
            field="sets",
        ),
    )
    def _sets_fit(self) -> Iterator[str]:
        names = [one.name for one in self.sets]
        if twice := next((name for name in names if names.count(name) > 1), None):
            yield f"sets must have unique names, got {twice} more than once; change one"
        trained = [one for one in self.sets if one.train is not None]
        if self.sets and not trained:
            yield "at least one of sets must have train, got none; add it"
        if 0 < sum(one.weight is not None for one in trained) < len(trained):
            yield "weight must be given for each of sets with train, or for none; add or remove weights"

    def parts(self) -> list[tuple[str, str, "DataSpec"]]:
        """Return (name, field, settings) of each data set, such as (`gsm8k`, `data.sets.0`, ...), the settings as those of a single one.

        The name of a single one is empty.
        """
        if not self.sets:
            return [("", "data", self)]
        own = self.model_dump(exclude={"sets"})
        return [
            (
                one.name,
                f"data.sets.{index}",
                DataSpec.model_construct(
                    **own
                    | {
                        "train": one.train,
                        "validation": one.validation,
                        "prompt_key": one.prompt_key or self.prompt_key,
                        "answer_key": one.answer_key or self.answer_key,
                    },
                    sets=[],
                ),
            )
            for index, one in enumerate(self.sets)
        ]


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return integers in the ratio of `weights`, which are read as the decimal numbers that they print as."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]
