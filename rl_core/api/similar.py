"""Finds the known name that a misspelled one is meant to be."""

import difflib
from collections.abc import Iterable

SIMILAR = 0.7
"""Least similarity (difflib's ratio) of a name that is suggested."""
ABBREVIATION = 4
"""Most characters of a name whose first letter must be right for another one to be suggested."""
SHORT = 3
"""Least length of a name that is suggested because one begins with the other, as `env` for `environment`."""


def most_similar(name: str, known: Iterable[str]) -> str:
    """Return the name of `known` of which `name` is most likely a misspelling; "" for none.

    Short names with another first letter are other names: `sapo` is not meant to be `gspo`.
    """
    choices = [choice for choice in known if len(name) > ABBREVIATION or choice[:1] == name[:1]]
    return next(iter(difflib.get_close_matches(name, choices, n=1, cutoff=SIMILAR)), "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the name of `known` that is most similar to `name`, else one that it begins with or that begins with it; "" for none.

    A name of several words must begin with the whole words: `datasetConfig` does not begin with `data`.
    """
    choices = list(known)
    if close := most_similar(name, choices):
        return close
    prefixes = [
        choice
        for choice in choices
        if min(len(choice), len(name)) >= SHORT and name.startswith(choice) and _ends_a_word(name, len(choice))
    ]
    if prefixes:
        return max(prefixes, key=len)
    return next((choice for choice in choices if len(name) >= SHORT and choice.startswith(name)), "")


def _ends_a_word(name: str, length: int) -> bool:
    """Return whether a word of `name`, in camelCase or snake_case, ends after `length` characters, or `name` is a single word."""
    return (name.isalpha() and name[1:].islower()) or not name[length : length + 1].islower()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean NEAREST?)`, to be added to an error about `name`; "" when it is known, and when no known name is near."""
    choices = list(known)
    match = "" if name in choices else name.lower() if name.lower() in choices else nearest(name, choices)
    return f" (did you mean {match}?)" if match else ""
