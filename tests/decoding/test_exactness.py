"""The law of what is generated, against enumeration, on tabular models: N = 3, V = 2, T = 3.

Every comparison is a chi-square test of a fixed draw that a right sampler fails with probability below 1e-5.
"""

import math
from collections import Counter, defaultdict
from itertools import product

import pytest
import torch

from tests.decoding.small import TabularDenoiser, TabularSelector
from tests.statistics import assert_follows
from tests.variational.tiny import tiny
from unmask.decoding.generate import generate
from unmask.decoding.policies import IID, Learned
from unmask.variational.enumeration import generative_chain
from unmask.variational.selection import Bernoulli, NonEmpty

V, N, T = 2, 3, 3
MASK = V
DRAWS = 30_000
TABLES = tiny(NonEmpty(), length=N, vocab_size=V, budget=T, seed=4)
THETA, PSI = 1.5 * TABLES.theta.detach(), 1.5 * TABLES.psi.detach()
RADIX = (V + 1) ** torch.arange(N)
MODEL = TABLES.model._replace(
    denoiser=lambda x: THETA[(x * RADIX).sum(-1)].log_softmax(-1), selector=lambda x, t: PSI[t][(x * RADIX).sum(-1)]
)
PROMPTS = [(MASK, MASK, MASK), (MASK, 1, MASK)]


def sigmoid(s):
    return 1 / (1 + math.exp(-s))


# --- the slow truth ---------------------------------------------------------------------------------------------------

MU, PSI_ROWS = THETA.softmax(-1).tolist(), PSI.tolist()


def row_of(x):
    return sum(token * (V + 1) ** n for n, token in enumerate(x))


def product_law(p):
    """{set of positions: probability} for independent reveals with probabilities p {position: probability}."""
    law = {}
    for choice in product((False, True), repeat=len(p)):
        chosen = frozenset(n for n, is_chosen in zip(p, choice, strict=True) if is_chosen)
        law[chosen] = math.prod(p[n] if n in chosen else 1 - p[n] for n in p)
    return law


def iid_law(x, i):
    masked = [n for n in range(N) if x[n] == MASK]
    return {(chosen, 0): probability for chosen, probability in product_law(dict.fromkeys(masked, 1 / (T - i))).items()}


def selector_probabilities(x, i):
    logits = PSI_ROWS[T - 1 - i][row_of(x)]
    return {n: sigmoid(logits[n]) for n in range(N) if x[n] == MASK}


def nonempty_law(x, i):
    law = product_law(selector_probabilities(x, i))
    nothing = law.pop(frozenset())
    return {(chosen, 0): probability / (1 - nothing) for chosen, probability in law.items()}


def bernoulli_law(x, i):
    p = selector_probabilities(x, i)
    law = defaultdict(float)
    for chosen, probability in product_law(p).items():
        law[chosen or frozenset([max(p, key=p.get)]), 0 if chosen else 1] += probability
    return law


def exact_law(prompt, reveal_law):
    """{(tokens, reveal steps, times nothing was selected): probability}, by following every branch."""
    law = defaultdict(float)

    def follow(x, steps, nothing, i, probability):
        masked = [n for n in range(N) if x[n] == MASK]
        if not masked:
            law[x, steps, nothing] += probability
            return
        reveals = {(frozenset(masked), 0): 1.0} if i == T - 1 else reveal_law(x, i)
        mu = MU[row_of(x)]
        for (chosen, fell_back), reveal_probability in reveals.items():
            places = sorted(chosen)
            for tokens in product(range(V), repeat=len(places)):
                written, when = list(x), list(steps)
                weight = probability * reveal_probability
                for n, token in zip(places, tokens, strict=True):
                    written[n], when[n] = token, i
                    weight *= mu[n][token]
                follow(tuple(written), tuple(when), nothing + fell_back, i + 1, weight)

    follow(tuple(prompt), (-1,) * N, 0, 0, 1.0)
    assert sum(law.values()) == pytest.approx(1)
    return law


# --- draws against it -------------------------------------------------------------------------------------------------


def draw(prompt, policy):
    prompts = torch.tensor(prompt).expand(DRAWS, N)
    return generate(TabularDenoiser(THETA), prompts, policy, T, seed=12, temperature=1.0)


def outcomes(out):
    return Counter(
        zip(
            map(tuple, out.tokens.tolist()),
            map(tuple, out.reveal_step.tolist()),
            out.nothing_selected.tolist(),
            strict=True,
        )
    )


def assert_drawn_from(law, counts):
    assert set(counts) <= {outcome for outcome, probability in law.items() if probability > 0}
    draws = sum(counts.values())
    assert_follows([counts.get(outcome, 0) for outcome in law], [draws * probability for probability in law.values()])


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
@pytest.mark.parametrize(
    ("policy", "reveal_law"),
    [
        pytest.param(IID(), iid_law, id="iid"),
        pytest.param(Learned(TabularSelector(PSI, NonEmpty())), nonempty_law, id="nonempty"),
        pytest.param(Learned(TabularSelector(PSI, Bernoulli())), bernoulli_law, id="bernoulli"),
    ],
)
def test_tokens_and_steps_follow_the_enumerated_law(prompt, policy, reveal_law):
    out = draw(prompt, policy)
    law = exact_law(prompt, reveal_law)
    assert_drawn_from(law, outcomes(out))
    written = defaultdict(float)
    for (tokens, _, _), probability in law.items():
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
    for (tokens, _, _), probability in exact_law(PROMPTS[0], nonempty_law).items():
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
