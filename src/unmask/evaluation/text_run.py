"""A run of texts, asked with texts from anywhere: what it writes, and how likely a given response is.

The log-likelihood is a lower bound, from k orders of each response:

    log P(x_0) >= E[log mean_i exp(sum_t g_t^i)],     i = 1..k,     g as in `variational.self_posterior`

The orders are those of the policy: `learned`, or `iid`.  Of other rules no bound is known here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unmask.decoding.generate import Engine
from unmask.decoding.policies import IID, Learned, network_of, own_blocks, parse_policy, trained_steps
from unmask.decoding.tokens import TokenChoice
from unmask.display import say
from unmask.errors import UserError, prefixed, require
from unmask.evaluation.plan import open_run
from unmask.progress import progress
from unmask.rng import Purpose, uniforms
from unmask.runtime import Processes
from unmask.tasks.task import Examples, Task
from unmask.training.reading import read_denoiser, with_layout
from unmask.training.self_posterior import SelfObjective
from unmask.variational.self_posterior import many_sample_bound

MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
AT_ONCE = 32  # batches that the engine is given at once, padded to one length
KNOWN = {*MOST_TOKENS, "until", "do_sample", "temperature", "top_p", "top_k"}

T = TypeVar("T")


class Filled(NamedTuple):
    """A sequence with its response, without padding."""

    tokens: Tensor  # [L]
    response: Tensor  # [L] bool
    size: int  # tokens of the response without the EOS behind them

    @property
    def written(self) -> Tensor:
        """The tokens of the response up to the first EOS, and this one."""
        return self.tokens[self.response][: self.size + 1]


class TextRun:
    """Answers of one run.  All requests are read before the first is answered: what is wrong is told at once.

    policy, max_steps: a rule and its budget; by default the learned order at its own, else top-prob, a token per step.
    samples: k, the orders that a log-likelihood is computed from.
    batch_size: requests per pass; a log-likelihood has k sequences for each.
    denoiser: the folder of that of an order which is kept without it, if it does not lie where it lay.
    """

    def __init__(
        self,
        run: str | Path,
        policy: str = "",
        max_steps: int = 0,
        *,
        samples: int = 8,
        seed: int = 0,
        batch_size: int = 1,
        device: str | None = None,
        trust_task: bool = False,
        denoiser: str | None = None,
    ) -> None:
        require(type(samples) is int and samples >= 1, f"samples must be a whole number from 1 on, got {samples!r}")
        self.device = torch.device(device) if device else Processes().device
        model, plain, self.task, _ = open_run(Path(run), self.device, None, trust_task, denoiser)
        takes_texts = self.task.text_tokenizer is not None and type(self.task).prompted is not Task.prompted
        other = f"{run} is a run of task {self.task.name}, which takes no texts: give one of task text or gsm8k"
        require(takes_texts, other)
        selector = model.selector
        background = partial(self.task.token_frequencies, self.device)
        policy = policy or ("learned" if selector is not None else own_blocks("top-prob", plain.denoiser))
        self.rule = parse_policy(policy, selector, background)
        self.model = model if network_of(self.rule) is not None else plain
        sizes = torch.tensor([len(self.task.layout[-1])])  # known without the data of the run, which need not be here
        own = trained_steps(selector, int(sizes[0])) or self.task.length
        self.max_steps, self.samples, self.seed, self.batch_size = max_steps or own, samples, seed, batch_size
        self.mask, self.eos = self.model.denoiser.mask_token_id, self.task.eos_token_id
        Engine(self.model.denoiser, self.rule, self.max_steps, batch_size=batch_size)  # or says what is wrong
        if network_of(self.rule) is not None:
            self.rule.check(self.max_steps, sizes)

    def write(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """What is written for each prompt, with the options of lm-evaluation-harness: `until`, `max_gen_toks`, ...

        The text ends before the first of the strings `until`, at the end of the response, or after `max_gen_toks`.
        A run of pairs always writes a whole response, as it was trained to; a run of texts only so many tokens.
        """
        canvases, groups = [], defaultdict[TokenChoice, list[int]](list)
        for place, (prompt, options) in enumerate(requests):
            with prefixed(f"request {place}"):
                groups[self._choice(options)].append(place)
                tokens, response = self._room(*self._prompt(prompt), most_tokens(options))
                canvases.append(torch.where(response, self.mask, tokens))
        if ignored := sorted({name for _, options in requests for name in options} - KNOWN):
            say(f"unmask: generation options that have no meaning here: {', '.join(ignored)}", err=True)
        texts = [""] * len(requests)
        with progress("generate", len(requests)) as advance:
            for choice, places in groups.items():
                for place, written in zip(places, self._written(canvases, places, choice, advance), strict=True):
                    options = requests[place][1]
                    texts[place] = cut(self.task.text(written[: most_tokens(options)].tolist()), options.get("until"))
        return texts

    def log_likelihoods(self, requests: Sequence[tuple[str, str]], ids: Sequence[int]) -> list[tuple[float, bool]]:
        """Of each response to a prompt, the bound in nats, and whether greedy decoding writes it.

        ids name the draws: where they are the same, as for the choices of a question, the orders are too.
        A run of pairs is asked for the whole response, with EOS behind it: a bound, too, for what only begins so.
        """
        self._check_bound()
        sequences = []
        for place, (prompt, response) in enumerate(requests):
            with prefixed(f"request {place}"):
                sequences.append(self._filled(prompt, response))
        bounds = self._bounds(sequences, ids)
        canvases = [torch.where(one.response, self.mask, one.tokens) for one in sequences]
        with progress("greedy", len(requests)) as advance:
            found = self._written(canvases, range(len(canvases)), self._choice({}), advance)
        same = [torch.equal(one.written, row[: one.size + 1]) for one, row in zip(sequences, found, strict=True)]
        return list(zip(bounds, same, strict=True))

    def text_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """The bound of each whole text, in pieces as long as the run's: the sum over them."""
        self._check_bound()
        pairs = "this run was trained on pairs, so it knows no log-likelihood of whole texts: leave such tasks out"
        require(self.eos is None, pairs)
        pieces, owner = [], []
        for place, text in enumerate(texts):
            with prefixed(f"request {place}"):
                tokens = torch.tensor(self._encoded(text))
            for piece in tokens.split(self.task.length) if len(tokens) else ():
                pieces.append(Filled(piece, torch.ones_like(piece, dtype=torch.bool), len(piece)))
                owner.append(place)
        sums = [0.0] * len(texts)
        for place, bound in zip(owner, self._bounds(pieces, owner), strict=True):
            sums[place] += bound
        return sums

    def _choice(self, options: Mapping[str, Any]) -> TokenChoice:
        """Greedy unless it samples: with `do_sample` at temperature 1 where none is given."""
        sampled = options.get("do_sample")
        temperature = 0.0 if sampled is False else float(options.get("temperature", 1.0 if sampled else 0.0))
        among = (float(options.get("top_p", 1.0)), int(options.get("top_k", 0))) if temperature else (1.0, 0)
        return TokenChoice(temperature, *among, eos_token_id=self.eos, stop_at_eos=self.eos is not None)

    def _prompt(self, prompt: str) -> tuple[Tensor, Tensor]:
        """tokens [L] and response [L] bool of a sequence with this prompt, without padding."""
        examples = _encodable(self.task.prompted, prompt)
        real = examples.attention_mask[0]
        tokens, response = examples.tokens[0][real], examples.response[0][real]
        require(bool((~response).any()) or not prompt, f"{prompt[:40]!r} cannot be encoded: no part of it is known")
        require(self.mask not in tokens[~response], f"{prompt[:40]!r} holds the mask token: take it out")
        return tokens, response

    def _room(self, tokens: Tensor, response: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
        """The sequence with room for `size` tokens only, where texts have no end."""
        keep = torch.ones_like(response)
        if self.eos is None and size is not None:
            keep[response.nonzero()[size:, 0]] = False
        return tokens[keep], response[keep]

    def _filled(self, prompt: str, text: str) -> Filled:
        known = self._encoded(text)
        tokens, response = self._prompt(prompt)
        size, room = len(known), int(response.sum()) - (self.eos is not None)
        require(size > 0, f"the response {text[:40]!r} has no tokens: give one that is not empty")
        require(size <= room, f"the response has {size} tokens, and behind this prompt is room for {room}")
        tokens, response = self._room(tokens, response, size)
        tokens[response.nonzero()[:size, 0]] = torch.tensor(known)  # and EOS behind it, which is there already
        return Filled(tokens, response, size)

    def _encoded(self, text: str) -> list[int]:
        assert self.task.text_tokenizer is not None
        encode = self.task.text_tokenizer.encode
        found = list(_encodable(lambda text: encode(text, add_special_tokens=False).ids, text))
        require(self.mask not in found, f"{text[:40]!r} holds the mask token: take it out")
        return found

    def _written(
        self, canvases: Sequence[Tensor], places: Sequence[int], choice: TokenChoice, advance: Callable[[int], None]
    ) -> list[Tensor]:
        """The response that is written on each canvas [L] at these places."""
        engine = Engine(self.model.denoiser, self.rule, self.max_steps, choice, batch_size=self.batch_size)
        found, at_once = list[Tensor](), AT_ONCE * self.batch_size
        for some in (places[first : first + at_once] for first in range(0, len(places), at_once)):
            asked, ids = [canvases[place].to(self.device) for place in some], torch.tensor(some, device=self.device)
            tokens = engine.generate(asked, seed=self.seed, ids=ids, on_finished=advance).tokens
            for canvas, row in zip(asked, tokens, strict=True):
                found.append(row[-len(canvas) :][canvas == self.mask].cpu())  # padded on the left
        return found

    def _check_bound(self) -> None:
        rule = self.rule
        whole = "log-likelihoods here are of whole responses, and this model writes block by block"
        require(not self.model.block_size, f"{whole}: use unmask evaluate --bound")
        of_the_bound = isinstance(rule, Learned) and rule == Learned(rule.network, price=rule.price)
        instead = "give policy=learned, with no option but its price, or policy=iid"
        known = of_the_bound or isinstance(rule, IID)
        require(known, f"no log-likelihood is known of the policy {rule.name}: {instead}")
        say(f"unmask: log-likelihoods are lower bounds, each from {self.samples} orders (samples)", err=True)

    @torch.no_grad()
    def _bounds(self, sequences: Sequence[Filled], ids: Sequence[int]) -> list[float]:
        found = list[float]()
        with progress("log-likelihood", len(sequences)) as advance:
            for first in range(0, len(sequences), self.batch_size):
                batch = sequences[first : first + self.batch_size]
                parts = [(one.tokens, one.response, torch.ones_like(one.response)) for one in batch]
                padded = (pad_sequence(list(part), True) for part in zip(*parts, strict=True))  # [B, L] each
                examples = Examples(*padded).to(self.device)
                named = torch.tensor(ids[first : first + len(batch)], device=self.device)
                found += many_sample_bound(self._walks(examples, named)).tolist()
                advance(len(batch))
        return found

    def _walks(self, examples: Examples, ids: Tensor) -> Tensor:
        """sum_t g_t of k orders of each response: [B, k], float64."""
        if isinstance(self.rule, IID):
            return iid_walks(self.model.denoiser, examples, ids, self.max_steps, self.samples, self.seed)
        assert isinstance(self.rule, Learned)
        objective = SelfObjective(self.model, self.samples, self.max_steps, self.seed)
        low, high = self.rule.network.prices or (0.0, 0.0)
        price = torch.full(ids.shape, min(max(self.rule.price, low), high), device=self.device)
        return objective.orders(examples, ids, torch.full_like(ids, self.max_steps), price).gain.sum(0).double()


def iid_walks(denoiser: Any, examples: Examples, ids: Tensor, steps: int, samples: int, seed: int) -> Tensor:
    """sum_i log mu(x_0^n : s_n = i) of k orders of each response [B, k], float64: position n is revealed at step s_n.

    s_n ~ uniform{0, ..., S-1}, independently: ancestral sampling with the linear schedule.
    """
    size, k = len(examples), samples
    rows = torch.arange(size).repeat_interleave(k)
    many = examples.rows(rows)
    words = ids.repeat_interleave(k)[:, None], torch.arange(k, device=ids.device).repeat(size)[:, None]
    u = uniforms(seed, Purpose.TRAJECTORY, *words, many.position, dtype=torch.float64)  # [B k, L]
    step = torch.where(many.response, (steps * u).long().clamp(max=steps - 1), -1)
    total = torch.zeros(size * k, dtype=torch.float64, device=ids.device)
    for i in range(steps):
        here = (step == i).any(-1).nonzero()[:, 0]
        if not len(here):
            continue
        batch, layout = with_layout(many.rows(here.cpu()), denoiser)
        log_mu = read_denoiser(denoiser, batch.tokens, step[here] >= i, layout).log_mu
        total[here] += torch.where(step[here] == i, log_mu, 0.0).sum(-1).double()
    return total.view(size, k)


def most_tokens(options: Mapping[str, Any]) -> int | None:
    """The most tokens that a request asks for; None: as many as there are."""
    found = next((options[name] for name in MOST_TOKENS if options.get(name) is not None), None)
    require(found is None or int(found) >= 1, f"max_gen_toks must be at least 1, got {found}")
    return None if found is None else int(found)


def cut(text: str, until: str | Sequence[str] | None) -> str:
    """The text before the first place where one of the strings `until` begins."""
    ends = [until] if isinstance(until, str) else until or []
    return text[: min((text.index(end) for end in ends if end and end in text), default=len(text))]


def _encodable(encode: Callable[[str], T], text: str) -> T:
    try:
        return encode(text)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise UserError(f"{text[:40]!r} cannot be encoded ({error})") from None
