"""python search.py: the search for an order of `chain` alone, with gains that are known exactly.

Of a Markov chain with its exact posterior, a mask at distances l and r from its revealed neighbours earns
-H(x_n | x_{n-l}, x_{n+r}) on average, whatever their values. The policy sees only what is masked: it is a small MLP, and
training is that of the recipe. -J in nats per token: lower is better.
"""

import math

import torch
from torch import nn

from unmask.tasks import make_task
from unmask.variational.self_posterior import estimate_self
from unmask.variational.selection import NonEmpty

N, T, B, K = 16, 4, 16, 8
torch.set_num_threads(1)
task, place, selection = make_task("chain"), torch.arange(N), NonEmpty()
powers = [torch.linalg.matrix_power(task._transitions, d) for d in range(N)]
uniform = torch.full((8,), 1 / 8, dtype=torch.float64)


def entropy(p):
    return float(torch.special.entr(p).sum())


earned = torch.zeros(N, N, N)  # [n, l, r]; l = 0 or r = 0: nothing is revealed on that side
for n in range(N):
    for l in range(n + 1):
        for r in range(N - n):
            left = (uniform @ powers[n - l])[:, None] * powers[l] if l else (uniform @ powers[n])[None]
            joint = left[:, :, None] * powers[r][None] if r else left[:, :, None]
            earned[n, l, r] = entropy(joint.sum(1)) - entropy(joint)


def gains(masked):
    left = torch.where(~masked, place, -1).cummax(-1).values
    right = torch.where(~masked, place, N).flip(-1).cummin(-1).values.flip(-1)
    return masked * earned[place.expand_as(masked), torch.where(left < 0, 0, place - left), torch.where(right < N, right - place, 0)]


class Policy(nn.Module):
    def __init__(self, spread=3.0, width=128):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(N + T, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.LayerNorm(width)
        )
        self.out = nn.Linear(width, N)
        nn.init.normal_(self.out.weight, std=spread / width**0.5)
        nn.init.zeros_(self.out.bias)

    def forward(self, masked, t):
        step = nn.functional.one_hot(torch.full((len(masked),), t), T).float()
        return self.out(self.body(torch.cat([masked.float() * 2 - 1, step], -1))) - math.log(t)


def rollouts(policy, rows):
    """g, E[g], log P, whether a mask is left, and the entropy of each step: [T, rows], t = 0 first."""
    masked, steps = torch.ones(rows, N, dtype=torch.bool), []
    for t in reversed(range(T)):
        mu, reveal, expected, log_p, spread = gains(masked), masked, torch.zeros(rows), torch.zeros(rows), torch.zeros(rows)
        if t:
            s = policy(masked, t)
            reveal = selection.sample(s.detach(), masked, torch.rand(rows, N + 1, dtype=torch.float64))
            p, log_p = selection.marginal(s, masked), selection.log_prob(reveal, s, masked)
            yes, no = nn.functional.logsigmoid(s), nn.functional.logsigmoid(-s)
            spread = selection._log_nonempty(s, masked) - torch.where(masked, p * yes + (1 - p) * no, 0).sum(-1)
            expected = (p * mu).sum(-1)
        steps.append(((mu * reveal).sum(-1), expected, log_p, masked.any(-1), spread * masked.any(-1)))
        masked = masked & ~reveal
    return [torch.stack(part[::-1]) for part in zip(*steps)]


def search(seed, updates=400, rate=3e-3, weight=0.0):
    """J after 40 updates and at the end; `weight`: of the entropy, falling to 0 at 70% of the updates."""
    torch.manual_seed(seed)
    policy, early = Policy(), 0.0
    adam = torch.optim.AdamW(policy.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for update in range(updates):
        done = (update - 20) / (updates - 20)
        adam.param_groups[0]["lr"] = rate * (update / 20 if update < 20 else 0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        w = weight * max(0.0, 1 - update / (0.7 * updates))
        g, expected, log_p, holds, spread = (part.view(T, B, K) for part in rollouts(policy, B * K))
        loss = estimate_self(g, expected, log_p, holds, torch.zeros(B), penalty=-w * spread.detach()).loss.mean()
        adam.zero_grad()
        ((loss - w * spread.sum(0).mean()) / N).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        adam.step()
        if update == 40:
            early = value(policy)
    return early, value(policy)


@torch.no_grad()
def value(policy):
    return -float(rollouts(policy, 1024)[0].sum(0).mean()) / N


masked, total = torch.ones(1, N, dtype=torch.bool), 0.0
for stride in (8, 4, 2, 1):
    reveal = masked & (place % stride == 0)
    total, masked = total - float((gains(masked) * reveal).sum()) / N, masked & ~reveal
print(f"dus: {total:.4f}; the entropy, the limit: {task.entropy / N:.4f}\n", flush=True)
recipe = [search(seed) for seed in range(8)]
print("| the recipe, starts 0 to 7 | " + " | ".join(f"{each:.4f}" for each, _ in recipe) + " | after 40 updates")
print("| | " + " | ".join(f"{each:.4f}" for _, each in recipe) + " | after 400\n", flush=True)
for name, how in (
    ("1,200 updates", {"updates": 1200}),
    ("rate 1e-2", {"rate": 1e-2}),
    ("entropy 0.1", {"weight": 0.1}),
    ("entropy 0.3", {"weight": 0.3}),
    ("entropy 0.3, rate 1e-3, 600 updates", {"weight": 0.3, "rate": 1e-3, "updates": 600}),
):
    print(f"| {name} | " + " | ".join(f"{each:.4f}" for each in sorted(search(seed, **how)[1] for seed in range(8))), flush=True)
