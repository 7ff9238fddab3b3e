"""python histograms.py OUT EXACT: of `unmask reproduce where-order-matters --out OUT`, and of EXACT/s0, s1, s2, orders of
`remove-random-exact`, what `mixtures.py` reads: overlap = sum_j min(parts_j, most_j), one line for each setting."""

import json
import sys
from pathlib import Path

import torch

from unmask.tasks import make_task

LINES = dict(min_n=4, max_n=32, names=40, seed=0)
TEN = make_task("waiting-lines", operations="all", **LINES)
ONE = make_task("waiting-lines", operations="remove-random", **LINES)


def histogram(task, codes):
    """parts and most, side by side for the operations; where there is one right answer, the valid ones."""
    parts, most = [], []
    for word, asked, right, share in task._by_operation(codes):
        weight = int(asked.sum()) / len(codes)
        if not weight:
            continue
        if word != "shuffle" and "random" not in word:
            parts.append(int(right.sum()) / len(codes))
            most.append(weight)
            continue
        bins = int((torch.tensor(codes) // 100 % 100)[asked].min()) + ("insert" in word)
        counts = torch.zeros(bins) if share is None else share.sum(0)
        parts += (counts / len(codes)).tolist()
        most += [weight / bins] * bins
    return [[round(x, 6) for x in found] for found in (parts, most)]


def settings(run, split, learned):
    records = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    answers = {}
    for line in (run / "verdicts.jsonl").read_text().splitlines():
        chunk = json.loads(line)
        answers.setdefault(chunk["key"], {})[chunk["first"]] = chunk["answers"]
    for record in records:
        spec = record["spec"]
        if spec["split"] == split and (spec["selector"] is not None) == learned:
            chunks = answers[record["key"]]
            yield spec, record["outcome"]["mean_steps"], [code for first in sorted(chunks) for code in chunks[first]]


def write(file, of, task, split, rules, orders):
    for seed, run in enumerate([rules, *orders], start=-1):
        for spec, steps, codes in settings(run, split, learned=seed >= 0):
            parts, most = histogram(task, codes)
            if seed < 0 and of:
                file.write(json.dumps({"of": of, "most": most}) + "\n")
                name, of = of, ""
            found = {"of": name, "policy": spec["policy"], "cap": spec["budget"], "steps": steps}
            file.write(json.dumps(found | {"seed": None if seed < 0 else seed, "parts": parts}) + "\n")


if __name__ == "__main__":
    out, exact = map(Path, sys.argv[1:])
    ten, search = ([out / f"{name}-seed{seed}" for seed in range(3)] for name in ("lines-order", "search"))
    with (Path(__file__).parent / "histograms.jsonl").open("w") as file:
        write(file, "ten operations", TEN, "test", out / "lines", ten)
        write(file, "remove-random, order of all ten", TEN, "remove-random-16", out / "lines", ten)
        write(file, "remove-random, order of the exact posterior", ONE, "remove-random-16", search[0], search)
        write(file, "remove-random, exact denoiser", ONE, "test", exact / "s0", [exact / f"s{seed}" for seed in range(3)])
