"""`spec.data`: one data set of prompts, or several that are mixed."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import lcm
from typing import Annotated, Literal

from pydantic import Field

from rl_core.api.base import Spec, rule
from rl_core.api.bounds import Pattern
from rl_core.api.cel import Cel, exactly_one_given, unique

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
    """Prompts: .jsonl or .parquet, fetched for `hf://owner/name[@revision]/FILE` and `hf://owner/name?split=S[&config=C]`, or generated for
    `reasoning-gym://task?size=N&seed=S`.
    """

    train: Annotated[str, Field(min_length=1)] | None = None
    """Training prompts; null = those of sets."""
    validation: str | None = None
    """Validation prompts; null = no validation."""
    sets: Annotated[list[DataSetSpec], Field(min_length=1, max_length=16)] | None = None
    """Several data sets, mixed by weight, instead of train and validation; null = one."""
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
        exactly_one_given("data", ("train", "sets")),
        Cel(
            holds="!has(self.validation) || !has(self.sets)",
            refusal="validation must be part of an entry of sets where sets is given, got both; move it there",
            field="validation",
        ),
    )
    def _one_form(self) -> Iterator[str]:
        num_given = (self.train is not None) + (self.sets is not None)
        if num_given != 1:
            yield f"data must have exactly one of train, sets, got {num_given}; give one"
        if self.validation is not None and self.sets is not None:
            yield "validation must be part of an entry of sets where sets is given, got both; move it there"

    @rule(
        unique("sets", "name"),
        Cel(
            holds="!has(self.sets) || self.sets.exists(one, has(one.train))",
            refusal="sets must have an entry with train, got none; add it",
            field="sets",
        ),
        Cel(
            holds=(
                "!has(self.sets) || self.sets.all(one, !has(one.train) || has(one.weight)) "
                "|| !self.sets.exists(one, has(one.weight))"
            ),
            refusal="sets must have a weight in each entry with train or in none, got it in some; add or remove weights",
            field="sets",
        ),
    )
    def _sets_fit(self) -> Iterator[str]:
        names = [data_set.name for data_set in self.sets or ()]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            yield f"sets must have unique names, got {repeated} more than once; change one"
        trained = [data_set.weight is not None for data_set in self.sets or () if data_set.train is not None]
        if names and not trained:
            yield "sets must have an entry with train, got none; add it"
        if any(trained) and not all(trained):
            yield "sets must have a weight in each entry with train or in none, got it in some; add or remove weights"

    def parts(self) -> Iterator[tuple[str, str, "DataSpec"]]:
        """Yield (name, field, settings) of each data set, such as (`gsm8k`, `data.sets.0`, ...), the settings as those of a single one.

        The name of a single one is empty.
        """
        if self.sets is None:
            yield "", "data", self
        for index, data_set in enumerate(self.sets or ()):
            values = {name: getattr(data_set, name) for name in ("train", "validation")}
            values |= {name: getattr(data_set, name) or getattr(self, name) for name in ("prompt_key", "answer_key")}
            yield data_set.name, f"data.sets.{index}", self.model_copy(update=values | {"sets": None})


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return integers in the ratio of `weights`, which are read as the decimal numbers that they print as."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]
