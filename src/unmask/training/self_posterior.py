"""The selector as its own posterior, as an objective: k orders of each sequence, chosen by the selector itself.

Legend: B sequences, k trajectories of each, L positions, T the largest budget, R = the trajectories that hold a mask,
W = the steps of all trajectories, U = the states that they visit: x_T of each sequence is one.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask.decoding.tokens import TokenChoice
from unmask.models.frozen import FrozenDenoiser
from unmask.models.order_model import OrderModel
from unmask.models.packing import Layout, scatter
from unmask.rng import Purpose, uniforms
from unmask.tasks.task import Examples, Task, check_no_mask, to_device
from unmask.training.objectives import Outcome
from unmask.training.reading import log_likelihood, one_block, read_denoiser, selector_features, with_layout
from unmask.variational.selection import Selection
from unmask.variational.self_posterior import distinct_reward, estimate_self

AT_ONCE = 4  # states per trajectory whose graph of the selector is held at once
_WHOLE_STEP = 2**31  # the position that names the one draw of a whole step


class States(NamedTuple):
    """What the selector reads of U states: [U, L] or [U] each."""

    hidden: Tensor  # [U, L, D]
    confidences: Tensor  # [U, L, 3 or 4]
    masked: Tensor
    t: Tensor
    budget: Tensor
    price: Tensor
    proposed: Tensor  # tokens: those drawn where masked


class Step(NamedTuple):
    """One step of R trajectories, from R states, or at x_T from fewer that they share."""

    states: States
    logits: Tensor  # [states, L]: the selector's, without its graph
    log_mu: Tensor  # [states, L]: of the true tokens
    sequence: Tensor  # [states], on the CPU: which of the B
    state: Tensor  # [R]: the state of each trajectory among all U
    place: Tensor  # [R]: that of each trajectory in [T, B k]
    reveal: Tensor  # [R, L]


class Orders(NamedTuple):
    """What k trajectories of each sequence earned and decided at every step: [T, B, k], the last step t = 0 first."""

    gain: Tensor  # g_t
    expected: Tensor  # E[g_t | x_{t+1}] with the selector's graph; 0 where nothing was decided
    log_p: Tensor  # log P(r_t | x_{t+1}), likewise
    holds_mask: Tensor  # bool: x_{t+1} holds a mask
    tokens: Tensor  # [B, k, L]: the true ones, or with a checker those that were written
    revealed_at: Tensor  # [B, k, L]: the number of the step, from 0; -1 where given
    deviation: Tensor | None = None  # log P - log P_ref of r_t, without a graph, where there is a reference


class SelfObjective(nn.Module):
    """-J_lambda in nats per token (`variational.self_posterior`); with a `checker`, -(valid - lambda steps).

    Every sequence has a price, log-uniform in the selector's range, and a budget: T for one half of them, for the
    others uniform in {least_budget, ..., T}, or log-uniform.  Its k trajectories share both.
    checker: the task that judges the tokens, which are then the denoiser's own, chosen at `temperature`.  All k
    trajectories share the draws of their tokens.
    On a block-causal denoiser all this is about one block of each sequence, given those before it (`one_block`).
    distinct: an answer that another sequence of the batch wrote too earns nothing (`distinct_reward`); where there is
    EOS, answers end with the first one.
    reference_weight: of the KL from the selector's start, f = 0, which is a rule; 0: none.

    learn_denoiser: it learns from one of the states that each sequence visits, S g_t for t uniform among S steps.  With
    a checker too, in nats: the true tokens take the place of those that were written.
    """

    seed_word: Tensor

    def __init__(
        self,
        model: OrderModel,
        trajectories: int,
        least_budget: int,
        seed: int,
        *,
        checker: Task | None = None,
        temperature: float = 1.0,
        distinct: bool = False,
        reference_weight: float = 0.0,
        log_uniform: bool = False,
        learn_denoiser: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        assert model.selector is not None
        self.model, self.budget, self.least_budget = model, model.selector.budget, least_budget
        self.trajectories, self.seed = trajectories, seed
        self.checker, self.choice, self.learn_denoiser = checker, TokenChoice(temperature), learn_denoiser
        self.distinct, self.reference_weight, self.log_uniform = distinct, reference_weight, log_uniform
        self.register_buffer("seed_word", torch.tensor(seed), persistent=False)
        self.read = torch.compile(_read, dynamic=True) if compile else _read
        self.draw = torch.compile(_draw, dynamic=True) if compile else _draw
        self.earn = torch.compile(_earn, dynamic=True) if compile else _earn

    def forward(self, examples: Examples, ids: Tensor, u: Tensor) -> Outcome:
        """examples [B]; ids [B], which name their draws; u [B] stratified uniforms, which choose the prices."""
        assert self.model.selector is not None
        device = next(self.model.parameters()).device
        if size := self.model.block_size:
            examples = one_block(examples, u, size, self.seed)
        examples, ids = examples.to(device), to_device(ids, device)
        if isinstance(denoiser := self.model.denoiser, FrozenDenoiser):  # its mask may be one of the task's tokens
            tokenizer = self.model.tokenizer
            check_no_mask(examples, denoiser.mask_token_id, partial(tokenizer.decode, skip_special_tokens=False))
        low, high = self.model.selector.prices or (1.0, 1.0)
        price = to_device((math.log(low) + u.double() * math.log(high / low)).exp().float(), device)
        orders = self.orders(examples, ids, self._budgets(ids), price)
        steps, reward = orders.holds_mask.sum(0).float(), None
        if self.checker is not None:
            answers = orders.tokens.cpu()
            valid = self._judged(answers, examples)
            reward = (distinct_reward(valid, self._ended(answers)) if self.distinct else valid).to(price)
        price = price if self.model.selector.prices else torch.zeros_like(price)
        penalty = None if orders.deviation is None else self.reference_weight * orders.deviation
        estimate = estimate_self(
            orders.gain, orders.expected, orders.log_p, orders.holds_mask, price, reward, penalty=penalty
        )
        loss = estimate.loss - self._one_step(examples, ids, orders) if self.learn_denoiser else estimate.loss
        # The likelihood is per token, as everywhere; a reward is that of a sequence.
        unit = to_device(examples.num_response, device) if reward is None else torch.ones_like(price)  # [B]
        metrics = {"value": (estimate.value / unit).mean(), "q_steps": steps.mean()}
        if orders.deviation is not None:
            metrics["reference_kl"] = (orders.deviation.sum(0).mean(-1) / unit).mean()
        if reward is None:
            metrics["elbo"] = (orders.gain.sum(0).mean(-1) / unit).mean()
        else:
            metrics["reward"] = reward.mean()
            if self.distinct:
                metrics["valid"] = valid.to(price).mean()
        return Outcome((loss / unit).mean(), metrics)

    def _one_step(self, examples: Examples, ids: Tensor, orders: Orders) -> Tensor:
        """S g_t [B] with the denoiser's graph, for a step of the first trajectory that is uniform among its S.

        Its mean over the steps is sum_t g_t.
        """
        steps, at = orders.holds_mask[..., 0].sum(0), orders.revealed_at[:, 0]  # [B], [B, L]
        index = (steps * uniforms(self.seed, Purpose.STATE, ids, dtype=torch.float64)).long()[:, None]
        examples, layout = with_layout(examples, self.model)
        log_mu = read_denoiser(self.model.denoiser, examples.tokens, at >= index, layout).log_mu
        return steps * torch.where(at == index, log_mu, 0.0).sum(-1)

    def _budgets(self, ids: Tensor) -> Tensor:
        """[B]."""
        assert self.model.selector is not None
        most, least = self.budget, self.least_budget
        u = uniforms(self.seed, Purpose.BUDGET, ids, dtype=torch.float64)
        few = least * ((most + 1) / least) ** (2 * u) if self.log_uniform else least + (most + 1 - least) * 2 * u
        return torch.where(u < 0.5, few.long().clamp(least, most), most)

    def orders(self, examples: Examples, ids: Tensor, budget: Tensor, price: Tensor) -> Orders:
        """k trajectories of each example [B], with `budget` [B] steps at most, at `price` [B].

        They are drawn without a graph.  The selector's is then made of all U states at once.
        """
        selector, k, learns = self.model.selector, self.trajectories, torch.is_grad_enabled()
        assert selector is not None
        steps, tokens, revealed_at = self._rollouts(examples, ids, budget, price, keep_hidden=learns)
        states = States(*map(torch.cat, zip(*(step.states for step in steps), strict=True)))
        logits, log_mu, sequence, state, place, reveal = map(torch.cat, zip(*(step[1:] for step in steps), strict=True))
        shape = len(steps), len(examples), k
        del steps  # the hidden states are held once
        if learns:
            logits = self._logits_with_graph(examples.rows(sequence), states, AT_ONCE * len(examples) * k)
        masked, forced = states.masked[state], states.t[state] == 0  # [W, L], [W]
        earned = self.earn(selector.selection, logits[state], log_mu[state], masked, forced, reveal)
        parts = [*earned, masked.any(-1)]
        if self.reference_weight:
            rule = selector.start_logits(states.confidences, states.masked, states.t, states.price)
            ruled = selector.selection.log_prob(reveal, rule[state], masked)
            parts.append(torch.where(forced, 0.0, earned[-1].detach() - ruled))
        told = (scatter(part, place, shape).flip(0) for part in parts)
        gain, expected, log_p, holds_mask, *deviation = told
        written = (part.view(-1, k, tokens.shape[-1]) for part in (tokens, revealed_at))
        return Orders(gain, expected, log_p, holds_mask, *written, *deviation)

    @torch.no_grad()
    def _rollouts(
        self, examples: Examples, ids: Tensor, budget: Tensor, price: Tensor, *, keep_hidden: bool
    ) -> tuple[list[Step], Tensor, Tensor]:
        """The steps of all trajectories; the tokens at the end and the number of the step of each, [B k, L].

        x_T is the same for all k trajectories, so it is one state; trajectories without a mask are dropped.
        """
        selector, k, size = self.model.selector, self.trajectories, len(examples) * self.trajectories
        assert selector is not None
        tokens, masked = (part.repeat_interleave(k, 0) for part in (examples.tokens, examples.response))  # [B k, L]
        num_masked = examples.num_response.repeat_interleave(k)  # [B k], on the CPU
        revealed_at, position = torch.full_like(tokens, -1), examples.position
        steps, visited = list[Step](), 0
        for index in range(int(budget.max())):
            rows = num_masked.nonzero()[:, 0]  # [R]
            if not len(rows):
                break
            read = torch.arange(0, size, k) if index == 0 else rows  # one trajectory of each state
            there = to_device(read, masked.device)
            sequence = there // k
            states, logits, log_mu = self._states(
                examples.rows(read // k), tokens[there], masked[there], int(num_masked[read].sum()), index,
                budget[sequence], price[sequence], ids[sequence],
            )  # fmt: skip
            state, proposed = torch.arange(len(read), device=there.device), states.proposed
            if index == 0:
                sequence = state = state.repeat_interleave(k)
                there, proposed = torch.arange(size, device=there.device), proposed[state]
            at = masked[there]
            words = torch.stack([ids[sequence], there % k, torch.full_like(there, index)])  # [3, R]
            draws = self.seed_word, words, position[sequence]
            reveal = self.draw(selector.selection, logits[state], at, budget[sequence] == index + 1, *draws)
            if not keep_hidden:
                states = states._replace(hidden=torch.empty_like(states.hidden[..., :0]))
            steps.append(Step(states, logits, log_mu, read // k, state + visited, there + size * index, reveal))
            visited += len(read)
            if self.checker is not None:
                tokens[there] = torch.where(reveal, proposed, tokens[there])
            masked[there], revealed_at[there] = at & ~reveal, torch.where(reveal, index, revealed_at[there])
            num_masked = masked.sum(-1).cpu()  # the device is waited for
        # In older versions of torch later passes would take the weights that autocast has cast here, without a graph.
        torch.clear_autocast_cache()
        return steps, tokens, revealed_at

    def _states(
        self,
        examples: Examples,
        tokens: Tensor,
        masked: Tensor,
        num_masked: int,
        index: int,
        budget: Tensor,
        price: Tensor,
        ids: Tensor,
    ) -> tuple[States, Tensor, Tensor]:
        """R states [R, L] before step `index`; the selector's logits, and log mu of the true tokens."""
        model = self.model
        assert model.selector is not None
        examples, layout = self._with_layout(examples)
        reading = read_denoiser(model.denoiser, tokens, masked, layout, num_masked)
        chosen = reading.truth
        if self.checker is not None:
            chosen = reading.logits.argmax(-1)
            if self.choice.temperature > 0:
                u = uniforms(self.seed, Purpose.TOKEN, ids[:, None], index, examples.position, dtype=torch.float64)
                chosen = self.choice.sample(reading.logits, u.flatten()[reading.at])
        log_mu, seen = self.read(reading.logits, reading.truth, chosen if model.selector.drawn else None)
        proposed = tokens
        if self.checker is not None:
            log_mu, proposed = torch.zeros_like(log_mu), torch.where(masked, reading.spread(chosen), tokens)
        # Where it reads no hidden states, none are kept: they may be logits.
        hidden = reading.hidden if model.selector.read_hidden is not None else seen.new_empty(*masked.shape, 0)
        states = States(hidden, reading.spread(seen), masked, budget - 1 - index, budget, price, proposed)
        return states, self._logits(states, layout), reading.spread(log_mu)

    def _with_layout(self, examples: Examples) -> tuple[Examples, Layout]:
        assert self.model.selector is not None
        # Denoisers of others' would get a mask, where none is faster.
        any_number = not isinstance(self.model.denoiser, FrozenDenoiser)
        return with_layout(examples, self.model.selector, any_number=any_number)

    def _logits(self, states: States, layout: Layout) -> Tensor:
        """[U, L]."""
        hidden, confidences, masked, t, budget, price, proposed = states
        selector = self.model.selector
        assert selector is not None
        drawn = proposed if selector.drawn else None
        logits: Tensor = selector(hidden, confidences, masked, t, layout, budget, price, drawn)
        return logits

    def _logits_with_graph(self, examples: Examples, states: States, most: int) -> Tensor:
        """The selector's logits [U, L] of states of these U examples.

        The graph of `most` states is held at once: with more, it is made in the backward pass, part by part.
        """
        ask, logits = self._logits, list[Tensor]()
        if len(examples) > most:
            ask = partial(checkpoint, self._logits, use_reentrant=False, preserve_rng_state=False)
        for rows in torch.arange(len(examples)).split(most):
            layout = self._with_layout(examples.rows(rows))[1]
            logits.append(ask(States(*(field[rows[0] : rows[-1] + 1] for field in states)), layout))
        return torch.cat(logits)

    def _judged(self, tokens: Tensor, examples: Examples) -> Tensor:
        """[B, k] bool, from tokens [B, k, L] on the CPU."""
        assert self.checker is not None
        rows = torch.arange(len(examples)).repeat_interleave(self.trajectories)
        return self.checker.valid(tokens.flatten(0, 1), examples.rows(rows).to("cpu")).view(len(examples), -1)

    def _ended(self, answers: Tensor) -> Tensor:
        """EOS everywhere behind the first one of the answers [B, k, L]."""
        assert self.checker is not None
        eos = self.checker.eos_token_id
        return answers if eos is None else answers.masked_fill((answers == eos).cumsum(-1) > 0, eos)


