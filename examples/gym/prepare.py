"""Make the gym example's model and data: the model of ../agent, and its problems as rows of NeMo-Gym.

The model can call a calculator, but mostly guesses; GRPO finds that calling pays. Everything is seeded and nothing is downloaded. A second
run does nothing where all is there.

    python prepare.py [--output DIR] [--seed N]

It needs torch, transformers and tokenizers, and writes below `--output` only.
"""

import argparse
import json
import runpy
from pathlib import Path

AGENT = Path(__file__).parent.parent / "agent" / "prepare.py"
TOOL = {
    "type": "function",
    "name": "calculator",
    "description": "Multiply two numbers, as in 12*34.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
    "strict": True,
}


def row_of(problem: dict) -> dict:
    """Return a problem with `prompt` and `answer` as a row of NeMo-Gym; a row of NeMo-Gym is returned as it is."""
    if "responses_create_params" in problem:
        return problem
    return {
        "responses_create_params": {"input": problem["prompt"], "tools": [TOOL]},
        "agent_ref": {"type": "responses_api_agents", "name": "calculator_simple_agent"},
        "answer": problem["answer"],
    }


def main() -> None:
    """Parse the command line and make what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder for model/ and data/")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = runpy.run_path(str(AGENT))["prepare"](options.output, seed=options.seed)
    for path in (options.output / "data").glob("*.jsonl"):
        rows = [row_of(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"model: {report['parameters']:,} parameters, loss {report['loss']:.3f} -> {options.output / 'model'}")


if __name__ == "__main__":
    main()
