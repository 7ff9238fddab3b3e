"""The law of what is generated, against enumeration, on tabular models: N = 3, V = 2, T = 3.

Every comparison is a chi-square test of a fixed draw that a right sampler fails with probability below 1e-5.
"""

import math
from collections import Counter, defaultdict
from itertools import permutations, product

import pytest
import torch

from tests.decoding.small import TabularDenoiser, TabularSelector
from tests.decoding.steps import product_law, sigmoid
from tests.statistics import assert_follows
from tests.variational.tiny import tiny
from unmask.decoding.generate import generate
from unmask.decoding.policies import Learned, parse_policy
from unmask.variational.enumeration import generative_chain
from unmask.variational.selection import Bernoulli, NonEmpty

V, N, T = 2, 3, 3
MASK = V
DRAWS = 20_000
TABLES = tiny(NonEmpty(), length=N, vocab_size=V, budget=T, seed=4)
THETA, PSI = 1.5 * TABLES.theta.detach(), 1.5 * TABLES.psi.detach()
RADIX = (V + 1) ** torch.arange(N)
MODEL = TABLES.model._replace(
    denoiser=lambda x: THETA[(x * RADIX).sum(-1)].log_softmax(-1), selector=lambda x, t: PSI[t][(x * RADIX).sum(-1)]
)
PROMPTS = [(MASK, MASK, MASK), (MASK, 1, MASK)]


# --- the slow truth ---------------------------------------------------------------------------------------------------

MU, PSI_ROWS = THETA.softmax(-1).tolist(), PSI.tolist()


def row_of(x):
    return sum(token * (V + 1) ** n for n, token in enumerate(x))


def masks_of(x):
    return [n for n in range(N) if x[n] == MASK]


def response_size(x, at_reveal):
    """What is masked, and what was revealed before."""
    return len({*masks_of(x), *at_reveal})


def with_tokens(law, x):
    """{(reveals, re-masked, fell back)} of positions as {((position, token) pairs, re-masked, fell back)}."""
    mu, written = MU[row_of(x)], defaultdict(float)
    for (chosen, again, fell_back), probability in law.items():
        places = sorted(chosen)
        for tokens in product(range(V), repeat=len(places)):
            weight = math.prod(mu[n][token] for n, token in zip(places, tokens, strict=True))
            written[tuple(zip(places, tokens, strict=True)), again, fell_back] += probability * weight
    return written


def of_positions(law):
    """A law of the positions alone: tokens are drawn for whatever is revealed."""
    return lambda x, i, S, at_reveal: with_tokens(law(x, i, S, at_reveal), x)


NEVER = frozenset()


@of_positions
def iid_law(x, i, S, at_reveal):
    return {(chosen, NEVER, 0): p for chosen, p in product_law(dict.fromkeys(masks_of(x), 1 / (S - i))).items()}


@of_positions
def blocks_of_two_iid_law(x, i, S, at_reveal):
    """Three positions: two blocks, the first has two of the three steps.  Two positions: one block, three steps."""
    if response_size(x, at_reveal) == 2:
        p = dict.fromkeys(masks_of(x), 1 / (S - i))
    else:
        first = [n for n in masks_of(x) if n < 2]
        p = dict.fromkeys(first, 1 / (2 - i)) if first else {2: 1.0}
    return {(chosen, NEVER, 0): probability for chosen, probability in product_law(p).items()}


def selector_logits(x, i, S):
    logits = PSI_ROWS[S - 1 - i][row_of(x)]
    return {n: logits[n] for n in masks_of(x)}


@of_positions
def nonempty_law(x, i, S, at_reveal):
    law = product_law({n: sigmoid(s) for n, s in selector_logits(x, i, S).items()})
    nothing = law.pop(frozenset())
    return {(chosen, NEVER, 0): probability / (1 - nothing) for chosen, probability in law.items()}


def bernoulli_law(temperature):
    @of_positions
    def law_of(x, i, S, at_reveal):
        p = {n: sigmoid(s / temperature) for n, s in selector_logits(x, i, S).items()}
        law = defaultdict(float)
        for chosen, probability in product_law(p).items():
            law[chosen or frozenset([max(p, key=p.get)]), NEVER, 0 if chosen else 1] += probability
        return law

    return law_of


