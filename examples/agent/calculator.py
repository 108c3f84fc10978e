"""An agent: it asks the model for a product, runs the calculator that the model calls, and tells it up to twice that an answer is wrong.

Nothing here knows of the training: the `openai` client, a base URL, an API key. job.yaml calls `run`; command.yaml runs this file as a program.
"""

import json
import os
import sys

from openai import DefaultHttpxClient, OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Multiply two numbers, as in 12*34.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
HTTP = DefaultHttpxClient()
"""Shared by all conversations: one of its own would load certificates each time, which takes 20 ms."""
CALLS, CORRECTIONS = 8, 2
REWARDS = (1.0, 0.5, 0.25)
"""Reward of the right answer at the first, second and third attempt."""


def run(row, base_url, api_key, model):
    """Return the reward of one conversation about `row`, which has `prompt` (messages) and `answer`."""
    messages = list(row["prompt"])
    wrong = 0
    client = OpenAI(base_url=base_url, api_key=api_key, http_client=HTTP, max_retries=0)
    for _ in range(CALLS):
        reply = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        messages.append(reply)
        if reply.tool_calls:
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": calculate(call)} for call in reply.tool_calls
            ]
        elif (reply.content or "").strip() == row["answer"]:
            return {"reward": REWARDS[wrong], "parts": {"first_attempt": float(wrong == 0)}}
        elif wrong == CORRECTIONS:
            break
        else:
            wrong += 1
            messages.append({"role": "user", "content": "wrong"})
    return {"reward": 0.0, "parts": {"first_attempt": 0.0}}


def calculate(call):
    """Return the result of a call of the calculator as text."""
    try:
        left, right = json.loads(call.function.arguments)["expression"].split("*")
        return str(int(left) * int(right))
    except (ValueError, KeyError, AttributeError, TypeError):
        return "error"


if __name__ == "__main__":
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")
    print(json.dumps(run(json.load(sys.stdin), *(os.environ[name] for name in names))))
