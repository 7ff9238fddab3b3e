"""python starts.py SEED OUT: six starts of an order on `chain` with 80 updates each, the best one trained further.

The best has the highest mean of what `metrics.jsonl` holds as `value` from update 40 on (training sequences)."""

import json
import subprocess
import sys
from pathlib import Path

seed, out = int(sys.argv[1]), Path(sys.argv[2])
here = Path(__file__).parent


def unmask(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "unmask", *map(str, words)], check=True)


def train(recipe: object, run: Path, order_seed: int, *more: str) -> Path:
    settings = [f"seed={order_seed}", f"task.seed={seed}", *more]
    unmask("train", recipe, "--out", run, "--cpu", *(word for each in settings for word in ("--set", each)))
    return run


def value(run: Path) -> float:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = [row["value"] for row in rows if row.get("stage") == "order" and row["update"] >= 40]
    return sum(values) / len(values)


plain = train("chain-self", out / "denoiser", seed, "order.updates=1", "order.warmup=0", "evaluate.examples=8")
starts = [train(here / "start.toml", out / f"start{i}", 1000 * i + seed, f"init={plain}") for i in range(6)]
best = max(starts, key=value)
order = train(here / "further.toml", out / "order", seed, f"init={best}")
rules = [word for rule in ("learned", "learned(deterministic)", "dus", "p2") for word in ("--policy", rule)]
unmask("evaluate", order, "--examples", 1000, "--cpu", *rules, "--steps", 4)
said = {start.name: round(value(start), 4) for start in starts}
print(json.dumps({"seed": seed, "best": best.name, "value": said}))