@of_positions
def one_at_a_time_law(x, i, S, at_reveal):
    weights = {n: math.exp(s) for n, s in selector_logits(x, i, S).items()}
    return {(frozenset([n]), NEVER, 0): weight / sum(weights.values()) for n, weight in weights.items()}


@of_positions
def stochastic_law(x, i, S, at_reveal):
    """Without replacement, weights exp(c / 0.3), k_i of them."""
    weights = {n: math.exp(max(MU[row_of(x)][n]) / 0.3) for n in masks_of(x)}
    size, law = response_size(x, at_reveal), defaultdict(float)
    count = size // S + (i < size % S)
    for order in permutations(weights, min(count, len(weights))):
        left, probability = sum(weights.values()), 1.0
        for n in order:
            probability *= weights[n] / left
            left -= weights[n]
        law[frozenset(order), NEVER, 0] += probability
    return law


def remdm_law(sigma):
    """sigma(sigma_max, {revealed position: its p at reveal}, masked positions) gives {position: sigma}."""

    @of_positions
    def law_of(x, i, S, at_reveal):
        now, soon = i / S, (i + 1) / S
        at_most = 1.0 if i == 0 else min(1.0, (1 - soon) / now)
        doubt = sigma(at_most, {n: p for n, p in at_reveal.items() if x[n] != MASK}, masks_of(x))
        reveal = {n: (soon - (1 - doubt[n]) * now) / (1 - now) for n in masks_of(x)}
        again = {n: doubt[n] for n in at_reveal if x[n] != MASK}
        return {
            (chosen, masked, 0): p * q
            for (chosen, p), (masked, q) in product(product_law(reveal).items(), product_law(again).items())
        }

    return law_of


def capped(at_most, revealed, masked):
    return dict.fromkeys([*revealed, *masked], min(0.3, at_most))


def rescaled(at_most, revealed, masked):
    return dict.fromkeys([*revealed, *masked], 0.4 * at_most)


def by_confidence(at_most, revealed, masked):
    total = sum(math.exp(-p) for p in revealed.values())
    return dict.fromkeys(masked, 0.0) | {n: at_most * math.exp(-p) / total for n, p in revealed.items()}


def pull(drawn, log_p):
    """What `SeesDrawn` adds to a logit, from the tokens drawn [..., N] and log p of them: each position sees all."""
    return 1.5 * log_p + 0.8 * drawn - 0.6 * drawn.sum(-1, keepdim=True)


class SeesDrawn(TabularSelector):
    """A selector that reads the tokens that were drawn, too."""

    drawn = True

    def __call__(self, hidden, confidences, masked, t, attention_mask, max_steps, price, drawn):
        logits = super().__call__(hidden, confidences[..., :3], masked, t, attention_mask, max_steps, price)
        return logits + pull(drawn, confidences[..., 3])


def drawn_law(x, i, S, at_reveal):
    """Proposals first: which positions are revealed depends on them, and what is not is drawn anew at the next step."""
    mu, masked, law = MU[row_of(x)], masks_of(x), defaultdict(float)
    for tokens in product(range(V), repeat=len(masked)):
        proposal = dict(zip(masked, tokens, strict=True))
        drawn = torch.tensor([float(proposal.get(n, x[n])) for n in range(N)])
        log_p = torch.tensor([math.log(mu[n][proposal[n]]) if n in proposal else 0.0 for n in range(N)])
        shift = pull(drawn, log_p).tolist()
        chosen_law = product_law({n: sigmoid(s + shift[n]) for n, s in selector_logits(x, i, S).items()})
        nothing = chosen_law.pop(frozenset())
        for chosen, probability in chosen_law.items():
            reveals = tuple((n, proposal[n]) for n in masked if n in chosen)
            weight = math.prod(mu[n][proposal[n]] for n in masked)
            law[reveals, NEVER, 0] += weight * probability / (1 - nothing)
    return law


