"""PPO with a discrete action in one process and one loop, in the manner of CleanRL: the peer of `embodied.py`. Prints JSON.

Hyper-parameters are those of examples/embodied/cartpole.yaml: V(final observation) on truncation, advantages whitened per batch.

    python benchmarks/_plain_ppo.py --id CartPole-v1 --updates 50 --seed 1
"""

import argparse
import json
import time

import gymnasium
import numpy as np
import torch
from _slow_cartpole import SlowCartPole
from torch import nn

GAMMA, LAM, CLIP, ENTROPY, CRITIC, GRAD_CLIP, RATE = 0.99, 0.95, 0.2, 0.01, 0.5, 0.5, 2.5e-4


def layer(inputs, outputs, gain=2**0.5):
    """Return a linear layer with orthogonal weights and no bias."""
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def network(outputs, gain):
    """Return the network of the policy or of the value."""
    return nn.Sequential(layer(4, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, outputs, gain))


def train(make, *, num_envs=8, horizon=128, updates=200, annealed=200, epochs=4, minibatches=4, seed=0):
    """Return (seconds of each update, [returns of the episodes that ended in it])."""
    torch.manual_seed(seed)
    envs = [make() for _ in range(num_envs)]
    obs = np.stack([env.reset(seed=seed * 1000 + index)[0] for index, env in enumerate(envs)])
    actor, critic = network(2, 0.01), network(1, 1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=RATE, eps=1e-5)
    totals, seconds, ended = np.zeros(num_envs), [], []
    shape = (horizon, num_envs)
    states, actions = torch.zeros(*shape, 4), torch.zeros(shape, dtype=torch.int64)
    log_probs, values, rewards, dones = (torch.zeros(shape) for _ in range(4))
    for update in range(updates):
        began, returns_now = time.perf_counter(), []
        optimizer.param_groups[0]["lr"] = RATE * (1 - update / annealed)
        for step in range(horizon):
            states[step] = torch.from_numpy(obs)
            with torch.no_grad():
                choice = torch.distributions.Categorical(logits=actor(states[step]), validate_args=False)
                actions[step] = chosen = choice.sample()
                log_probs[step], values[step] = choice.log_prob(chosen), critic(states[step])[:, 0]
            for index, env in enumerate(envs):
                obs[index], reward, terminated, truncated, _ = env.step(int(chosen[index]))
                totals[index] += reward
                rewards[step, index], dones[step, index] = reward, terminated or truncated
                if terminated or truncated:
                    if not terminated:
                        with torch.no_grad():
                            rewards[step, index] += GAMMA * critic(torch.from_numpy(obs[index]))[0]
                    returns_now.append(float(totals[index]))
                    totals[index], obs[index] = 0.0, env.reset()[0]
        with torch.no_grad():
            following, running = critic(torch.from_numpy(obs))[:, 0], torch.zeros(num_envs)
            advantages = torch.zeros(shape)
            for step in reversed(range(horizon)):
                goes_on = 1.0 - dones[step]
                delta = rewards[step] + GAMMA * following * goes_on - values[step]
                advantages[step] = running = delta + GAMMA * LAM * goes_on * running
                following = values[step]
            targets = (advantages + values).flatten()
            whitened = ((advantages - advantages.mean()) / (advantages.std() + 1e-8)).flatten()
        rows = states.flatten(0, 1), actions.flatten(), log_probs.flatten()
        for _ in range(epochs):
            for chosen in torch.randperm(horizon * num_envs).split(horizon * num_envs // minibatches):
                state, action, old = (row[chosen] for row in rows)
                choice = torch.distributions.Categorical(logits=actor(state), validate_args=False)
                ratio, advantage = (choice.log_prob(action) - old).exp(), whitened[chosen]
                policy = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
                value = 0.5 * (critic(state)[:, 0] - targets[chosen]).square().mean()
                loss = policy - ENTROPY * choice.entropy().mean() + CRITIC * value
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
                optimizer.step()
        seconds.append(time.perf_counter() - began)
        ended.append(returns_now)
    return seconds, ended


def main():
    """Train once and print seconds and returns of each update."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--id", default="CartPole-v1", help="or slow")
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--annealed", type=int, default=200, help="updates until the learning rate is 0")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    make = SlowCartPole if options.id == "slow" else lambda: gymnasium.make(options.id)
    seconds, ended = train(make, updates=options.updates, annealed=options.annealed, seed=options.seed)
    print(json.dumps({"seconds": seconds, "returns": ended, "cpu_seconds": time.process_time()}))


if __name__ == "__main__":
    main()
