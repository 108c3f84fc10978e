r"""Final answers in model text: finding them, and comparing numbers exactly. Standard library only.

An answer is the last balanced `\boxed{...}`, else the text after the last `####`, else the last number.
"""

import re
from fractions import Fraction

_MAX_DIGITS = 400
"""Longer digit strings are compared as text: exact arithmetic on them would cost what a hostile completion likes."""
_DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
_FRACTION_COMMAND = re.compile(r"([+-]?)\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_NUMBER = re.compile(
    r"(?<![\d.])-?\\[dt]?frac\{[^{}]*\}\{[^{}]*\}"
    r"|(?:(?<![\w.)}])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+(?:\.\d+)?)?"
)
_NOISE = re.compile(r"\\[$,! ]|[$\s]")


def extract_answer(response: str) -> str | None:
    """Return the final answer in `response` as written there; None where there is none."""
    marked = _marked_answer(response)
    if marked is not None:
        return marked
    numbers = _NUMBER.findall(response)
    return numbers[-1] if numbers else None


def same_answer(found: str, expected: str) -> bool:
    r"""Return whether two answers agree: numbers and fractions exactly, everything else as case-folded text.

    Dollar signs, spaces, thousands commas, a closing period or percent sign do not count. `expected` may itself be a
    worked solution that ends in `\boxed{...}` or `#### ...`.
    """
    marked = _marked_answer(expected)
    left, right = _normal(found), _normal(expected if marked is None else marked)
    left_value, right_value = _value(left), _value(right)
    if left_value is not None and right_value is not None:
        return left_value == right_value
    return left == right and left != ""


def _marked_answer(text: str) -> str | None:
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    _, mark, tail = text.rpartition("####")
    if not mark or not tail.strip():
        return None
    return tail.strip().splitlines()[0]


def _last_boxed(text: str) -> str | None:
    """Return the content of the last `boxed` command whose braces balance."""
    command = "\\boxed{"
    start, stop = text.rfind(command), len(text)
    while start >= 0:
        content = _balanced(text, start + len(command))
        if content is not None:
            return content
        stop = start
        start = text.rfind(command, 0, stop)
    return None


def _balanced(text: str, start: int) -> str | None:
    """Return `text` from `start` up to the brace that closes one opened before it."""
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def _normal(text: str) -> str:
    text = _NOISE.sub("", text.replace("\u2212", "-")).rstrip(".")
    text = text.removesuffix("%").removesuffix("\\").rstrip(".")
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return text.casefold()


def _value(text: str) -> Fraction | None:
    """Return the number that a normalised answer is, exactly; None for other text or a division by zero."""
    command = _FRACTION_COMMAND.fullmatch(text)
    if command:
        sign, top, bottom = command.groups()
        value = _quotient(top, bottom)
        return -value if value is not None and sign == "-" else value
    top, slash, bottom = text.partition("/")
    return _quotient(top, bottom) if slash else _decimal(text)


def _quotient(top: str, bottom: str) -> Fraction | None:
    numerator, denominator = _decimal(top), _decimal(bottom)
    return numerator / denominator if numerator is not None and denominator else None


def _decimal(text: str) -> Fraction | None:
    text = text.replace(",", "") if _THOUSANDS.fullmatch(text) else text
    return Fraction(text) if len(text) <= _MAX_DIGITS and _DECIMAL.fullmatch(text) else None