def p2_law(x, i, S, at_reveal):
    """Proposals first: which positions are doubted depends on them."""
    mu, masked, law = MU[row_of(x)], masks_of(x), defaultdict(float)
    written = [*at_reveal, *(n for n in masked if n not in at_reveal)]  # the response
    for tokens in product(range(V), repeat=len(masked)):
        proposal = dict(zip(masked, tokens, strict=True))
        score = {n: mu[n][proposal[n] if n in proposal else x[n]] for n in sorted(written)}
        low = sorted(score, key=lambda n: (score[n], n))[: len(written) * (S - 1 - i) // S]
        reveals = tuple((n, proposal[n]) for n in masked if n not in low)
        again = frozenset(n for n in low if n not in proposal)
        law[reveals, again, 0] += math.prod(mu[n][proposal[n]] for n in masked)
    return law


def exact_law(prompt, law_of_a_step, S, remasks=False):
    """{(tokens, steps of the last reveal, revisions, times nothing was selected): probability}, every branch."""
    law = defaultdict(float)

    def follow(x, steps, revisions, at_reveal, nothing, i, probability):
        if i == S or (not masks_of(x) and not remasks):
            law[x, steps, revisions, nothing] += probability
            return
        everything = {(frozenset(masks_of(x)), NEVER, 0): 1.0}
        outcomes = with_tokens(everything, x) if i == S - 1 else law_of_a_step(x, i, S, at_reveal)
        for (reveals, again, fell_back), weight in outcomes.items():
            if weight == 0:
                continue
            written, when, often, known = list(x), list(steps), list(revisions), dict(at_reveal)
            for n, token in reveals:
                written[n], when[n], known[n] = token, i, MU[row_of(x)][n][token]
            for n in again:
                written[n], often[n] = MASK, often[n] + 1
            state = tuple(written), tuple(when), tuple(often), known, nothing + fell_back
            follow(*state, i + 1, probability * weight)

    follow(tuple(prompt), (-1,) * N, (0,) * N, {}, 0, 0, 1.0)
    assert sum(law.values()) == pytest.approx(1)
    return law


# --- draws against it -------------------------------------------------------------------------------------------------


def draw(prompt, policy, max_steps=T):
    prompts = torch.tensor(prompt).expand(DRAWS, N)
    return generate(TabularDenoiser(THETA), prompts, policy, max_steps, seed=12, temperature=1.0)


def outcomes(out):
    columns = (map(tuple, part.tolist()) for part in (out.tokens, out.reveal_step, out.revisions))
    return Counter(zip(*columns, out.nothing_selected.tolist(), strict=True))


def assert_drawn_from(law, counts):
    assert set(counts) <= {outcome for outcome, probability in law.items() if probability > 0}
    draws = sum(counts.values())
    assert_follows([counts.get(outcome, 0) for outcome in law], [draws * probability for probability in law.values()])


LAWS = [
    ("iid", iid_law, T),
    ("blocks(2,iid)", blocks_of_two_iid_law, T),
    ("stochastic(top-prob,0.3)", stochastic_law, 2),
    ("learned", nonempty_law, T),
    ("lo-arm", one_at_a_time_law, T),
    ("reward:0.5", bernoulli_law(0.5), T),
    ("remdm-cap:0.3", remdm_law(capped), 4),
    ("remdm-rescale:0.4", remdm_law(rescaled), 4),
    ("remdm-conf", remdm_law(by_confidence), 4),
    ("p2", p2_law, 4),
]


@pytest.mark.parametrize(("name", "law", "S"), LAWS, ids=[name for name, _, _ in LAWS])
def test_tokens_steps_and_revisions_follow_the_enumerated_law(name, law, S):
    for prompt in PROMPTS if name in ("blocks(2,iid)", "learned", "remdm-conf") else PROMPTS[:1]:
        follows(prompt, parse_policy(name, TabularSelector(PSI, NonEmpty())), law, S)


def test_the_bernoulli_selector_follows_the_enumerated_law():
    follows(PROMPTS[1], Learned(TabularSelector(PSI, Bernoulli())), bernoulli_law(1.0), T)


def test_a_selector_that_sees_the_drawn_tokens_follows_the_enumerated_law():
    for prompt in PROMPTS:
        follows(prompt, Learned(SeesDrawn(PSI, NonEmpty())), drawn_law, T)


def test_a_selector_that_sees_the_drawn_tokens_warns_of_greedy_ones(recwarn):
    greedy = {"temperature": 0.0}
    for policy, options in ((SeesDrawn, greedy), (SeesDrawn, {"temperature": 0.5}), (TabularSelector, greedy)):
        generate(TabularDenoiser(THETA), torch.tensor(PROMPTS), Learned(policy(PSI, NonEmpty())), T, **options)
    (said,) = recwarn
    assert str(said.message).endswith("(model.selector.drawn), and greedy ones are not: give a temperature above 0")


def follows(prompt, policy, law, S):
    out = draw(prompt, policy, S)
    law = exact_law(prompt, law, S, policy.remasks)
    assert_drawn_from(law, outcomes(out))
    written = defaultdict(float)
    for (tokens, _, _, _), probability in law.items():
        written[tokens] += probability
    assert_drawn_from(written, Counter(map(tuple, out.tokens.tolist())))


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_learned_nonempty_is_the_model_of_the_bound(prompt):
    """generate() draws from the same P that the bound is a bound of: tokens, steps, and how many of them."""
    chain, states = generative_chain(MODEL, N, T, torch.tensor(prompt))
    out = draw(prompt, Learned(TabularSelector(PSI, MODEL.selection)))
    law = dict(zip(map(tuple, states.tolist()), chain.probabilities[0].tolist(), strict=True))
    assert_drawn_from(law, Counter(map(tuple, out.tokens.tolist())))

    when = chain.reveal_step_distribution()  # [T, N], row t
    for n in range(N):
        if prompt[n] == MASK:
            steps = {T - 1 - t: when[t, n].item() for t in range(T)}
            assert_drawn_from(steps, Counter(out.reveal_step[:, n].tolist()))

    num_steps = out.num_steps.double()
    error = (num_steps.mean() - chain.expected_steps()) / (num_steps.std() / DRAWS**0.5)
    assert abs(error.item()) < 5  # 6e-7 by chance
    assert num_steps.std() > 0


def test_exact_laws_agree_on_the_nonempty_selector():
    """The recursion above against the library's enumeration: two independent truths."""
    chain, states = generative_chain(MODEL, N, T)
    written = defaultdict(float)
    for (tokens, _, _, _), probability in exact_law(PROMPTS[0], nonempty_law, T).items():
        written[tokens] += probability
    for state, probability in zip(states.tolist(), chain.probabilities[0].tolist(), strict=True):
        assert written[tuple(state)] == pytest.approx(probability, abs=1e-12)


def test_a_selector_that_never_selects_falls_back_at_every_step_but_the_last():
    """Each fallback reveals one position, the most probable; the last step reveals the rest and asks nobody."""
    budget, length = 4, 6
    theta = torch.zeros((V + 1) ** length, length, V, dtype=torch.float64)
    logits = torch.tensor([-60.0, -40.0, -90.0, -50.0, -70.0, -80.0], dtype=torch.float64)
    psi = logits.expand(budget, (V + 1) ** length, length)
    prompts = torch.full((5, length), MASK)
    out = generate(TabularDenoiser(theta), prompts, Learned(TabularSelector(psi, Bernoulli())), budget)
    assert out.nothing_selected.tolist() == [budget - 1] * 5
    assert out.num_steps.tolist() == [budget] * 5
    assert out.reveal_step.tolist() == [[2, 0, 3, 1, 3, 3]] * 5
    nonempty = generate(TabularDenoiser(theta), prompts, Learned(TabularSelector(psi, NonEmpty())), budget)
    assert nonempty.nothing_selected.tolist() == [0] * 5
    assert nonempty.num_steps.tolist() == [budget] * 5


def test_nothing_is_counted_after_a_sequence_is_done():
    """Two tokens, four steps: both fall back twice, and then there is nothing left to select."""
    theta = torch.zeros((V + 1) ** 2, 2, V, dtype=torch.float64)
    psi = torch.full((4, (V + 1) ** 2, 2), -50.0, dtype=torch.float64)
    out = generate(
        TabularDenoiser(theta), torch.full((2, 2), MASK), Learned(TabularSelector(psi, Bernoulli())), max_steps=4
    )
    assert out.nothing_selected.tolist() == [2, 2]
    assert out.num_steps.tolist() == [2, 2]
