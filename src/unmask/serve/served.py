"""A run as the server sees it: what a request asks of it, and what is answered."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from unmask.decoding.generate import Engine
from unmask.decoding.policies import RULES, NetworkPolicy, Policy, as_text, network_of, own_rules, parse_policy
from unmask.decoding.policies.structured import own_blocks, trained_steps
from unmask.decoding.tokens import TokenChoice
from unmask.display import visible
from unmask.errors import UserError, require
from unmask.evaluation.evaluate import response_sizes
from unmask.evaluation.plan import open_run
from unmask.evaluation.text_run import cut
from unmask.report.trace import spans
from unmask.rule_list import listed_rules
from unmask.serve.worker import Job, State
from unmask.tasks.task import Examples, Task, check_example, check_no_mask

PER_TOKEN = 64  # a prompt with more characters than this for each position is too long, whatever its tokens


@dataclass(frozen=True)
class Asked:
    """The body of POST /v1/generate."""

    prompt: str | None = None
    example: int | None = None  # a held-out one of the task, in place of a prompt
    model: str = ""
    policy: str = ""
    steps: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stream: bool = False
    max_tokens: int | None = None


@dataclass(frozen=True)
class Completion:
    """The body of POST /v1/completions: OpenAI's, and our policy and steps.  What is not known here is refused."""

    prompt: Any
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Any = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    suffix: str | None = None
    user: str | None = None
    policy: str = ""
    steps: int | None = None
    top_k: int = 0

    def asked(self) -> Asked:
        prompt = self.prompt[0] if isinstance(self.prompt, list) and len(self.prompt) == 1 else self.prompt
        require(isinstance(prompt, str), "prompt must be one text: send a request for each")
        for name in ("n", "best_of"):
            require(getattr(self, name) in (None, 1), f"{name} must be 1: send a request with another seed for each")
        for name in ("echo", "logprobs", "frequency_penalty", "presence_penalty", "logit_bias", "suffix"):
            require(not getattr(self, name), f"{name} is not supported: leave it out")
        texts = isinstance(self.stop, list) and all(isinstance(end, str) for end in self.stop)
        require(texts or isinstance(self.stop, str | None), "stop must be a text or a list of texts")
        return Asked(
            prompt, None, self.model, self.policy, self.steps, self.temperature,
            1.0 if self.top_p is None else self.top_p, self.top_k,
            self.seed or 0, bool(self.stream), self.max_tokens,
        )  # fmt: skip

    @property
    def ends(self) -> list[str]:
        """The texts before which a completion ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


@dataclass(frozen=True)
class Served:
    """One run, ready to write."""

    run: Path
    max_steps: int  # the most that a request may ask for
    device: torch.device
    trust_task: bool = False
    _opened: tuple[Any, ...] = field(init=False, repr=False)
    _rule: Callable[[str], Policy] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_opened", open_run(self.run, self.device, trust_task=self.trust_task))
        object.__setattr__(self, "_rule", lru_cache(256)(self._parsed))

    @property
    def name(self) -> str:
        return self.run.resolve().name

    @property
    def task(self) -> Task:
        task: Task = self._opened[2]
        return task

    @property
    def selector(self) -> Any:
        return self._opened[0].selector

    def budget(self, num_response: int) -> int:
        """Steps, where a request says nothing; as `unmask sample`."""
        return trained_steps(self.selector, num_response) or 4

    @property
    def temperature(self) -> float:
        return float(self._opened[3].evaluate.temperature)

    @property
    def takes_prompts(self) -> bool:
        return type(self.task).prompted is not Task.prompted

    @cached_property
    def _first_size(self) -> int:
        """N of the first example."""
        return int(response_sizes(self.task, 1)[0])

    def about(self) -> dict[str, Any]:
        """What GET /v1/models tells."""
        task = self.task
        return {
            "id": self.name,
            "object": "model",
            "owned_by": "unmask",
            "created": 0,
            "task": task.name,
            "length": task.length,
            "columns": task.grid[0],
            "examples": task.test_examples,
            "is_text": task.text_tokenizer is not None,
            "takes_prompts": self.takes_prompts,
            "has_order": self.selector is not None,
            "steps": self.budget(self._first_size),
            "max_steps": self.max_steps,
            "any_steps": self.selector is None or bool(self.selector.prices),
            "prices": list(self.selector.prices) if self.selector is not None else [],
            "temperature": self.temperature,
        }

    def request(self, asked: Asked) -> Request:
        """UserError where it cannot be answered."""
        rule = self._rule(asked.policy)
        whole = self._examples(asked)
        truth = self._shortened(whole, asked.max_tokens)
        steps = self.budget(int(truth.num_response)) if asked.steps is None else asked.steps
        require(1 <= steps <= self.max_steps, f"steps must be between 1 and {self.max_steps}, got {steps}")
        temperature = self.temperature if asked.temperature is None else asked.temperature
        choice = TokenChoice(temperature, asked.top_p, asked.top_k, eos_token_id=self.task.eos_token_id)
        rule.check(steps, truth.num_response)
        is_cut = bool(truth.num_response < whole.num_response)
        return Request(self, asked, rule, steps, choice, truth, is_cut)

    def _parsed(self, text: str) -> Policy:
        plain = own_blocks("top-prob", self._opened[1].denoiser)
        text = text or ("learned" if self.selector is not None else plain)
        require(len(text) <= 200, "policy is longer than any rule: give one that `GET /v1/policies` lists")
        require(not own_rules(text), f"policy {text!r} names code of somebody's own, which is not run for requests")
        return parse_policy(text, self.selector, partial(self.task.token_frequencies, self.device))

    def denoiser(self, rule: Policy) -> Any:
        """Of a run that trained both together, the heuristics have the plain one."""
        return self._opened[0 if network_of(rule) is not None else 1].denoiser

    def _examples(self, asked: Asked) -> Examples:
        task = self.task
        require((asked.prompt is None) != (asked.example is None), "give a prompt or the number of an example")
        if asked.example is not None:
            check_example(task, asked.example)
            found = task.examples(torch.tensor([asked.example]), "test")
        else:
            assert asked.prompt is not None
            size, most = len(asked.prompt), PER_TOKEN * task.length
            long = f"the prompt has {size} characters, and a sequence {task.length} tokens: give a shorter prompt"
            require(size <= most, long)
            try:
                found = task.prompted(asked.prompt)
            except UserError:
                raise
            except Exception as error:  # tokenizers raises plain Exception
                raise UserError(f"the prompt cannot be encoded ({error})") from None
        check_no_mask(found, self._opened[0].denoiser.mask_token_id, task.text)
        return found

    def _shortened(self, examples: Examples, most: int | None) -> Examples:
        """With room for `most` tokens of response only, where texts have no end; a run of pairs writes all of it."""
        room = int(examples.num_response)
        if most is None:
            return examples
        require(1 <= most <= room, f"max_tokens must be between 1 and {room}, the room behind this prompt, got {most}")
        if self.task.eos_token_id is not None:
            return examples
        keep = ~examples.response | (examples.response.cumsum(-1) <= most)
        return Examples(examples.tokens, examples.response & keep, examples.attention_mask & keep)


@dataclass(frozen=True)
class Request:
    """One sequence that a client wants, read and checked."""

    served: Served
    asked: Asked
    rule: Policy
    steps: int
    choice: TokenChoice
    truth: Examples  # [1, L] each
    is_cut: bool  # by max_tokens

    def job(self, tell: Callable[[State | Exception], None], watched: bool) -> Job:
        denoiser, truth = self.served.denoiser(self.rule), self.truth
        prompt = torch.where(truth.response, denoiser.mask_token_id, truth.tokens)[0]
        attended = None if bool(truth.attention_mask.all()) else truth.attention_mask[0]
        lane = (self.served.name, self.rule.name, self.steps, self.choice, len(prompt), attended is not None)

        def engine(rows: int) -> Engine:
            return Engine(denoiser, self.rule, self.steps, self.choice, batch_size=rows, fixed_shapes=True)

        named = self.asked.example or 0  # as `unmask sample` names its draws
        return Job(lane, engine, prompt, attended, self.asked.seed, named, self.served.device, watched, tell)

    @cached_property
    def given(self) -> list[int]:
        """The positions of the prompt."""
        return (self.truth.attention_mask & ~self.truth.response)[0].nonzero()[:, 0].tolist()

    @cached_property
    def written(self) -> list[int]:
        """The positions of the response."""
        return self.truth.response[0].nonzero()[:, 0].tolist()

    @cached_property
    def question(self) -> str:
        """The prompt of a text, which is shown apart from what is written; "" where it stands among the tokens."""
        is_text = self.served.task.text_tokenizer is not None
        if not is_text or not self.given or self.given[-1] > self.written[0]:
            return ""
        return visible(self.served.task.text(self.truth.tokens[0][self.given].tolist()))

    def shown(self, state: State | None) -> list[tuple[str, int | None]]:
        """Each token as it reads and the step that revealed it: null for a mask, -1 where it was given."""
        task, at = self.served.task, self.written if self.question else sorted(self.given + self.written)
        blank = len(task.vocabulary)  # what `spans` takes for a mask
        if state is None:
            tokens = torch.where(self.truth.response[0], blank, self.truth.tokens[0]).tolist()
            when = [-1] * len(tokens)
        else:
            tokens = [blank if masked else token for token, masked in zip(state.tokens, state.masked, strict=True)]
            when = state.reveal_step
        found = spans(task, [tokens[n] for n in at], [when[n] for n in at])
        return [(span.text, span.step) for span in (found if task.text_tokenizer else found[::2])]  # no gaps between

    def text(self, state: State, until_mask: bool = False) -> str:
        """What is written, up to `max_tokens`; or the beginning of it that nothing will change any more."""
        written = self._response(state)
        if until_mask and None in written:
            written = written[: written.index(None)]
        return self.served.task.text([token for token in written if token is not None])

    def size(self, state: State) -> int:
        """Tokens of the text."""
        tokens, eos = self._response(state), self.served.task.eos_token_id
        return tokens.index(eos) if eos in tokens else len(tokens)

    def _response(self, state: State) -> list[int | None]:
        return [None if state.masked[n] else state.tokens[n] for n in self.written][: self.asked.max_tokens]

    def answer(self, state: State) -> dict[str, Any]:
        """What POST /v1/generate gives."""
        task, valid = self.served.task, None
        if self.asked.example is not None and task.has_checker:
            valid = bool(task.valid(torch.tensor([state.tokens]), self.truth)[0])
        return {
            "model": self.served.name,
            "policy": self.rule.name,
            "text": self.text(state),
            "tokens": self.shown(state),
            "steps": state.steps,
            "passes": state.passes,
            "budget": self.steps,
            "seed": self.asked.seed,
            "temperature": self.choice.temperature,
            "valid": valid,
            "seconds": round(state.seconds, 6),
            "queued_seconds": round(state.queued, 6),
            "command": self.command,
        }

    @property
    def command(self) -> str | None:
        """What repeats it in a terminal; `unmask sample` has no max_tokens."""
        asked = self.asked
        if self.is_cut:
            return None
        words = ["unmask", "sample", str(self.served.run), "--policy", self.rule.name, "--steps", str(self.steps)]
        if asked.prompt is None:
            words += ["--example", str(asked.example)]
        else:
            words += [f"--prompt={asked.prompt}"]
        words += ["--seed", str(asked.seed), "--temperature", as_text(self.choice.temperature)]
        words += ["--top-p", as_text(asked.top_p)] * (asked.top_p < 1)
        words += ["--top-k", str(asked.top_k)] * (asked.top_k > 0)
        words += ["--trust-task"] * self.served.trust_task
        return " ".join(map(quoted, [*words, "--trace"]))


def quoted(word: str) -> str:
    """For a shell; what cannot be printed is written out, as it could steer the terminal that it is pasted into."""
    if word.isprintable():
        return shlex.quote(word)

    def escaped(letter: str) -> str:
        if letter in "\\'":
            return f"\\{letter}"
        code = ord(letter)
        return letter if letter.isprintable() else f"\\x{code:02x}" if code < 128 else f"\\U{code:08x}"

    return f"$'{''.join(map(escaped, word))}'"


def completion_text(request: Request, state: State, ends: Sequence[str]) -> tuple[str, str]:
    """The text of a completion and why it ends."""
    whole = request.text(state)
    text = cut(whole, ends)
    limited = request.asked.max_tokens is not None and request.size(state) == request.asked.max_tokens
    has_end = request.served.task.eos_token_id is not None
    return text, "length" if text == whole and (limited or not has_end) else "stop"


def policies() -> list[dict[str, Any]]:
    """What GET /v1/policies tells."""
    return [
        {
            "name": usage.partition("(")[0],
            "usage": usage,
            "summary": formula,
            "words": words,
            "needs_order": issubclass(RULES[usage.partition("(")[0]], NetworkPolicy),
        }
        for usage, _, words, formula in listed_rules()
    ]
