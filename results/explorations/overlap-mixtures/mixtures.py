"""Overlap of two settings mixed, by the line between theirs and by the histogram of the mixture, for every pair."""

import json
from pathlib import Path

import numpy as np

points = [json.loads(line) for line in (Path(__file__).parent / "histograms.jsonl").read_text().splitlines()]


def overlap(h):
    return float(np.minimum(h, 1 / 16).sum())


for m in (2.5, 3, 3.5, 4, 5, 6):
    line, mixed = (0.0, ""), (0.0, "")
    for a in points:
        for b in points:
            if a["steps"] > m:
                continue
            weights = np.linspace(0, 1, 5) if b["steps"] <= m else [(m - a["steps"]) / (b["steps"] - a["steps"])]
            for w in weights:
                h = [np.array(one["places"]) / one["draws"] for one in (a, b)]
                name = f"{a['policy']} @ {a['cap']}, {b['policy']} @ {b['cap']}"
                line = max(line, ((1 - w) * overlap(h[0]) + w * overlap(h[1]), name))
                mixed = max(mixed, (overlap((1 - w) * h[0] + w * h[1]), name))
    print(f"| {m} | {100 * line[0]:.1f} | {100 * mixed[0]:.1f} | {mixed[1]} |")

rng = np.random.default_rng(0)
for bins, draws, operations, wrong in ((16, 1000, 1, 0.0), (16, 1000, 1, 0.007), (16, 2000, 1, 0.0), (4, 100, 4, 0.0)):
    p = np.append(np.full(bins, (1 - wrong) / bins), wrong)
    h = rng.multinomial(draws, p, size=(20000, operations))[..., :bins] / draws
    found = np.minimum(h, 1 / bins).sum(-1).mean(-1)  # over the random operations
    total = found if operations == 1 else 0.6 + 0.4 * found  # six of ten operations have one answer
    print(f"{bins} places, {draws} draws, {operations} operations, {wrong} wrong: {total.mean():.3f} +- {total.std():.4f}")
