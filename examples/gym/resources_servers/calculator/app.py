"""A resources server of NeMo-Gym: one tool that multiplies, and a reward for the right product in the last message.

Nothing here knows of the training: it is written for nemo-gym 0.7.0.
"""

from fastapi import FastAPI
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from pydantic import BaseModel, ConfigDict


class Calculation(BaseModel):
    """Arguments of the tool."""

    expression: str


class Row(BaseVerifyRequest):
    """A row of the data with the episode."""

    model_config = ConfigDict(extra="allow")
    answer: str


class Verdict(BaseVerifyResponse):
    """The same row with the reward."""

    model_config = ConfigDict(extra="allow")


class Calculator(SimpleResourcesServer):
    """Serves the tool `calculator` and scores episodes."""

    config: BaseResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        """Add the tool to the paths of the server."""
        app = super().setup_webserver()
        app.post("/calculator")(self.calculator)
        return app

    async def calculator(self, body: Calculation) -> int | str:
        """Return the product of an expression like 12*34."""
        try:
            left, right = body.expression.split("*")
            return int(left) * int(right)
        except ValueError:
            return "error"

    async def verify(self, body: Row) -> Verdict:
        """Reward the right product in the last message of the model."""
        texts = [
            part.text
            for item in body.response.output
            if item.type == "message" and item.role == "assistant"
            for part in item.content
            if part.type == "output_text"
        ]
        return Verdict(**body.model_dump(), reward=float(bool(texts) and texts[-1].strip() == body.answer))


if __name__ == "__main__":
    Calculator.run_webserver()
