"""HTTP: the playground, the interface for programs, and what keeps both within bounds.

Errors are JSON, {"error": {"message": ..., "type": ...}}, as OpenAI's clients expect them:
400 no JSON, 401 no or a wrong token, 404 no such model or page, 408 body too slow, 413 body too large, 415 not called
JSON, 421 called by another name, 422 cannot be answered and why, 429 too many wait, 503 stopping, 504 took too long.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import socket
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

import prometheus_client as prometheus
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import unmask
from unmask.display import say
from unmask.errors import UserError, require
from unmask.fields import build
from unmask.jsonl import parse_json
from unmask.serve.served import Asked, Completion, Request, Served, completion_text, policies
from unmask.serve.worker import QueueFull, State, Worker

T = TypeVar("T")

BODY = 1 << 20  # bytes of a request
DRAINED = 32 * BODY  # bytes of a request that is too large which are still read, so that its client reads the answer
PAGE = {
    "/": ("unmask.serve", "index.html", "text/html; charset=utf-8"),
    "/playground.css": ("unmask.serve", "playground.css", "text/css; charset=utf-8"),
    "/playground.js": ("unmask.serve", "playground.js", "text/javascript; charset=utf-8"),
    "/colours.js": ("unmask.report", "colours.js", "text/javascript; charset=utf-8"),
    "/docs": ("unmask.serve", "api.html", "text/html; charset=utf-8"),
    "/api.js": ("unmask.serve", "api.js", "text/javascript; charset=utf-8"),
    "/openapi.json": ("unmask.serve", "openapi.json", "application/json"),
}
OPEN = {*PAGE, "/healthz"}  # no token is asked for: nothing of the model is there
KNOWN = {*OPEN, "/metrics", "/v1/models", "/v1/policies", "/v1/generate", "/v1/completions"}
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class Limits:
    timeout: float = 60.0  # seconds that a request may take
    token: str = ""  # what a client must send; "": nothing
    hosts: tuple[str, ...] = ()  # the names by which a browser may call the server; empty: any


class Metrics:
    """What /metrics tells."""

    def __init__(self, worker: Worker) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        labels = ["path", "status"]
        self.requests = prometheus.Counter("unmask_requests", "Requests answered.", labels, registry=registry)
        self.seconds = prometheus.Histogram(
            "unmask_request_seconds", "From a request to the end of its answer.", ["path"], registry=registry
        )
        self.cancelled = prometheus.Counter(
            "unmask_cancelled", "Sequences whose client left or ran out of time.", registry=registry
        )
        self.tokens = prometheus.Counter("unmask_tokens", "Tokens written.", registry=registry)
        for name, text, value in (
            ("unmask_queue_length", "Sequences that wait for a batch.", lambda: len(worker.waiting)),
            ("unmask_running", "Sequences in a batch.", lambda: worker.running),
            ("unmask_batch_steps", "Steps that batches took.", lambda: worker.steps),
            ("unmask_sequence_steps", "Steps that the sequences in them took.", lambda: worker.row_steps),
        ):
            prometheus.Gauge(name, text, registry=registry).set_function(value)


class Guard:
    """Around everything: the token, the host's name, headers that forbid what no page here needs, and counts."""

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, path = time.perf_counter(), 499, scope["path"]  # 499: the client left before an answer

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] += [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        try:
            await (self._refusal(scope) or self.app)(scope, receive, sending)
        finally:
            known = path if path in KNOWN else "other"
            self.metrics.requests.labels(known, status).inc()
            self.metrics.seconds.labels(known).observe(time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = (
            headers.get("host", "").rsplit(":", 1)[0] if not headers.get("host", "").endswith("]") else headers["host"]
        )
        if self.limits.hosts and host not in self.limits.hosts:  # a page of others whose name leads to this machine
            return failure(421, f"call this server by the name {self.limits.hosts[0]}")
        given, token = (
            headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1"),
            self.limits.token.encode(),
        )
        if not token or scope["path"] in OPEN or secrets.compare_digest(given, token):
            return None
        refused = failure(401, "give the token of this server: Authorization: Bearer TOKEN")
        refused.headers["www-authenticate"] = "Bearer"
        return refused


def as_json(value: Any) -> str:
    """ASCII, and nothing in it is a tag whatever takes it for HTML."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def answer(value: Any, status: int = 200) -> Response:
    return Response(as_json(value), status, media_type="application/json")


def problem(status: int, message: str) -> dict[str, Any]:
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def failure(status: int, message: str) -> Response:
    response = answer(problem(status, message), status)
    if status in (429, 503):
        response.headers["retry-after"] = "1"
    return response


def failed(error: Exception) -> tuple[int, str]:
    """Status and message of whatever a request can end with."""
    if isinstance(error, HTTPException):
        return error.status_code, error.detail
    if isinstance(error, UserError):
        return 422, str(error)
    if isinstance(error, QueueFull):
        return 429, "too many requests wait already: try again in a moment"
    if isinstance(error, TimeoutError):
        return 504, "this took too long: ask for fewer steps, or try again when less is going on"
    traceback.print_exception(error)
    return 500, "an error of the server, which its log tells"


class Server:
    """The routes, and what they share."""

    def __init__(self, models: Sequence[Served], worker: Worker, limits: Limits) -> None:
        self.models = {served.name: served for served in models}
        if len(self.models) < len(models):
            raise UserError("two of these runs have the same name: rename one of the folders")
        self.worker, self.limits, self.metrics = worker, limits, Metrics(worker)
        self.number = 0

    def app(self) -> Guard:
        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.worker.start()
            yield
            await asyncio.to_thread(self.worker.close)

        routes = [Route(path, self._page(*page)) for path, page in PAGE.items()]
        routes += [
            Route("/healthz", self.health),
            Route("/metrics", self.metric),
            Route("/v1/models", self.list_models),
            Route("/v1/policies", self.list_policies),
            Route("/v1/generate", self._guarded(self.generate), methods=["POST"]),
            Route("/v1/completions", self._guarded(self.complete), methods=["POST"]),
        ]

        async def on_error(request: HttpRequest, error: Exception) -> Response:
            return failure(*failed(error))

        app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: on_error})
        return Guard(app, self.limits, self.metrics)

    # --- what is there ------------------------------------------------------------------------------------------------

    def _page(self, package: str, name: str, kind: str) -> Callable[[HttpRequest], Any]:
        content = (files(package) / "page" / name).read_bytes()

        async def page(request: HttpRequest) -> Response:
            return Response(content, media_type=kind)

        return page

    async def health(self, request: HttpRequest) -> Response:
        alive = self.worker.alive
        return answer({"status": "ok" if alive else "stopping", "version": unmask.__version__}, 200 if alive else 503)

    async def metric(self, request: HttpRequest) -> Response:
        text = prometheus.generate_latest(self.metrics.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    async def list_models(self, request: HttpRequest) -> Response:
        return answer({"object": "list", "data": [served.about() for served in self.models.values()]})

    async def list_policies(self, request: HttpRequest) -> Response:
        return answer({"data": policies()})

    # --- what is written ----------------------------------------------------------------------------------------------

    async def generate(self, http: HttpRequest) -> Response:
        asked = build(Asked, await body_of(http))
        request = self._request(asked)
        updates = self._submitted(request, watched=asked.stream)
        if asked.stream:
            return StreamingResponse(self._events(request, updates), media_type="text/event-stream")
        state = await unless_gone(http, last(updates))
        return answer({"id": self._id(), **request.answer(state)})

    async def _events(self, request: Request, updates: AsyncIterator[State]) -> AsyncIterator[str]:
        """start, step after step, and done with the whole answer; or error."""
        beginning = {"model": request.served.name, "policy": request.rule.name, "prompt": request.question}
        yield event("start", {**beginning, "tokens": request.shown(None), "budget": request.steps})
        try:
            async for state in updates:
                told = {"steps": state.steps, "passes": state.passes, "seconds": round(state.seconds, 6)}
                yield event("step", {**told, "tokens": request.shown(state)})
            yield event("done", {"id": self._id(), **request.answer(state)})
        except Exception as error:
            yield event("error", problem(*failed(error)))

    async def complete(self, http: HttpRequest) -> Response:
        wanted = build(Completion, await body_of(http))
        request = self._request(wanted.asked())
        updates = self._submitted(request, watched=bool(wanted.stream))
        head = {"id": f"cmpl-{self._id()}", "object": "text_completion", "created": int(time.time())}
        head["model"] = request.served.name
        if wanted.stream:
            return StreamingResponse(self._chunks(request, wanted, head, updates), media_type="text/event-stream")
        state = await unless_gone(http, last(updates))
        text, reason = completion_text(request, state, wanted.ends)
        choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
        return answer({**head, "choices": [choice], "usage": self._usage(request, state)})

    async def _chunks(
        self, request: Request, wanted: Completion, head: dict[str, Any], updates: AsyncIterator[State]
    ) -> AsyncIterator[str]:
        """A client appends what it gets: a token is sent when all before it are there, and will stay."""

        def chunk(text: str, reason: str | None) -> str:
            choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
            return f"data: {as_json({**head, 'choices': [choice]})}\n\n"

        sent, longest = "", max(map(len, wanted.ends), default=1) - 1  # of what may be the beginning of a stop text
        try:
            async for state in updates:
                if state.finished or request.rule.remasks:
                    continue
                text = request.text(state, until_mask=True).rstrip("\ufffd")  # a letter may come in parts
                text = text[: max(0, len(text) - longest)]
                if text.startswith(sent) and len(text) > len(sent) and not any(end in text for end in wanted.ends):
                    yield chunk(text[len(sent) :], None)
                    sent = text
            text, reason = completion_text(request, state, wanted.ends)
            yield chunk(text.removeprefix(sent), reason)
            if (wanted.stream_options or {}).get("include_usage"):
                yield f"data: {as_json({**head, 'choices': [], 'usage': self._usage(request, state)})}\n\n"
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield f"data: {as_json(problem(*failed(error)))}\n\n"

    def _usage(self, request: Request, state: State) -> dict[str, int]:
        prompt, written = len(request.given), request.size(state)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    # --- what they share ----------------------------------------------------------------------------------------------

    def _id(self) -> str:
        self.number += 1
        return f"{self.number}"

    def _request(self, asked: Asked) -> Request:
        if asked.model and asked.model not in self.models:
            raise HTTPException(404, f"no model {asked.model!r}: choose from {', '.join(self.models)}")
        return self.models[asked.model or next(iter(self.models))].request(asked)

    def _submitted(self, request: Request, watched: bool) -> AsyncIterator[State]:
        """What stands after each step, or at the end alone.  Whoever stops reading gives the sequence up."""
        loop, states, worker = asyncio.get_running_loop(), asyncio.Queue[State | Exception](), self.worker
        if worker.closing:
            raise HTTPException(503, "the server is stopping")

        def tell(state: State | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody listens any more
                loop.call_soon_threadsafe(states.put_nowait, state)

        job = request.job(tell, watched)
        worker.submit(job)
        until = loop.time() + self.limits.timeout

        async def read() -> AsyncIterator[State]:
            finished = False
            try:
                while not finished:
                    async with asyncio.timeout_at(until):
                        state = await states.get()
                    if isinstance(state, Exception):
                        raise state
                    if finished := state.finished:
                        self.metrics.tokens.inc(request.size(state))
                    yield state
            finally:
                if not finished:
                    self.metrics.cancelled.inc()
                    worker.cancel(job)

        return read()

    def _guarded(self, handle: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
        async def guarded(http: HttpRequest) -> Response:
            try:
                response: Response = await handle(http)
                return response
            except Exception as error:
                return failure(*failed(error))

        return guarded


async def body_of(http: HttpRequest) -> Any:
    """The JSON of a request."""
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # Else a page of others could send requests through its visitor's browser.
        raise HTTPException(415, "send JSON: Content-Type: application/json")
    content, size = bytearray(), 0
    try:
        async with asyncio.timeout(30):
            async for part in http.stream():
                size += len(part)
                if size <= BODY:
                    content += part
                elif size > DRAINED:
                    break
    except TimeoutError:
        raise HTTPException(408, "the body took longer than 30 s: send it at once") from None
    if size > BODY:
        raise HTTPException(413, f"the body is larger than {BODY:,} bytes: send less")
    try:
        found = parse_json(bytes(content))
    except ValueError as error:
        raise HTTPException(400, f"the body is {error}") from None
    require(isinstance(found, dict), "the body must be a JSON object")
    return found


async def last(updates: AsyncIterator[State]) -> State:
    return [state async for state in updates][-1]


async def unless_gone(http: HttpRequest, work: Any) -> Any:
    """The result of the work; it is given up when the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(http.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the client left")
        return await working
    finally:
        working.cancel()
        leaving.cancel()


def event(name: str, value: Any) -> str:
    return f"event: {name}\ndata: {as_json(value)}\n\n"


def listen(host: str, port: int) -> socket.socket:
    """A socket; UserError where the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.create_server((host, port), family=family, backlog=512)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or each answer waits 40 ms for a packet to fill
        return found
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror or error}): give another --host or --port"
        ) from None


def run(server: Server, listening: socket.socket, timeout: float) -> None:
    """Until SIGTERM or Ctrl-C: then no request more is taken, and those that are being answered are finished."""
    config = uvicorn.Config(
        server.app(), log_level="warning", access_log=False, timeout_graceful_shutdown=int(timeout) + 1, backlog=512
    )
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say(f"unmask: serving {', '.join(server.models)} at http://{shown}:{port}   (Ctrl-C stops it)")
    # uvicorn raises the signal that stopped it once more, when all is done: it has had its effect.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
