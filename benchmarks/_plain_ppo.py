"""PPO in one process and one loop, in the manner of CleanRL: the peer of `embodied.py`. Prints JSON.

Hyper-parameters are those of examples/embodied/cartpole.yaml and reach.yaml: V(final observation) on truncation, advantages whitened per
batch, and for reach observations normalized by their statistics before the update.

    python benchmarks/_plain_ppo.py --id CartPole-v1 --updates 50 --seed 1
    python benchmarks/_plain_ppo.py --id reach --updates 49 --annealed 49 --seed 1
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from _slow_cartpole import SlowCartPole
from torch import nn

from rl_core.envs.metaworld import MetaWorld

GAMMA, LAM, CLIP, CRITIC, GRAD_CLIP = 0.99, 0.95, 0.2, 0.5, 0.5


@dataclass
class Task:
    """A simulator and what is particular to its training."""

    make: Callable
    inputs: int = 4
    outputs: int = 2
    continuous: bool = False
    num_envs: int = 8
    horizon: int = 128
    epochs: int = 4
    minibatches: int = 4
    rate: float = 2.5e-4
    entropy: float = 0.01
    scale: float = 1.0
    """Factor of rewards."""


REACH = {"inputs": 39, "outputs": 4, "continuous": True, "num_envs": 4, "horizon": 512, "epochs": 10}
TASKS = {
    "CartPole-v1": Task(lambda: gymnasium.make("CartPole-v1"), scale=0.1),
    "slow": Task(SlowCartPole, scale=0.1),
    "reach": Task(lambda: MetaWorld("reach-v3"), **REACH, minibatches=32, rate=3e-4, entropy=0.0, scale=0.1),
}


def layer(inputs, outputs, gain=2**0.5):
    """Return a linear layer with orthogonal weights and no bias."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def network(inputs, outputs, gain):
    """Return the network of the policy or of the value."""
    return nn.Sequential(layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, outputs, gain))


class Discrete:
    """A policy over classes."""

    def __init__(self, task):
        self.net = network(task.inputs, task.outputs, 0.01)
        self.parameters, self.shape, self.dtype = [*self.net.parameters()], (), torch.int64

    def __call__(self, states):
        return torch.distributions.Categorical(logits=self.net(states), validate_args=False)

    def act(self, env, action):
        return env.step(int(action))


class Continuous(Discrete):
    """A normal distribution whose deviation does not depend on the observation."""

    def __init__(self, task):
        super().__init__(task)
        self.log_std = nn.Parameter(torch.zeros(task.outputs))
        self.parameters.append(self.log_std)
        self.shape, self.dtype = (task.outputs,), torch.float32

    def __call__(self, states):
        normal = torch.distributions.Normal(self.net(states), self.log_std.exp(), validate_args=False)
        return torch.distributions.Independent(normal, 1, validate_args=False)

    def act(self, env, action):
        return env.step(action.numpy().clip(-1, 1))


def train(task, *, updates=200, annealed=200, seed=0):
    """Return (seconds of each update, its processor seconds, [returns of the episodes that ended in it], [whether each had success])."""
    torch.manual_seed(seed)
    num_envs, horizon = task.num_envs, task.horizon
    envs = [task.make() for _ in range(num_envs)]
    begun = num_envs

    def begin(env):
        nonlocal begun
        begun += 1
        return env.reset(seed=seed * 100_003 + begun if task.continuous else None)[0]

    obs = np.stack([env.reset(seed=seed * 1000 + index)[0] for index, env in enumerate(envs)])
    policy, critic = (Continuous if task.continuous else Discrete)(task), network(task.inputs, 1, 1.0)
    parameters = [*policy.parameters, *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=task.rate, eps=1e-5)
    totals, seconds, processor, ended, success = np.zeros(num_envs), [], [], [], []
    reached = [False] * num_envs
    mean, square, count = torch.zeros(task.inputs).double(), torch.zeros(task.inputs).double(), 0
    shape = (horizon, num_envs)
    raw, states = torch.zeros(*shape, task.inputs), torch.zeros(*shape, task.inputs)
    actions = torch.zeros(*shape, *policy.shape, dtype=policy.dtype)

    def seen(state):
        if not count:
            return state
        deviation = (square - mean.square() + 1e-8).sqrt()
        return ((state - mean) / deviation).clamp(-10, 10).float()

    log_probs, values, rewards, dones = (torch.zeros(shape) for _ in range(4))
    for update in range(updates):
        began, returns_now, success_now = (time.perf_counter(), time.process_time()), [], []
        optimizer.param_groups[0]["lr"] = task.rate * (1 - update / annealed)
        for step in range(horizon):
            raw[step] = torch.from_numpy(obs)
            states[step] = seen(raw[step])
            with torch.no_grad():
                choice = policy(states[step])
                actions[step] = chosen = choice.sample()
                log_probs[step], values[step] = choice.log_prob(chosen), critic(states[step])[:, 0]
            for index, env in enumerate(envs):
                obs[index], reward, terminated, truncated, info = policy.act(env, chosen[index])
                totals[index] += reward
                reached[index] |= bool(info.get("success"))
                rewards[step, index], dones[step, index] = reward * task.scale, terminated or truncated
                if terminated or truncated:
                    if not terminated:
                        with torch.no_grad():
                            rewards[step, index] += GAMMA * critic(seen(torch.from_numpy(obs[index])))[0]
                    returns_now.append(float(totals[index]))
                    success_now.append(reached[index])
                    totals[index], reached[index], obs[index] = 0.0, False, begin(env)
        with torch.no_grad():
            following, running = critic(seen(torch.from_numpy(obs)))[:, 0], torch.zeros(num_envs)
            advantages = torch.zeros(shape)
            for step in reversed(range(horizon)):
                goes_on = 1.0 - dones[step]
                delta = rewards[step] + GAMMA * following * goes_on - values[step]
                advantages[step] = running = delta + GAMMA * LAM * goes_on * running
                following = values[step]
            targets = (advantages + values).flatten()
            whitened = ((advantages - advantages.mean()) / (advantages.std() + 1e-8)).flatten()
        rows = states.flatten(0, 1), actions.flatten(0, 1), log_probs.flatten()
        for _ in range(task.epochs):
            for chosen in torch.randperm(horizon * num_envs).split(horizon * num_envs // task.minibatches):
                state, action, old = (row[chosen] for row in rows)
                choice = policy(state)
                ratio, advantage = (choice.log_prob(action) - old).exp(), whitened[chosen]
                gain = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
                value = 0.5 * (critic(state)[:, 0] - targets[chosen]).square().mean()
                loss = gain - task.entropy * choice.entropy().mean() + CRITIC * value
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
                optimizer.step()
        if task.continuous:
            new, size = raw.flatten(0, 1).double(), count + horizon * num_envs
            mean = (mean * count + new.sum(0)) / size
            square, count = (square * count + new.square().sum(0)) / size, size
        seconds.append(time.perf_counter() - began[0])
        processor.append(time.process_time() - began[1])
        ended.append(returns_now)
        success.append(success_now)
    return seconds, processor, ended, success


def main():
    """Train once and print seconds and returns of each update."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--id", default="CartPole-v1", choices=TASKS)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--annealed", type=int, default=200, help="updates until the learning rate is 0")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[options.id]
    found = train(task, updates=options.updates, annealed=options.annealed, seed=options.seed)
    print(json.dumps(dict(zip(("seconds", "processor_seconds", "returns", "success"), found, strict=True))))


if __name__ == "__main__":
    main()