def _read(logits: Tensor, truth: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
    """log mu of the true tokens [M], and what the selector reads of the logits [M, V]: [M, 3 or 4]."""
    return log_likelihood(logits, truth), selector_features(logits, drawn)


def _draw(
    selection: Selection, logits: Tensor, masked: Tensor, forced: Tensor, seed: Tensor, words: Tensor, position: Tensor
) -> Tensor:
    """r_t [R, L] from the selector's logits [R, L]; where a row is `forced` it reveals all.

    The draws are functions of the seed [], the words (id, trajectory, step) of the row [3, R] and the position [R, L]
    alone; the last is for the whole step.
    """
    position = torch.nn.functional.pad(position, (0, 1), value=_WHOLE_STEP)
    draws = uniforms(seed, Purpose.TRAJECTORY, *words[..., None], position, dtype=torch.float64)  # [R, L + 1]
    return masked & (forced[:, None] | selection.sample(logits, masked, draws))


def _earn(
    selection: Selection, logits: Tensor, log_mu: Tensor, masked: Tensor, forced: Tensor, reveal: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """g_t, E[g_t | x_{t+1}] and log P(r_t | x_{t+1}) [W]; where a row is `forced`, nothing is decided."""
    gained = torch.where(reveal, log_mu, 0.0).sum(-1)
    expected = (selection.marginal(logits, masked) * log_mu).sum(-1)
    decided = selection.log_prob(reveal, logits, masked)
    return gained, torch.where(forced, 0.0, expected), torch.where(forced, 0.0, decided)
