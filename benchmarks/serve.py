"""Load on `unmask serve`: many clients at once against one at a time, on this machine's loopback.

    python benchmarks/serve.py RUN --cpu --out results/serve/cpu-groups.json     two minutes; RUN: `unmask demo`
    python benchmarks/serve.py RUN --kinds 120 --out results/serve/h200-30m.json on a GPU, where there is one

Five loads of the same requests, the learned order and `top-prob` in 8 steps in turn: one client at a time against a
server whose passes have one row (the best that one at a time can be) and against the server with `--batch` rows,
`--clients` at once against that, and both of the first again.  A client sends its next request when it has the answer
to the last one.
Exit code 1 unless: no error but 429; every answer is, token by token and step by step, that of `Engine.generate` for
the same prompt and seed alone; memory does not grow by 3% from a quarter of the time on; at least 3 times the
requests a second of the best of those that go one at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from unmask.evaluation.evaluate import device_name, revision
from unmask.models.packing import padding_stays
from unmask.runtime import Processes
from unmask.serve.served import Asked, Served
from unmask.serve.worker import State

ENOUGH, GROWTH = 3.0, 1.03
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Load:
    """What came of one load."""

    clients: int
    batch: int
    seconds: float
    answered: int = 0
    refused: int = 0  # with 429
    errors: list[str] = field(default_factory=list)
    wrong: int = 0  # answers that are not those of a sequence alone
    per_second: float = 0.0
    milliseconds: dict[str, float] = field(default_factory=dict)  # of an answer: median, p99
    cpu_ms: float = 0.0  # processor time of the server for an answer: what else the machine does hardly changes it
    memory_mb: list[int] = field(default_factory=list)  # of the server, once a second
    rows_per_step: float = 0.0  # sequences that shared a step of a batch, on average


@contextmanager
def server(run: Path, batch: int, cpu: bool) -> Iterator[tuple[int, int]]:
    """(port, process id)"""
    command = [sys.executable, "-m", "unmask", "serve", str(run), "--port", "0", "--batch", str(batch)]
    process = subprocess.Popen([*command, *["--cpu"] * cpu], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline().split()[4].rpartition(":")[2]), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "SIGTERM did not end the server well"


class Connection:
    """HTTP/1.1 with keep-alive and nothing else: a real client takes more time than the server."""

    def __init__(self, port: int) -> None:
        self.port, self.streams = port, None

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
        return int(lines[0].split()[1]), await reader.readexactly(length)


def processor_seconds(process: int) -> float:
    times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]  # user, system
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def told(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in ("text", "tokens", "steps", "passes", "valid")}


async def load(
    port: int, process: int, clients: int, batch: int, seconds: float, bodies: list[bytes], want: Any
) -> Load:
    found, times, started = Load(clients, batch, seconds), list[float](), time.perf_counter()
    place = iter(range(10**9))

    async def client() -> None:
        connection = Connection(port)
        while time.perf_counter() - started < seconds:
            number, before = next(place) % len(bodies), time.perf_counter()
            try:
                status, content = await asyncio.wait_for(connection.ask("POST", "/v1/generate", bodies[number]), 90)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                found.errors.append(repr(error))
                connection = Connection(port)
                continue
            times.append(time.perf_counter() - before)
            if status == 429:
                found.refused += 1
                await asyncio.sleep(0.05)
            elif status != 200:
                found.errors.append(f"{status}: {content[:200]!r}")
            else:
                found.answered += 1
                found.wrong += told(json.loads(content)) != want[number]

    async def watch() -> None:
        while True:
            pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
            found.memory_mb.append(round(pages * PAGE / 2**20))
            await asyncio.sleep(1)

    counts = []
    watching = asyncio.create_task(watch())
    counts.append((await Connection(port).ask("GET", "/metrics"))[1].decode())
    started, cpu = time.perf_counter(), processor_seconds(process)
    await asyncio.gather(*(client() for _ in range(clients)))
    took = time.perf_counter() - started
    found.cpu_ms = round(1e3 * (processor_seconds(process) - cpu) / max(1, found.answered), 2)
    counts.append((await Connection(port).ask("GET", "/metrics"))[1].decode())
    watching.cancel()
    steps, rows = (
        float.__sub__(*(float(text.split(f"\n{name} ")[1].split("\n")[0]) for text in counts[::-1]))
        for name in ("unmask_batch_steps", "unmask_sequence_steps")
    )
    found.per_second, found.rows_per_step = round(found.answered / took, 1), round(rows / max(1.0, steps), 2)
    cuts = statistics.quantiles(times, n=100) if len(times) > 1 else times * 99
    found.milliseconds = {"median": round(1e3 * cuts[49], 1), "p99": round(1e3 * cuts[98], 1)}
    print(
        f"{clients} clients, batches of {batch}: {found.per_second}/s, {found.milliseconds} ms, CPU {found.cpu_ms} ms",
        flush=True,
    )
    return found


def requests(served: Served, kinds: int) -> list[dict[str, Any]]:
    """Half of them for the learned order, where there is one; a rule of another number of steps in between."""
    rules = [{"policy": "learned" if served.selector is not None else "margin"}, {"policy": "top-prob", "steps": 8}]
    return [{**rules[number % 2], "example": number // 2, "seed": number % 7} for number in range(kinds)]


def alone(served: Served, bodies: list[dict[str, Any]], batch: int) -> list[dict[str, Any]]:
    """The answer to each, from an engine that writes nothing else meanwhile."""
    found, engines = [], dict[Any, Any]()
    with padding_stays():
        for body in bodies:
            request = served.request(Asked(**body))
            job = request.job(lambda state: None, watched=False)
            engine = engines.setdefault(job.lane, job.engine(batch))
            mask, ids = job.attention_mask, torch.tensor([job.id], device=job.device)
            mask = None if mask is None else mask[None].to(job.device)
            out = engine.generate(job.prompt[None].to(job.device), seed=job.seed, ids=ids, attention_mask=mask)
            parts = out.tokens, out.masked, out.reveal_step, out.num_steps, out.num_passes
            state = State(*(part[0].tolist() for part in parts), True, 0.0, 0.0)
            found.append(json.loads(json.dumps(told(request.answer(state)))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--kinds", type=int, default=400, help="different requests, sent in turn")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = Processes(given.cpu).device
    served = Served(given.run, 1000, device)
    bodies = requests(served, given.kinds)
    want = {batch: alone(served, bodies, batch) for batch in (1, given.batch)}
    sent = [json.dumps(body).encode() for body in bodies]
    # Before and after: how busy the machine is with other things changes in a minute.
    plan = [(1, 1), (given.batch, 1), (given.batch, given.clients), (given.batch, 1), (1, 1)]  # (batch, clients)
    loads, busy = [], os.getloadavg()[0]
    with server(given.run, 1, given.cpu) as alone_, server(given.run, given.batch, given.cpu) as shared:
        for batch, clients in plan:
            to, seconds = (alone_, shared)[batch > 1], given.seconds / (8 if clients == 1 else 1)
            for length in (2.0, seconds):  # the first to warm up
                found = asyncio.run(load(*to, clients, batch, length, sent, want[batch]))
            loads.append(found)
    many, single = loads[2], max(each.per_second for each in loads if each.clients == 1)
    quarter = many.memory_mb[len(many.memory_mb) // 4]
    checks = {
        "no error but 429": not any(each.errors for each in loads),
        "every answer as alone": not any(each.wrong for each in loads),
        "memory flat": max(many.memory_mb) <= GROWTH * quarter,
        f"{ENOUGH:g} times as fast": many.per_second >= ENOUGH * single,
    }
    where = (
        f"{device_name(device)}, torch {torch.__version__}, {torch.get_num_threads()} threads, revision {revision()}"
    )
    where += f", load of the machine {busy:.1f} before and {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores"
    record = {"where": where, "run": served.name, "different_requests": given.kinds}
    record |= {"requests_begin": bodies[:2], "checks": checks}
    record |= {"times_one_at_a_time": round(many.per_second / single, 2), "loads": [asdict(each) for each in loads]}
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in record.items() if name != "loads"}, indent=1))
    sys.exit(not all(checks.values()))


if __name__ == "__main__":
    main()
