"""A server in a thread of its own, on a free port of this machine, and what to ask it."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager

import httpx2
import torch
import uvicorn

from unmask.decoding.open_batch import OpenBatch
from unmask.models.packing import padding_stays
from unmask.serve.app import Limits, Server, listen
from unmask.serve.served import Served
from unmask.serve.worker import State, Worker

CPU = torch.device("cpu")


def served(*runs, max_steps=100):
    return [Served(run, max_steps, CPU) for run in runs]


@contextmanager
def serving(models, rows=4, queue=64, limits=None):
    """(client, server)"""
    server = Server(models, Worker(rows, queue), limits or Limits())
    listening = listen("127.0.0.1", 0)
    web = uvicorn.Server(uvicorn.Config(server.app(), log_level="error", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=lambda: web.run(sockets=[listening]), daemon=True)
    thread.start()
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=30) as client:
            wait_for(lambda: web.started)
            yield client, server
    finally:
        web.should_exit = True
        thread.join(15)
        assert not thread.is_alive()


def wait_for(condition, seconds=15):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "this took too long"
        time.sleep(0.01)


@contextmanager
def held(monkeypatch):
    """No batch takes a step while this is not set."""
    gate, step = threading.Event(), OpenBatch.step

    def wait(batch):
        gate.wait()
        return step(batch)

    monkeypatch.setattr(OpenBatch, "step", wait)
    try:
        yield gate
    finally:
        gate.set()


def alone(request, rows):
    """What one sequence gets from an engine of its own."""
    job = request.job(lambda state: None, watched=False)
    mask = None if job.attention_mask is None else job.attention_mask[None]
    with padding_stays():
        ids = torch.tensor([job.id])
        out = job.engine(rows).generate(job.prompt[None], seed=job.seed, ids=ids, attention_mask=mask)
    parts = [part[0].tolist() for part in (out.tokens, out.masked, out.reveal_step, out.num_steps, out.num_passes)]
    return request.answer(State(*parts, True, 0.0, 0.0))


def without_times(answer):
    return {key: value for key, value in answer.items() if key not in ("id", "seconds", "queued_seconds")}


def events(response):
    """(name, value) of each server-sent event."""
    for block in "".join(response.iter_text()).strip().split("\n\n"):
        name, data = block.split("\n")
        yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))
