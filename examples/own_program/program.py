"""Rejection sampling as a program of one's own: sample n answers to each prompt, keep the best one, train on what was kept."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rl_core.api.user_code import import_reference
from rl_core.data.source import read_rows
from rl_core.data.tokenizer import Tokenizer
from rl_core.runner.group_program import GroupProgram
from rl_core.workers.worker import Worker


def exact(prompts, completions, answer, **columns):
    """Return 1 for each completion that is the answer, else 0."""
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


class Model(Worker):
    """A process that holds the model of the job."""

    def __init__(self, config):
        self.config, path = config, self.job.spec.model.path
        self.model, self.tokenizer = AutoModelForCausalLM.from_pretrained(path), Tokenizer.from_folder(path)

    def load(self, weights):
        """Use other weights; None: those of the model's folder."""
        if weights is not None:
            self.model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.items()})


class Sampler(Model):
    """Generates and scores."""

    def best_of(self, task):
        """Return, for each row of the task, the rewards of its n samples and the token ids of the best one."""
        self.load(task["weights"])
        torch.manual_seed(task["seed"])
        reward, n, end = import_reference(self.config["reward"], field="reward"), task["n"], self.tokenizer.eos_token_id
        limits, found = {"max_new_tokens": self.config["maxNewTokens"], "eos_token_id": end, "pad_token_id": end}, []
        for row in task["rows"]:
            prompt = self.tokenizer(row["prompt"])["input_ids"]
            rows = self.model.generate(torch.tensor([prompt]), do_sample=True, num_return_sequences=n, **limits)
            samples = [[*ids[: ids.index(end)], end] if end in ids else ids for ids in rows[:, len(prompt) :].tolist()]
            texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in samples]
            rewards = reward([row["prompt"]] * n, texts, answer=[row["answer"]] * n)
            found.append({"prompt": prompt, "best": samples[int(np.argmax(rewards))], "rewards": rewards})
        return found


class Learner(Model):
    """Trains."""

    def fit(self, task):
        """Take optimizer steps on the likelihood of the best samples; return the new weights."""
        self.load(task["weights"])
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config["learningRate"])
        for _ in range(self.config["epochs"]):
            optimizer.zero_grad()
            for kept in task["kept"]:
                ids = torch.tensor([kept["prompt"] + kept["best"]])
                labels = torch.where(torch.arange(ids.shape[1]) < len(kept["prompt"]), -100, ids)
                (self.model(input_ids=ids, labels=labels).loss / len(task["kept"])).backward()
            optimizer.step()
        return {name: value.numpy() for name, value in self.model.state_dict().items()}


class BestOfN(GroupProgram):
    """The loop. Its weights are in a file of the output folder, which each checkpoint names."""

    def __init__(self, run, saving, members):
        super().__init__(run, saving, members)
        self.rows, self.weights = read_rows(run.job.spec.data.train, field="data.train"), {}
        saving.register("weights", self)

    def state_dict(self):
        """Write the weights; return the name of their file."""
        np.savez(self.run.output / (name := f"weights-{self.progress.step}.npz"), **self.weights)
        return {"file": name}

    def load_state_dict(self, state):
        """Read the weights of a checkpoint."""
        self.weights = dict(np.load(self.run.output / state["file"]))

    def loop(self):
        """Sample, keep, train."""
        spec, tasks = self.applied.spec.algorithm, 4
        for step in self.steps():
            with step as metrics:
                first, weights = self.progress.step * spec.prompts_per_step, self.weights or None
                rows = [self.rows[(first + i) % len(self.rows)] for i in range(spec.prompts_per_step)]
                shared = {"n": spec.group_size, "weights": weights, "seed": spec.seed + first}
                sampling = [shared | {"rows": rows[i::tasks]} for i in range(tasks)]
                found = [best for part in self.each("sampler", "best_of", sampling) for best in part]
                if kept := [best for best in found if max(best["rewards"]) > 0]:
                    (self.weights,) = self.each("learner", "fit", [{"kept": kept, "weights": weights}])
                metrics["reward/mean"] = float(np.mean([best["rewards"] for best in found]))
                metrics["reward/best"] = float(np.mean([max(best["rewards"]) for best in found]))
