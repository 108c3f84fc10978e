r"""Final answers in model text: finding them, and comparing numbers exactly. Standard library only.

An answer is the last balanced `\boxed{...}`, else the text after the last `####`, else the last number.
"""

import re
from fractions import Fraction

_MINUS = "\u2212"
"""The minus sign of typeset text, read as a hyphen."""
_MAX_DIGITS = 400
"""Longer digit strings are compared as text: exact arithmetic on them would cost what a hostile completion likes."""
_DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
_FRACTION_COMMAND = re.compile(r"([+-]?)\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_NUMBER = re.compile(
    r"(?:(?<![\w.)}])-)?"
    r"(?:\\[dt]?frac\{[^{}]*\}\{[^{}]*\}"
    r"|\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:/\d+(?:\.\d+)?)?)"
)
_BRACE = re.compile(r"\\boxed\{|[{}]")
_NOISE = re.compile(r"\\[$,! ]|[$\s]")


def extract_answer(response: str) -> str | None:
    """Return the final answer in `response` as written there; None where there is none."""
    marked = _marked_answer(response)
    if marked is not None:
        return marked
    numbers = _NUMBER.findall(response.replace(_MINUS, "-"))
    return numbers[-1] if numbers else None


def same_answer(answer: str, expected: str) -> bool:
    r"""Return whether two answers agree: numbers and fractions exactly, everything else as case-folded text.

    Dollar signs, spaces, thousands commas, a closing period or percent sign do not count. `expected` may itself be a
    worked solution that ends in `\boxed{...}` or `#### ...`.
    """
    marked = _marked_answer(expected)
    left, right = _normal(answer), _normal(expected if marked is None else marked)
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
    """Return the content of the last `boxed` command whose braces balance; one pass over the braces."""
    open_braces: list[tuple[int, bool]] = []
    span: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):
        if brace.group() != "}":
            open_braces.append((brace.end(), brace.group() != "{"))
        elif open_braces:
            start, is_boxed = open_braces.pop()
            if is_boxed and (span is None or start > span[0]):
                span = start, brace.start()
    return None if span is None else text[span[0] : span[1]]


def _normal(text: str) -> str:
    text = _NOISE.sub("", text.replace(_MINUS, "-")).rstrip(".")
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
