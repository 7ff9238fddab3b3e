"""Overlap at equal mean steps: the best line between two settings, and the best real mixture of two, of rules and of orders.

histograms.jsonl, of each setting: overlap = sum_j min(parts_j, most_j); `parts` of a mixture are the mixture of `parts`.
"""

import json
from pathlib import Path

import numpy as np

lines = [json.loads(line) for line in (Path(__file__).parent / "histograms.jsonl").read_text().splitlines()]
most = {line["of"]: np.array(line["most"]) for line in lines if "most" in line}


def best(points, most, m):
    """(line, mixture, the two that are mixed) of mean steps at most m."""
    steps, parts = np.array([p["steps"] for p in points]), np.array([p["parts"] for p in points])
    line = mixed = (0.0, "")
    for a in np.flatnonzero(steps <= m + 1e-9):
        for w in (*np.linspace(0, 1, 21), None):  # the part of the other one; None: what makes m steps with a slower one
            others = np.flatnonzero((steps > m) if w is None else (steps <= m + 1e-9))
            share = (m - steps[a]) / (steps[others] - steps[a]) if w is None else np.full(len(others), w)
            alone = [np.minimum(part, most).sum(-1) for part in (parts[a], parts[others])]
            of_line = (1 - share) * alone[0] + share * alone[1]
            both = (1 - share)[:, None] * parts[a] + share[:, None] * parts[others]
            of_both = np.minimum(both, most).sum(-1)
            names = [f"{points[a]['policy']} @ {points[a]['cap']}, {points[b]['policy']} @ {points[b]['cap']}" for b in others]
            line, mixed = max([line, *zip(of_line, names, strict=True)]), max([mixed, *zip(of_both, names, strict=True)])
    return 100 * line[0], 100 * mixed[0], mixed[1]


for of in most:
    print(f"\n{of}\n\n| mean steps | rules: line | mixture | order: line | mixture | which rules |\n|---|---|---|---|---|---|")
    points = [line for line in lines if line["of"] == of and "parts" in line]
    sides = {seed: [p for p in points if p["seed"] == seed] for seed in (None, 0, 1, 2)}
    fastest = max(min(p["steps"] for p in side) for side in sides.values())
    for m in (1.5, 2, 2.5, 3, 3.5, 4, 5, 6):
        if m >= fastest - 0.01:
            rules, *orders = (best(side, most[of], max(m, fastest)) for side in sides.values())
            line, mixture = (np.mean([order[i] for order in orders]) for i in (0, 1))
            print(f"| {m} | {rules[0]:.1f} | {rules[1]:.1f} | {line:.1f} | {mixture:.1f} | {rules[2]} |")

rng = np.random.default_rng(0)
print("\nA perfect sampler, mean and standard deviation of 20,000 simulations\n")
for bins, draws, operations, wrong in ((16, 1000, 1, 0.0), (16, 1000, 1, 0.007), (16, 2000, 1, 0.0), (4, 100, 4, 0.0)):
    p = np.append(np.full(bins, (1 - wrong) / bins), wrong)
    h = rng.multinomial(draws, p, size=(20000, operations))[..., :bins] / draws
    found = np.minimum(h, 1 / bins).sum(-1).mean(-1)  # over the random operations
    total = found if operations == 1 else 0.6 + 0.4 * found  # six of ten operations have one answer
    print(f"- {bins} places, {draws} draws, {operations} operations, {wrong} wrong: {total.mean():.3f} +- {total.std():.4f}")
