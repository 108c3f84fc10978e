"""The reward of this example: the right sum scores 1, a wrong one of the right length its share of right digits."""


def score(prompts, completions, answer):
    """Return one number per completion; `answer` is a column of the data file."""
    return [
        digits_right(completion.strip(), expected) for completion, expected in zip(completions, answer, strict=True)
    ]


def digits_right(text, expected):
    if len(text) != len(expected):
        return 0.0
    return sum(a == b for a, b in zip(text, expected, strict=True)) / len(expected)
