"""The server: what it answers, and that sharing batches does not show in it."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.evaluation.test_blocks import FAST
from tests.serve.serving import alone, events, held, served, serving, wait_for, without_times
from tests.test_benchmarks import load
from unmask.decoding.open_batch import OpenBatch
from unmask.recipe import load_recipe
from unmask.serve import app as application
from unmask.serve import worker as module
from unmask.serve.app import BODY, Limits, listen
from unmask.serve.served import Asked, quoted
from unmask.training.run import train

ROWS = 4


@pytest.fixture(scope="module")
def running(models):
    with serving(models, ROWS) as (client, server):
        yield client, server


@pytest.fixture(scope="module")
def client(running):
    return running[0]


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory):
    """A block-causal model: two steps in each of two blocks."""
    out = tmp_path_factory.mktemp("blocks") / "run"
    train(load_recipe("groups-blocks", FAST), out, cpu=True)
    return served(out)[0]


def metrics(client):
    """The sum over all paths of each value, by its name and status."""
    found = Counter()
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found[sample.name, sample.labels.get("status")] += sample.value
    return found


def asked_for(count):
    """Requests of every kind, some alike."""
    chance = random.Random(0)
    policies = ["", "learned(price=0.5)", "klass"]
    for number in range(count):
        kind = chance.choice(["pairs", "pairs", "texts", "puzzle"])
        rule = chance.choice(policies if kind == "pairs" else ["p2"])
        body = {"model": kind, "policy": rule, "steps": 4, "seed": number % 5, "temperature": float(kind != "texts")}
        if kind == "puzzle":
            body |= {"example": number} if number % 2 else {"prompt": "a _ _ b"}
        else:
            body |= (
                {"prompt": "say "[: chance.randrange(5)] + str(number % 3)} if number % 3 else {"example": number % 4}
            )
        if kind == "texts" and number % 2 and "prompt" in body:
            body |= {"max_tokens": 5}
        yield body


def test_every_response_is_the_one_for_the_same_prompt_and_seed_alone(running, models):
    client, server = running
    bodies = list(asked_for(80))
    steps, row_steps = server.worker.steps, server.worker.row_steps
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda body: client.post("/v1/generate", json=body), bodies))
    named = {model.name: model for model in models}
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.status_code == 200, answer.text
        expected = alone(named[body["model"]].request(Asked(**body)), ROWS)
        assert without_times(answer.json()) == without_times(json_like(expected)), body
    assert len({answer.text for answer in answers}) > 40
    assert server.worker.row_steps - row_steps > 1.3 * (server.worker.steps - steps), "nothing was shared"
    assert server.worker.running == len(server.worker.waiting) == 0


def json_like(value):
    return {**value, "tokens": [list(token) for token in value["tokens"]]}


def test_a_stream_shows_every_step_and_ends_with_the_answer(client):
    body = {"model": "pairs", "example": 1, "policy": "margin", "steps": 4, "seed": 3}
    plain = client.post("/v1/generate", json=body).json()
    with client.stream("POST", "/v1/generate", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        (first, start), *steps, (end, done) = events(response)
    assert (first, end) == ("start", "done")
    assert start["prompt"] == "say 9"
    assert start["tokens"] == [["·", None]] * 8
    assert [name for name, _ in steps] == ["step"] * 4
    assert [told["steps"] for _, told in steps] == [1, 2, 3, 4]
    masks = [sum(step is None for _, step in told["tokens"]) for _, told in steps]
    assert masks == sorted(masks, reverse=True)
    assert masks[-1] == 0
    assert without_times(done) == without_times(plain)
    assert steps[-1][1]["tokens"] == done["tokens"]
    assert (plain["steps"], plain["passes"], plain["budget"]) == (4, 4, 4)


def test_the_command_repeats_it(client, ok):
    for body in ({"example": 2}, {"prompt": "a _ b _"}):
        found = client.post("/v1/generate", json={"model": "puzzle", "policy": "iid", "seed": 7, **body}).json()
        words = found["command"].replace("'", "").split(" --trace")[0].split()
        if "prompt" in body:
            words = [*words[: words.index("--prompt=a")], "--prompt=a _ b _", *words[words.index("--prompt=a") + 4 :]]
        assert " ".join(text for text, _ in found["tokens"]) in ok(*words[1:])
    texts = {"model": "texts", "prompt": "a"}
    assert client.post("/v1/generate", json={**texts, "max_tokens": 19}).json()["command"]
    cut = client.post("/v1/generate", json={**texts, "max_tokens": 5}).json()
    assert cut["command"] is None, "no option of `unmask sample` makes a sequence shorter"
    assert quoted("a\x1b'\\\u202e") == r"$'a\x1b\'\\\U0000202e'"
    assert quoted("a b") == "'a b'"


def test_what_there_is(client):
    assert client.get("/healthz").json()["status"] == "ok"
    pairs, texts, puzzle = client.get("/v1/models").json()["data"]
    assert (pairs["id"], pairs["steps"], pairs["prices"], pairs["any_steps"]) == ("pairs", 4, [0.02, 2.0], True)
    assert (texts["has_order"], puzzle["has_order"], puzzle["any_steps"]) == (False, True, False)
    rules = {rule["name"]: rule for rule in client.get("/v1/policies").json()["data"]}
    assert rules["threshold"]["usage"].startswith("threshold(0.9")
    assert rules["threshold"]["words"] == "All positions of which the denoiser is sure enough."
    assert all(rule["words"] for rule in rules.values())
    assert rules["learned"]["needs_order"]
    assert not rules["margin"]["needs_order"]
    before = metrics(client)
    client.post("/v1/generate", json={"example": 0})
    client.post("/v1/generate", json={"example": 0, "policy": "no-such"})
    after = metrics(client)
    for status in ("200", "422"):
        key = "unmask_requests_total", status
        assert after[key] > before[key]
    assert after["unmask_tokens_total", None] > before["unmask_tokens_total", None]
    schema = client.get("/openapi.json").json()
    assert set(schema["paths"]) == {
        *("/v1/generate", "/v1/completions", "/v1/models", "/v1/policies", "/healthz", "/metrics")
    }
    codes = {code for code in schema["paths"]["/v1/generate"]["post"]["responses"] if code >= "400"}
    assert codes == set(re.findall(r"\b[45]\d\d\b", application.__doc__)), "the page and the module tell the same"
    fields = schema["components"]["schemas"]["Generate"]["properties"]
    assert set(fields) == set(Asked.__annotations__)
    for path in ("/", "/docs", "/playground.js", "/playground.css", "/api.js"):
        page = client.get(path)
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http://" not in page.text.replace("http://www.w3.org", "")
        assert "https://" not in page.text


GENERATE = {"model": "pairs", "prompt": "say 1"}
BAD = {
    "unknown policy": ({**GENERATE, "policy": "margn"}, 422, "did you mean 'margin'?"),
    "unknown policy inside": ({**GENERATE, "policy": "blocks(2,margn)"}, 422, "did you mean 'margin'?"),
    "code of one's own": ({**GENERATE, "policy": "os.path:join"}, 422, "code of somebody's own"),
    "code inside a rule": ({**GENERATE, "policy": "blocks(2,antigravity:Rule(1))"}, 422, "code of somebody's own"),
    "a very long policy": ({**GENERATE, "policy": "m" * 300}, 422, "longer than any rule"),
    "no order": ({"model": "texts", "prompt": "a", "policy": "learned"}, 422, "needs a learned order"),
    "no such model": ({**GENERATE, "model": "gpt"}, 404, "no model 'gpt': choose from pairs, texts, puzzle"),
    "unknown field": ({**GENERATE, "polcy": "margin"}, 422, "unknown key 'polcy'"),
    "no prompt": ({"model": "pairs"}, 422, "give a prompt or the number of an example"),
    "both": ({**GENERATE, "example": 1}, 422, "give a prompt or the number of an example"),
    "beyond the context": ({**GENERATE, "prompt": "word " * 40}, 422, "has room for 12: give a shorter prompt"),
    "far beyond the context": ({**GENERATE, "prompt": "w" * 100_000}, 422, "100000 characters"),
    "half a letter": ({**GENERATE, "prompt": "\ud800"}, 422, "cannot be encoded"),
    "too many steps": ({**GENERATE, "steps": 101}, 422, "steps must be between 1 and 100, got 101"),
    "no steps": ({**GENERATE, "steps": 0}, 422, "steps must be between 1 and 100, got 0"),
    "other steps than learned": ({"model": "puzzle", "example": 0, "steps": 3}, 422, "trained for T = 2"),
    "too long": ({"model": "texts", "prompt": "a", "max_tokens": 50}, 422, "max_tokens must be between 1 and 19"),
    "hot": ({**GENERATE, "temperature": -1}, 422, "temperature must not be negative"),
    "a seed of 65 bits": ({**GENERATE, "seed": 2**64}, 422, "seed must fit in 64 bits"),
    "a number for text": ({**GENERATE, "prompt": 7}, 422, "prompt must be a string"),
    "no such example": ({"model": "pairs", "example": 99}, 422, "examples are numbered from 0 to 3, got 99"),
    "an example below 0": ({"model": "puzzle", "example": -1}, 422, "examples are numbered from 0, got -1"),
    "a list": ([1], 422, "the body must be a JSON object"),
    "a puzzle's prompt": ({"model": "puzzle", "prompt": "x"}, 422, "write 4 of a b c and _"),
    "completion without prompt": ({"model": "pairs"}, 422, "'prompt' is missing"),
    "two completions": ({**GENERATE, "n": 2}, 422, "n must be 1"),
    "two prompts": ({**GENERATE, "prompt": ["a", "b"]}, 422, "send a request for each"),
    "tokens": ({**GENERATE, "prompt": [1, 2]}, 422, "prompt must be one text"),
    "logprobs": ({**GENERATE, "logprobs": 3}, 422, "logprobs is not supported"),
    "a number as stop": ({**GENERATE, "stop": 5}, 422, "stop must be a text or a list of texts"),
    "a table as stop": ({**GENERATE, "stop": {"a": 1}}, 422, "stop must be a text or a list of texts"),
    "numbers as stop": ({**GENERATE, "stop": [5]}, 422, "stop must be a text or a list of texts"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_answered_is_told_why(client, name):
    body, status, reason = BAD[name]
    completion = name in list(BAD)[list(BAD).index("completion without prompt") :]
    path, as_json = "/v1/completions" if completion else "/v1/generate", {"content-type": "application/json"}
    answer = client.post(path, content=json.dumps(body), headers=as_json)
    assert answer.status_code == status, answer.text
    assert reason in answer.json()["error"]["message"]
    assert "module:Class" not in answer.text, "it would be refused"


def test_a_block_causal_run_has_its_steps_in_each_block(in_blocks):
    with serving([in_blocks], ROWS) as (client, _):
        assert client.get("/v1/models").json()["data"][0]["steps"] == 4
        answer = client.post("/v1/generate", json={"example": 0})
        assert answer.status_code == 200, answer.text
        assert answer.json()["budget"] == 4


def test_a_rule_may_need_the_frequencies_of_tokens(client):
    answer = client.post("/v1/generate", json={**GENERATE, "policy": "pc-sampler"})
    assert answer.status_code == 200, answer.text


def test_a_network_inside_blocks_has_the_denoiser_it_was_trained_with(in_blocks, monkeypatch):
    model, *rest = in_blocks._opened[0], *in_blocks._opened[2:]
    monkeypatch.setitem(vars(in_blocks), "_opened", (model, SimpleNamespace(denoiser=None), *rest))
    for policy, denoiser in (
        ("learned", model.denoiser),
        ("blocks(8,learned)", model.denoiser),
        ("blocks(8,iid)", None),
    ):
        assert in_blocks.denoiser(in_blocks._rule(policy)) is denoiser


def test_what_is_no_request(client):
    as_json = {"content-type": "application/json"}
    for content in (b"{", b"", b"\xff\xfe\x00", b"[" * 100_000, b'{"prompt": "a\x00b"}', b'{"prompt": "a\nb"}'):
        answer = client.post("/v1/generate", content=content, headers=as_json)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith("the body is n")
    assert (
        client.post("/v1/generate", content=b'{"temperature": NaN, "example": 0}', headers=as_json).status_code == 422
    )
    assert client.post("/v1/generate", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert client.get("/v1/generate").status_code == 405
    lost = client.get("/<script>alert(1)</script>")
    assert lost.status_code == 404
    assert "<" not in lost.text


def test_a_body_of_ten_megabytes_is_refused_and_does_no_harm(client):
    large = b'{"prompt": "' + b"a" * 10_000_000 + b'"}'
    pieces = (large[start : start + 65536] for start in range(0, len(large), 65536))
    for content in (large, pieces):  # of a length that is told, and of one that is not
        answer = client.post("/v1/generate", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert f"{BODY:,} bytes" in answer.json()["error"]["message"]
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("prompt", ["<script>", "a\x00\x1b[31mb", "</s>\u202e", "\r\n\r\nevent: x"])
def test_nothing_in_an_answer_is_markup_or_steers_anything(client, prompt):
    for body in ({"model": "texts", "prompt": prompt[:12]}, {"model": "texts", "prompt": prompt[:12], "stream": True}):
        answer = client.post("/v1/generate", json=body)
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not set(answer.text) & set("<\x00\x1b\r\u202e")
        assert "event: x" not in answer.text.splitlines()
    refused = client.post("/v1/generate", json={"example": 0, "policy": prompt})
    assert refused.status_code == 422
    assert not set(refused.text) & set("<\x00\x1b\r\u202e")


def test_a_token_is_asked_for_where_there_is_one(models):
    with serving(models[2:], limits=Limits(token="söcret")) as (client, _):
        body = {"example": 0}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"}):
            answer = client.post("/v1/generate", json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/v1/policies", "/metrics"):
            assert client.get(path).status_code == 401
        for path in ("/", "/docs", "/openapi.json", "/healthz"):
            assert client.get(path).status_code == 200
        right = {"authorization": "Bearer söcret".encode()}
        assert client.post("/v1/generate", json=body, headers=right).status_code == 200


def test_a_page_of_others_cannot_call_it_by_another_name(models):
    with serving(models[2:], limits=Limits(hosts=("127.0.0.1", "[::1]"))) as (client, _):
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/models", headers={"host": "[::1]:80"}).status_code == 200
        for name in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
            assert client.get("/v1/models", headers={"host": name}).status_code == 421


def test_when_too_many_wait_they_are_refused_and_the_others_answered(models, monkeypatch):
    with (
        serving(models[2:], rows=2, queue=3) as (client, server),
        held(monkeypatch) as gate,
        ThreadPoolExecutor(9) as pool,
    ):
        ask = lambda number: client.post("/v1/generate", json={"example": number})  # noqa: E731
        first = [pool.submit(ask, 0)]
        wait_for(lambda: server.worker.running == 1)
        rest = [pool.submit(ask, number) for number in range(1, 9)]
        wait_for(lambda: sum(each.done() for each in rest) == 5)
        assert {each.result().status_code for each in rest if each.done()} == {429}
        assert {each.result().headers["retry-after"] for each in rest if each.done()} == {"1"}
        gate.set()
        assert sorted(each.result().status_code for each in first + rest) == [200] * 4 + [429] * 5


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_row(models, monkeypatch, stream):
    with serving(models[:1], rows=1) as (client, server), held(monkeypatch) as gate:
        body = {"example": 0, "policy": "p2", "steps": 100, "stream": stream}
        for _ in range(2):  # one in the batch, one in the queue
            with pytest.raises(httpx2.ReadTimeout):
                client.post("/v1/generate", json=body, timeout=0.3)
        wait_for(lambda: server.worker.steps == 1 and not server.worker.waiting)
        gate.set()
        wait_for(lambda: server.worker.running == 0)
        wait_for(lambda: metrics(client)["unmask_cancelled_total", None] == 2)
        assert server.worker.steps == 1, "it went on for nobody"
        assert client.post("/v1/generate", json={"example": 0}).status_code == 200


def test_what_takes_too_long_is_given_up(models, monkeypatch):
    with serving(models[:1], limits=Limits(timeout=0.3)) as (client, server), held(monkeypatch) as gate:
        answer = client.post("/v1/generate", json={"example": 0})
        assert answer.status_code == 504
        with client.stream("POST", "/v1/generate", json={"example": 0, "stream": True}) as response:
            assert [name for name, _ in events(response)] == ["start", "error"]
        gate.set()
        wait_for(lambda: server.worker.running == 0)


def test_an_error_in_a_batch_ends_its_requests_and_nothing_else(models, monkeypatch, capfd):
    with serving(models[2:]) as (client, server):
        step = OpenBatch.step
        monkeypatch.setattr(OpenBatch, "step", lambda batch: 1 / 0)
        assert client.post("/v1/generate", json={"example": 0}).status_code == 500
        assert "ZeroDivisionError" in capfd.readouterr().err
        monkeypatch.setattr(OpenBatch, "step", step)
        assert client.post("/v1/generate", json={"example": 0}).status_code == 200
        assert server.worker.alive


def test_who_joins_now(monkeypatch):
    """A full batch is passed by; a batch too many is not, or those who need it might wait for ever."""
    monkeypatch.setattr(module, "MOST_LANES", 2)
    worker, lane = (
        module.Worker(rows=2, queue=9),
        lambda jobs, room: SimpleNamespace(jobs=jobs, batch=SimpleNamespace(room=room)),
    )
    asked = {name: SimpleNamespace(lane=name[0]) for name in ("a1", "a2", "b1", "b2", "c1", "b3")}

    def joining(names, lanes):
        worker.lanes, worker.waiting = dict(lanes), deque(asked[name] for name in names)
        found = worker._admitted()
        by_job = {id(job): name for name, job in asked.items()}
        return {key: [by_job[id(job)] for job in jobs] for key, jobs in found.items()}

    busy = {"x": None}
    full_a = {"a": lane(busy, 0), "b": lane(busy, 1)}
    assert joining(["a1", "b1", "b2"], full_a) == {"b": ["b1"]}
    assert joining(["c1", "b1"], full_a) == {}
    assert joining(["b1", "c1", "a1"], {**full_a, "b": lane({}, 2)}) == {"b": ["b1"]}
    assert joining(["c1", "b1"], {"a": lane(busy, 0), "b": lane({}, 2)}) == {"c": ["c1"]}
    assert joining(["a1", "a2", "b1", "b2", "b3"], {}) == {"a": ["a1", "a2"], "b": ["b1", "b2"]}
    assert [job.lane for job in worker.waiting] == ["b"]


def test_nobody_waits_for_ever_and_batches_stay_few(models, monkeypatch):
    """More kinds of requests than batches, again and again: all are answered, and the batches are replaced."""
    monkeypatch.setattr(module, "MOST_LANES", 2)
    with serving(models[:1], rows=1) as (client, server), ThreadPoolExecutor(16) as pool:
        bodies = [{"example": 0, "policy": "margin", "steps": 1 + number % 5} for number in range(40)]
        answers = list(pool.map(lambda body: client.post("/v1/generate", json=body), bodies))
        assert [answer.json()["steps"] for answer in answers] == [body["steps"] for body in bodies]
        assert len(server.worker.lanes) <= 2


def test_sigterm_finishes_what_was_begun(runs):
    command = [sys.executable, "-m", "unmask", "serve", runs / "pairs", "--port", "0", "--cpu", "--max-steps", "5000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().split()[4]
        wait_for(lambda: answers(f"{address}/healthz"), 30)
        body = {"example": 0, "policy": "p2", "steps": 60, "stream": True}
        with httpx2.stream("POST", f"{address}/v1/generate", json=body, timeout=60) as response:
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: not answers(f"{address}/healthz"))
            found = list(events(response))
        assert found[-1][0] == "done"
        assert found[-1][1]["steps"] == 60
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()


def answers(address):
    try:
        return httpx2.get(address, timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


def test_the_benchmark_counts_what_is_wrong(models):
    bench, puzzle = load("serve"), models[2]
    bodies = bench.requests(puzzle, 6)
    want = bench.alone(puzzle, bodies, ROWS)
    want[3] = {**want[3], "steps": 99}
    with serving([puzzle], ROWS) as (client, _):
        sent, port = [json.dumps(body).encode() for body in bodies], client.base_url.port
        found = asyncio.run(bench.load(port, os.getpid(), 3, ROWS, 1.0, sent, want))
    assert found.errors == []
    assert found.refused == 0
    assert found.answered // 6 <= found.wrong <= found.answered // 6 + 1
    assert found.rows_per_step > 1


def test_an_answer_does_not_wait_for_a_packet_to_fill():
    """Nagle's algorithm and delayed acknowledgements together would cost 40 ms each time."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_command_line_refuses_in_one_line(runs, refused):
    with serving(served(runs / "puzzle")) as (client, _):
        said = refused("serve", runs / "puzzle", "--cpu", "--port", client.base_url.port)
        assert "cannot listen on 127.0.0.1" in said
    assert "two of these runs have the same name" in refused("serve", runs / "puzzle", runs / "puzzle", "--cpu")
