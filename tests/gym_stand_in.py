"""Servers that speak the protocol of nemo-gym 0.7.0 as it was recorded: a head server, and an agent with one tool and a verifier.

    python -m tests.gym_stand_in MODEL_URL PORT     # serve until killed; `/run` scores by `share_of_a`

The agent calls the model as gym's `vllm_model` does: with its own API key for all rows, token ids asked for as `token_id:N`, the row's
`metadata.extra_body` merged into the body, and the tokens of earlier turns repeated in the messages.
"""

import asyncio
import json
import sys

import aiohttp
from aiohttp import web

AGENT = "calculator_simple_agent"
TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def share_of_a(row, output):
    """Return the share of the letter a in what the model said."""
    text = "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
    return text.count("a") / max(len(text), 1)


class Gym:
    """The servers. `steps` are taken by the calls of `/run` in turn, the last again: None (the episode) or a coroutine function."""

    def __init__(self, model_url, *, verify=share_of_a, steps=(None,), turns=4):
        self.model_url, self.verify, self.turns = model_url, verify, turns
        self.steps = list(steps)
        self.ready = True
        self.rows, self.cancelled = [], 0
        self.refused = None
        """The answer to a call whose key was refused: the model server then sends no further one."""

    def app(self):
        """Return the application that is both servers."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/readyz", self._readyz),
                web.get("/server_instances", self._instances),
                web.post("/run", self._run),
            ]
        )
        return app

    async def start(self, port=0):
        """Listen; return what stops it and the address."""
        runner = web.AppRunner(self.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner.cleanup, f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _readyz(self, request):
        return web.json_response({}, status=200 if self.ready else 503)

    async def _instances(self, request):
        url = f"http://127.0.0.1:{request.url.port}"
        return web.json_response([{"process_name": AGENT, "server_type": "responses_api_agents", "url": url}])

    async def _run(self, request):
        row = await request.json()
        self.rows.append(row)
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        try:
            if step is not None:
                return await step(self, request, row)
            return web.json_response(await self.episode(row))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        except ModelError as error:
            return web.json_response(f"Hit an exception calling an inner server: {error}", status=500)

    async def episode(self, row):
        """Run a row and return its answer."""
        params = row["responses_create_params"]
        messages, output, incomplete = list(params["input"]), [], None
        async with aiohttp.ClientSession() as http:
            for _ in range(self.turns):
                message, reason, tokens = await self._model(http, params, messages)
                if reason == "length":
                    incomplete = {"reason": "max_output_tokens"}
                items = [
                    {
                        "type": "function_call",
                        "name": call["function"]["name"],
                        "arguments": call["function"]["arguments"],
                        "call_id": call["id"],
                    }
                    for call in message.get("tool_calls") or []
                ]
                if message["content"]:
                    text = {"type": "output_text", "text": message["content"]}
                    items.insert(0, {"type": "message", "role": "assistant", "content": [text]})
                items = items or [{"type": "message", "role": "assistant", "content": []}]
                items[-1] |= tokens
                output += items
                calls = [item for item in items if item["type"] == "function_call"]
                if incomplete or not calls:
                    break
                messages.append(message | tokens)
                for call in calls:
                    result = json.dumps(eval(json.loads(call["arguments"])["expression"], {"__builtins__": {}}))
                    output.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
                    messages.append({"role": "tool", "tool_call_id": call["call_id"], "content": result})
        response = {"output": output, "incomplete_details": incomplete}
        response["status"] = "incomplete" if incomplete else "completed"
        verdict = {"reward": self.verify(row, output), "mask_sample": False, "failure_kind": None}
        return {"responses_create_params": params, "response": response, **verdict}

    async def _model(self, http, params, messages):
        """Return the message of a model call, why it ended and its tokens, as gym's model server reads them."""
        extra = json.loads((params.get("metadata") or {}).get("extra_body") or "{}")
        tools = [{"type": "function", "function": {"name": tool["name"]}} for tool in params.get("tools") or []]
        body = {"messages": messages, "model": "policy", "logprobs": True, "top_logprobs": 0}
        body |= {"return_tokens_as_token_ids": True, **({"tools": tools} if tools else {})}
        headers = {"Authorization": "Bearer none"}
        if self.refused is not None:
            raise ModelError(f"skipping further requests: {self.refused}")
        async with http.post(f"{self.model_url}/chat/completions", json=extra | body, headers=headers) as response:
            answer = await response.json()
        if response.status in (401, 403):
            self.refused = answer
        if response.status != 200:
            raise ModelError(f"{response.status}: {answer}")
        choice = answer["choices"][0]
        entries = choice["logprobs"]["content"]
        named = [int(entry["token"].removeprefix("token_id:")) for entry in entries]
        assert named == choice["token_ids"], "the ids of an answer must be those of its log-probabilities"
        values = (answer["prompt_token_ids"], named, [entry["logprob"] for entry in entries])
        return choice["message"], choice["finish_reason"], dict(zip(TOKENS, values, strict=True))


class ModelError(Exception):
    """The model endpoint refused a call."""


async def serve(model_url, port):
    """Serve until the process is killed."""
    await Gym(model_url).start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
