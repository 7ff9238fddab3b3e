"""How fast training examples come from the cache of the task `text`, and how much memory that takes.

    python benchmarks/loader.py                 # 10^5, 10^6 and 10^7 examples: a few minutes and 2 GB of disk
    python benchmarks/loader.py --examples 100000

One process, as in training: the order of the examples, their tokens, the padded batch.  A batch of `--batch`
sequences is as long as its longest.  Memory is what the process holds itself (RssAnon); mapped files are the system's.
Bars: 2 million tokens per second, and memory that does not grow with the number of examples.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from unmask.files import fingerprint
from unmask.tasks.text.shards import Visits, read_cache, write_cache

BAR = 2e6  # tokens per second
FLAT = 64.0  # MB that memory may differ by


def sequences(rows: int, mean: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Sequences of 1 to 2 * mean - 1 tokens, made in blocks."""
    draw = np.random.default_rng(seed)
    for first in range(0, rows, 10_000):
        count = min(10_000, rows - first)
        lengths = draw.integers(1, 2 * mean, count)
        tokens = draw.integers(0, 4096, lengths.sum(), dtype=np.uint16)
        yield from np.split(tokens, np.cumsum(lengths)[:-1])


def memory() -> float:
    """MB that this process holds itself."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status tells no RssAnon: this benchmark needs Linux")


def measure(folder: Path, rows: int, mean: int, batch: int, bucket: int, seconds: float) -> dict[str, float]:
    started = time.perf_counter()
    write_cache(folder, sequences(rows, mean), 4096, {})
    written = time.perf_counter() - started
    cache = read_cache(folder, lambda path: fingerprint(path)["sha256"])
    assert cache is not None
    visits = Visits(rows, 65536, 0, cache.lengths, bucket)
    tokens = places = update = 0
    most = memory()
    started = time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        positions = update * batch + np.arange(batch)
        chosen = visits.at(positions)
        lengths = cache.lengths(chosen)
        padded = torch.from_numpy(cache.first(chosen, int(lengths.max()), 0))
        tokens, places, update = tokens + int(lengths.sum()), places + padded.numel(), update + 1
        if update % 50 == 0:
            most = max(most, memory())
    return {
        "examples": rows,
        "tokens_per_second": round(tokens / spent),
        "padding_share": round(1 - tokens / places, 4),
        "memory_mb": round(max(most, memory()), 1),
        "seconds_to_write_the_cache": round(written, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--mean-length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, help="add the records to this file, one object per line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'examples':>10} {'buckets':>8} {'tokens/s':>12} {'padding':>8} {'memory MB':>10} {'cache made in s':>16}")
    found = []
    for rows in options.examples:
        for bucket in (0, options.batch):
            folder = Path(tempfile.mkdtemp(prefix="unmask-loader-")) / "cache"
            try:
                record = measure(folder, rows, options.mean_length, options.batch, bucket, options.seconds)
            finally:
                shutil.rmtree(folder.parent)
            found.append({**record, "bucket": bucket})
            print(
                f"{rows:>10} {bucket:>8} {record['tokens_per_second']:>12,} {record['padding_share']:>8.3f} "
                f"{record['memory_mb']:>10} {record['seconds_to_write_the_cache']:>16}",
                flush=True,
            )
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in found)
    slowest = min(record["tokens_per_second"] for record in found)
    grown = max(record["memory_mb"] for record in found) - min(record["memory_mb"] for record in found)
    print(f"slowest {slowest:,} tokens/s (bar {BAR:,.0f}); memory differs by {grown:.0f} MB (bar {FLAT:.0f})")
    if slowest < BAR or grown > FLAT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
