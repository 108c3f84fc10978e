"""Finds rows that end: by stop ids for all rows at once, and by stop strings in the decoded text, across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

REPLACEMENT = "\ufffd"
"""The character that tokenizers decode incomplete UTF-8 to."""


class StopIds:
    """Sets of ids that end a row, as one bool table [sets, V]."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._index_of_set: dict[frozenset[int], int] = {}
        self._table = np.zeros((0, vocab_size), dtype=np.bool_)

    def set_index(self, ids: frozenset[int]) -> int:
        """Return the index of the set `ids`, which is added at first use; ids outside the vocabulary are ignored."""
        if ids not in self._index_of_set:
            row = np.zeros((1, self._vocab_size), dtype=np.bool_)
            row[0, [token for token in ids if 0 <= token < self._vocab_size]] = True
            self._index_of_set[ids] = len(self._table)
            self._table = np.concatenate([self._table, row])
        return self._index_of_set[ids]

    def hits(self, sets: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return [n] bool: whether each token is in its row's set."""
        hits: np.ndarray = self._table[sets, tokens]
        return hits


def longest_stop(strings: Sequence[str]) -> int:
    """Return a number of tokens that contains the longest of `strings`: each token adds at least one byte of text unless it is special."""
    return 4 * max(len(string.encode()) for string in strings) + 16


class StopStrings:
    """Finds a stop string as soon as a token completes it.

    Only a token whose text contains the last character of a stop string, or part of a character, can complete it. The text of a token id
    is looked up once, and only rows with such a token are decoded.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text: dict[int, str] = {}

    def completed(self, strings: Sequence[str], ids: Sequence[int]) -> bool:
        """Return whether the last of the generated `ids` completes one of `strings`. An earlier token would have ended the row."""
        text = self._token_text(ids[-1])
        if REPLACEMENT not in text and not any(string[-1] in text for string in strings):
            return False
        decoded = self._decode(ids[-longest_stop(strings) :])
        return any(string in decoded for string in strings)

    def _token_text(self, token: int) -> str:
        """Return the text of `token`, repeated: some tokenizers drop a leading space of the first token only."""
        if token not in self._text:
            self._text[token] = self._decode([token, token])
        return self._text[token]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
