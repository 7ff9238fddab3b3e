"""The two objectives against slow and exact evaluations: every mask enumerated, every trajectory by itself.

The checks are then run on planted mistakes, and must reject every one of them.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.training.small import padded, single, small_model
from unmask.models.packing import scatter
from unmask.recipe import parse_teacher
from unmask.rng import stratified
from unmask.tasks.task import Examples
from unmask.training import objectives
from unmask.training.objectives import DenoiseObjective, OrderObjective, mask_counts, mask_uniformly, saturation
from unmask.training.reading import with_layout
from unmask.training.teacher import first_logits, reveal_steps
from unmask.variational.enumeration import TinyModel, posterior_chain
from unmask.variational.estimators import LeaveOneOut, MovingAverage, NoBaseline

# A prompt at the start, in the middle and nowhere; 4, 2, 3 and 1 response positions.
SEQUENCES = [[2, 0, 1, 1, 0], [1, 2, 0], [0, 2, 1], [1, 0]]
RESPONSES = [[False, True, True, True, True], [True, False, True], [True, True, True], [False, True]]

# --- the plain objective ----------------------------------------------------------------------------------------------

ONE = padded(SEQUENCES[:1], RESPONSES[:1])
N = 4


def every_mask():
    """[15, 5]: the non-empty subsets of the response."""
    subsets = torch.tensor([subset for subset in product([False, True], repeat=N) if any(subset)])
    masks = torch.zeros(len(subsets), 5, dtype=torch.bool)
    masks[:, ONE.response[0]] = subsets
    return masks


def repeated(count):
    return Examples(*(x.expand(count, -1) for x in (ONE.tokens, ONE.response, ONE.attention_mask)))


@torch.no_grad()
def continuous_time_bound(denoiser):
    """NELBO / N = 1/N int_0^1 dt sum_A t^|A| (1-t)^(N-|A|) 1/t sum_{n in A} -log mu^n, by Gauss-Legendre quadrature."""
    masks = every_mask()
    cross_entropy = []
    for mask in masks:
        x = torch.where(mask, denoiser.mask_token_id, ONE.tokens)
        log_mu = denoiser(x)[0].log_softmax(-1)
        cross_entropy.append(-sum(log_mu[n, ONE.tokens[0, n]] for n in mask.nonzero()[:, 0]).item())
    nodes, node_weights = np.polynomial.legendre.leggauss(8)  # exact for polynomials up to degree 15; ours has 3
    total = 0.0
    for t, weight in zip((nodes + 1) / 2, node_weights / 2, strict=True):
        for mask, value in zip(masks, cross_entropy, strict=True):
            m = int(mask.sum())
            total += weight * t**m * (1 - t) ** (N - m) / t * value
    return total / N


def expected_loss(objective, monkeypatch):
    """E over m ~ U{1..N} and over the subsets of size m of the objective's own loss: the law of mask_uniformly."""
    total = 0.0
    for m in range(1, N + 1):
        masks = every_mask()
        masks = masks[masks.sum(-1) == m]
        monkeypatch.setattr("unmask.training.objectives.mask_uniformly", lambda *_, masks=masks: masks)
        examples, u = repeated(len(masks)), torch.full((len(masks),), (m - 0.5) / N)
        total += objective(examples, torch.arange(len(masks)), u).loss.item() / N
    return total


def test_the_plain_objective_is_the_continuous_time_bound(monkeypatch):
    denoiser = small_model().denoiser
    exact = continuous_time_bound(denoiser)
    assert exact > 0.5
    assert expected_loss(DenoiseObjective(denoiser, seed=0), monkeypatch) == pytest.approx(exact, abs=1e-12)


def test_the_plain_objective_reports_what_it_minimises():
    objective = DenoiseObjective(small_model().denoiser, seed=0)
    outcome = objective(padded(SEQUENCES, RESPONSES), torch.arange(4), torch.tensor([0.1, 0.4, 0.6, 0.9]))
    assert outcome.metrics["elbo"] == -outcome.loss
    assert not outcome.metrics["elbo"].requires_grad
    outcome.loss.backward()
    assert all(parameter.grad is not None for parameter in objective.denoiser.parameters())


def masks_of(examples, u, seed, ids):
    counts = mask_counts(u, examples.response.sum(-1))
    return mask_uniformly(examples.response, examples.position, counts, ids, seed)


def test_counts_are_one_to_n():
    """m = 1 + floor(u N), row by row; u just below 1 gives N, never N + 1."""
    examples = padded(SEQUENCES, RESPONSES)
    below_one = torch.nextafter(torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64))
    for u, expected in [
        (0.0, [1, 1, 1, 1]),
        (0.5, [3, 2, 2, 1]),
        (0.7, [3, 2, 3, 1]),
        (float(below_one), [4, 2, 3, 1]),
    ]:
        masked = masks_of(examples, torch.full((4,), u, dtype=torch.float64), 0, torch.arange(4))
        assert masked.sum(-1).tolist() == expected


def test_stratified_counts_are_uniform():
    """Over a batch of a multiple of N, every count occurs equally often."""
    u = stratified(3, 1, slots=torch.arange(24), total=24)
    masked = masks_of(repeated(24), u, 0, torch.arange(24))
    assert masked.sum(-1).bincount().tolist() == [0, 6, 6, 6, 6]


def test_prompt_and_padding_are_never_masked():
    examples = padded(SEQUENCES * 50, RESPONSES * 50, left=True, extra=1)
    u = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    masked = masks_of(examples, u, 0, torch.arange(200))
    assert masked.any(-1).all()
    assert not (masked & ~examples.response).any()
    assert not (masked & ~examples.attention_mask).any()


def test_subsets_are_uniform():
    for m in [1, 2, 3]:
        draws = 6000
        u = torch.full((draws,), (m - 0.5) / N, dtype=torch.float64)
        masked = masks_of(repeated(draws), u, 11, torch.arange(draws))[:, ONE.response[0]]
        observed = (masked.long() * 2 ** torch.arange(N)).sum(-1).bincount(minlength=2**N)
        possible = torch.tensor([bin(code).count("1") == m for code in range(2**N)])
        assert observed[~possible].sum() == 0
        expected = draws / int(possible.sum())
        statistic = float(((observed[possible] - expected) ** 2 / expected).sum())
        limit = {4: 21.11, 6: 25.74}[int(possible.sum())]  # chi-square with 3 and 5 degrees of freedom, 0.9999
        assert statistic < limit


def test_masks_do_not_depend_on_batch_or_padding():
    ids, u = torch.tensor([5, 9, 2, 7]), torch.tensor([0.3, 0.6, 0.5, 0.2], dtype=torch.float64)
    right = masks_of(padded(SEQUENCES, RESPONSES), u, 4, ids)
    left_examples = padded(SEQUENCES, RESPONSES, left=True, extra=2)
    left = masks_of(left_examples, u, 4, ids)
    for row in range(4):
        alone = padded(SEQUENCES[row : row + 1], RESPONSES[row : row + 1])
        masked = masks_of(alone, u[row : row + 1], 4, ids[row : row + 1])[0]
        assert torch.equal(masked, right[row, : len(masked)])
        assert torch.equal(masked, left[row, -len(masked) :])
    assert not torch.equal(right, masks_of(padded(SEQUENCES, RESPONSES), u, 5, ids)), "another seed"


# --- the order objective ----------------------------------------------------------------------------------------------

BUDGET, K = 3, 3
LONG = [2, 0, 1, 1, 0, 2, 1]
CASES = [  # id, sequence, response, t
    (3, LONG, [False, *[True] * 6], 0),
    (8, LONG, [True] * 7, 1),
    (1, LONG, [True, False, *[True] * 5], 2),  # the first step: x_T, the same for all trajectories
    (6, SEQUENCES[0], RESPONSES[0], 1),
    (10, SEQUENCES[1], RESPONSES[1], 0),  # two positions are always revealed after two steps: no mask is left
    (12, SEQUENCES[2], RESPONSES[2], 1),
    (14, SEQUENCES[3], RESPONSES[3], 2),
]
IDS, TIMES = torch.tensor([case[0] for case in CASES]), torch.tensor([case[3] for case in CASES])


def batch(left=False, extra=0):
    return padded([case[1] for case in CASES], [case[2] for case in CASES], left, extra)


def order_objective(selection="nonempty", teacher="", **options):
    model = small_model(budget=BUDGET, selection=selection, tau=0.1, teacher=teacher)
    return OrderObjective(model, K, LeaveOneOut(), seed=5, **options)


def log_law(log_p, masked, nonempty):
    """{r: log P(r)} over every r inside the masks, of independent Bern(p), conditioned on r != 0 if `nonempty`."""
    inside = masked.nonzero()[:, 0].tolist()
    law = {}
    for r in product([0, 1], repeat=len(inside)):
        if nonempty and not any(r):
            continue
        chosen = [log_p[n] if r_n else torch.log1p(-log_p[n].exp()) for n, r_n in zip(inside, r, strict=True)]
        law[r] = sum(chosen, torch.zeros(()))
    if nonempty and law:
        total = torch.logsumexp(torch.stack(list(law.values())), 0)
        law = {r: value - total for r, value in law.items()}
    return law


def slow_terms(model, tokens, response, masked, reveal_time, t):
    """F1, KL and log Q of one trajectory of one sequence without padding, from the definitions."""
    tau, mask = model.config.tau, model.denoiser.mask_token_id
    start = None
    if model.config.teacher:  # test_teacher.py has its steps
        alone = Examples(tokens[None], response[None], torch.ones_like(response)[None])
        steps = reveal_steps(parse_teacher(model.config.teacher), model.denoiser, alone, BUDGET)
        start = first_logits(steps, alone.response)
    alpha = model.scorer(tokens[None], start=start)[0]

    def log_posterior(at):
        return (alpha - alpha[at].max()) / tau

    log_q_total = torch.zeros(())
    still = response.clone()
    for s in range(BUDGET - 1, t, -1):
        if not still.any():
            break
        log_q = log_posterior(still)
        for n in still.nonzero()[:, 0].tolist():
            revealed = reveal_time[n] == s
            certain = log_q[n] == 0
            assert revealed or not certain, "the arg-max is always revealed"
            log_q_total = log_q_total + (log_q[n] if revealed else torch.log1p(-log_q[n].exp()))
        still = still & (reveal_time != s)
    assert torch.equal(still, masked), "the masks are what the trajectory left"
    if not masked.any():
        return torch.zeros(()), torch.zeros(()), log_q_total

    x = torch.where(masked, mask, tokens)[None]
    hidden = model.denoiser.hidden(x)
    log_p = model.denoiser.logits(hidden)[0].log_softmax(-1)  # [L, V]
    log_mu = log_p[torch.arange(len(tokens)), tokens]
    if t == 0:
        return log_mu[masked].sum(), torch.zeros(()), log_q_total
    log_q = log_posterior(masked)
    reconstruction = (log_q.exp() * log_mu)[masked].sum()

    p = log_p.detach().exp()
    best = p.sort(-1, descending=True).values
    said = torch.stack([best[:, 0], best[:, 0] - best[:, 1], -(p * p.log()).sum(-1)], dim=-1)
    said = torch.where(masked[:, None], said, 0.0)
    logits = model.selector(hidden.detach(), said[None], masked[None], torch.tensor([t]))[0]
    law_p = log_law(torch.nn.functional.logsigmoid(logits), masked, model.config.selection == "nonempty")
    law_q = log_law(log_q, masked, nonempty=False)
    kl = sum(value.exp() * (value - law_p[r]) for r, value in law_q.items() if value > -torch.inf)
    return reconstruction, kl, log_q_total


def record_trajectories(monkeypatch):
    drawn = []

    def spy(*arguments, original=objectives.sample_trajectories):
        drawn.append(original(*arguments))
        return drawn[-1]

    monkeypatch.setattr(objectives, "sample_trajectories", spy)
    return drawn


def slow_batch(model, examples, drawn, times):
    """[B, k] each: F1, KL and log Q, a loop over sequences and trajectories."""
    values = []
    for b in range(len(examples)):
        tokens, response = single(examples, b)
        real = examples.attention_mask[b]
        for i in range(K):
            masked, reveal_time = drawn.masked[b, i][real], drawn.reveal_time[b, i][real]
            values.append(torch.stack(slow_terms(model, tokens, response, masked, reveal_time, int(times[b]))))
    return torch.stack(values).view(len(examples), K, 3).unbind(-1)


def check_terms(objective, monkeypatch, examples=None):
    """The named terms of the objective are those of the slow evaluation, trajectory by trajectory."""
    examples = batch() if examples is None else examples
    drawn = record_trajectories(monkeypatch)
    terms, log_q, masked = objective.terms(examples, IDS, TIMES)
    assert torch.equal(masked, drawn[0].masked)
    F1, KL, log_Q = slow_batch(objective.model, examples, drawn[0], TIMES)
    for name, ours, truth in [
        ("reconstruction", terms.reconstruction, F1),
        ("order KL", terms.order_kl, KL),
        ("log Q", log_q, log_Q),
    ]:
        torch.testing.assert_close(ours.double(), truth.double(), rtol=1e-9, atol=1e-9, msg=f"wrong {name}")
    return terms, masked


@pytest.mark.parametrize("selection", ["nonempty", "bernoulli"])
def test_terms_are_those_of_each_trajectory_alone(monkeypatch, selection):
    terms, masked = check_terms(order_objective(selection=selection), monkeypatch)
    # The batch holds every case: the first step, the forced step, rows without a mask, trajectories that differ.
    assert not masked[4].any()
    assert (terms.elbo[4] == 0).all()
    assert (masked[2] == batch().response[2]).all()
    assert (terms.elbo[2] == terms.elbo[2, 0]).all()
    assert masked[0].any(-1).all()
    assert (terms.order_kl[TIMES == 0] == 0).all()
    assert (terms.order_kl[[1, 2, 3]] > 0.1).any(-1).all()
    for row in (0, 1):
        assert not (masked[row] == masked[row, :1]).all(), "the draw has no power"


def test_terms_with_a_teacher(monkeypatch):
    """Scores that start from a rule's order; with the scorer's part, no two of them tie."""
    objective = order_objective(teacher="threshold:0.8")
    check_terms(objective, monkeypatch)
    start = objective._start(with_layout(batch(), objective.model)[0])
    assert len(start[0].unique()) > 2, "the test has no power"
    monkeypatch.setattr(objective, "_start", lambda examples: 0.9 * start)
    with pytest.raises(AssertionError, match=r"wrong|always revealed"):
        check_terms(objective, monkeypatch)


def test_scores_that_are_known_are_not_made_again():
    """They are the same for every t: the bound's T terms need the teacher's walk once."""
    objective, examples = order_objective(teacher="threshold:0.8"), batch()
    scores = objective.scores(examples)
    anew = objective.terms(examples, IDS, TIMES)
    objective.scores = None  # would fail if called
    for ours, truth in zip(tree_leaves(objective.terms(examples, IDS, TIMES, scores)), tree_leaves(anew), strict=True):
        assert torch.equal(ours, truth)


def test_a_teacher_that_is_followed_to_the_letter(monkeypatch):
    """With g = 0 what is revealed at one step ties: q = 1, log Q = 0 where all went as taught, and nothing is NaN."""
    objective = order_objective(teacher="threshold:0.6")
    objective.model.config = replace(objective.model.config, tau=1e-3)
    with torch.no_grad():
        objective.model.scorer.out.weight.zero_()
    drawn = record_trajectories(monkeypatch)
    examples = batch()
    terms, log_q, masked = objective.terms(examples, IDS, TIMES)
    steps = reveal_steps(parse_teacher("threshold:0.6"), objective.model.denoiser, examples, BUDGET)
    later = steps >= (BUDGET - 1 - TIMES)[:, None]  # x_{t+1} has seen the steps 0 .. T-2-t
    assert torch.equal(masked, (later & examples.response)[:, None].expand_as(masked))
    assert torch.equal(drawn[0].masked, masked)
    assert log_q.abs().max() < 1e-9
    assert terms.elbo.isfinite().all()


def gradients(loss, model):
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(model.named_parameters(), found, strict=True)
    }


@pytest.mark.parametrize("baseline", [LeaveOneOut(), NoBaseline()])
def test_loss_and_gradient_are_those_of_the_slow_surrogate(monkeypatch, baseline):
    """-T/B sum_b 1/N_b mean_i [ F_i + stop(F_i - b_i) log Q_i ], its gradient for all three networks."""
    objective, examples = order_objective(), batch()
    objective.baseline = baseline
    drawn = record_trajectories(monkeypatch)
    u = (TIMES + 0.5) / BUDGET
    outcome = objective(examples, IDS, u)
    F1, KL, log_q = slow_batch(objective.model, examples, drawn[0], TIMES)
    F = F1 - KL
    others = (F.sum(-1, keepdim=True) - F) / (K - 1) if isinstance(baseline, LeaveOneOut) else torch.zeros_like(F)
    surrogate = F + (F - others).detach() * log_q
    num_response = examples.response.sum(-1)
    slow = -(BUDGET * surrogate.mean(-1) / num_response).mean()

    ours, truth = gradients(outcome.loss, objective.model), gradients(slow, objective.model)
    for name in ours:
        scale = truth[name].abs().max()
        assert (ours[name] - truth[name]).abs().max() < 1e-9 * (1 + scale), name
    for network in ("denoiser", "selector", "scorer"):
        largest = max(value.abs().max() for name, value in truth.items() if name.startswith(network))
        assert largest > 1e-2, f"the test has no power for the {network}"
    elbo = (BUDGET * F.mean(-1) / num_response).mean()
    assert outcome.metrics["elbo"].item() == pytest.approx(elbo.item(), rel=1e-9)


def test_metrics_add_up():
    examples = batch()
    outcome = order_objective()(examples, IDS, (TIMES + 0.5) / BUDGET)
    metrics = outcome.metrics
    assert set(metrics) == {"elbo", "reconstruction", "order_kl", "q_steps", "saturated"}
    assert not any(value.requires_grad for value in metrics.values())
    assert metrics["elbo"].item() == pytest.approx((metrics["reconstruction"] - metrics["order_kl"]).item(), rel=1e-9)
    assert metrics["reconstruction"] < 0
    assert metrics["order_kl"] > 0


def test_mean_steps_of_q():
    """T times the fraction of x_{t+1} that hold a mask."""
    objective, examples = order_objective(), batch()
    _, _, masked = objective.terms(examples, IDS, TIMES)
    outcome = objective(examples, IDS, (TIMES + 0.5) / BUDGET)
    assert outcome.metrics["q_steps"].item() == pytest.approx(BUDGET * masked.any(-1).double().mean().item())
    assert 0 < outcome.metrics["q_steps"] < BUDGET


def test_saturation_counts_scores_of_the_response_near_the_ends():
    scores = torch.tensor([[0.0, 1.0, 0.5, 0.0], [0.9995, 0.002, 0.5, 0.9]])
    response = torch.tensor([[True, True, True, False], [True, True, False, True]])
    assert saturation(scores, response).item() == pytest.approx(3 / 6)


def network_gradients(loss, model):
    """The largest gradient of each network."""
    found = gradients(loss, model)
    return {
        network: max(float(value.abs().max()) for name, value in found.items() if name.startswith(network))
        for network in ("denoiser", "selector", "scorer")
    }


def test_the_kl_reaches_selector_and_scorer_only():
    objective = order_objective()
    terms, _, _ = objective.terms(batch(), IDS, TIMES)
    assert network_gradients(terms.order_kl.sum(), objective.model)["denoiser"] == 0
    assert network_gradients(terms.order_kl.sum(), objective.model)["selector"] > 1e-3
    assert network_gradients(terms.order_kl.sum(), objective.model)["scorer"] > 1e-3


def test_the_reconstruction_reaches_denoiser_and_scorer():
    objective = order_objective()
    terms, _, _ = objective.terms(batch(), IDS, TIMES)
    found = network_gradients(terms.reconstruction.sum(), objective.model)
    assert found["selector"] == 0
    assert found["denoiser"] > 1e-3
    assert found["scorer"] > 1e-3


def test_a_frozen_denoiser_takes_no_gradient_and_changes_no_value():
    joint, frozen = order_objective(), order_objective(learn_denoiser=False)
    u = (TIMES + 0.5) / BUDGET
    frozen_outcome = frozen(batch(), IDS, u)
    frozen_outcome.loss.backward()
    assert all(parameter.grad is None for parameter in frozen.model.denoiser.parameters())
    joint_outcome = joint(batch(), IDS, u)
    joint_outcome.loss.backward()
    assert frozen_outcome.loss == joint_outcome.loss
    for network in ("selector", "scorer"):
        pairs = zip(
            getattr(frozen.model, network).parameters(), getattr(joint.model, network).parameters(), strict=True
        )
        for ours, theirs in pairs:
            assert torch.equal(ours.grad, theirs.grad)


def test_an_example_does_not_depend_on_the_batch_around_it():
    objective, examples = order_objective(), batch()
    terms, log_q, masked = objective.terms(examples, IDS, TIMES)
    for b in range(len(examples)):
        alone = padded([CASES[b][1]], [CASES[b][2]])
        length = alone.tokens.shape[1]
        own, own_log_q, own_masked = objective.terms(alone, IDS[b : b + 1], TIMES[b : b + 1])
        assert torch.equal(own_masked[0], masked[b, :, :length])
        torch.testing.assert_close(own.reconstruction[0], terms.reconstruction[b], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(own.order_kl[0], terms.order_kl[b], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(own_log_q[0], log_q[b], rtol=1e-9, atol=1e-9)


def test_padding_on_either_side_changes_nothing():
    for left, extra in [(True, 0), (False, 1), (True, 1)]:
        objective = order_objective()
        terms, log_q, masked = objective.terms(batch(), IDS, TIMES)
        other, other_log_q, other_masked = objective.terms(batch(left, extra), IDS, TIMES)
        for b in range(len(IDS)):
            assert torch.equal(
                other_masked[b][:, batch(left, extra).attention_mask[b]], masked[b][:, batch().attention_mask[b]]
            )
        torch.testing.assert_close(other.reconstruction, terms.reconstruction, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(other.order_kl, terms.order_kl, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(other_log_q, log_q, rtol=1e-9, atol=1e-9)


def test_terms_hold_with_padding_on_the_left(monkeypatch):
    check_terms(order_objective(), monkeypatch, batch(left=True, extra=1))


def test_trajectories_follow_the_posterior():
    """The masks of x_1 over many ids against their exact law, chi-square."""
    model, draws = small_model(budget=3, tau=0.1), 800
    objective = OrderObjective(model, 4, NoBaseline(), seed=1)
    x0 = torch.tensor([0, 2, 1, 1])
    examples = padded([x0.tolist()] * draws, [[True] * 4] * draws)
    with torch.no_grad():
        _, _, masked = objective.terms(examples, torch.arange(draws), torch.zeros(draws, dtype=torch.long))
        scorer_only = TinyModel(None, None, model.scorer, model.selection, 3, model.config.tau)
        chain = posterior_chain(scorer_only, x0, 3)
    code = 2 ** torch.arange(4)
    observed = (masked.view(-1, 4).long() * code).sum(-1).bincount(minlength=16).double()
    expected = torch.zeros(16, dtype=torch.float64)
    expected[(chain.masked.long() * code).sum(-1)] = chain.probabilities[1] * 4 * draws
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    pooled_observed = torch.cat([observed[common], observed[~common].sum()[None]])
    pooled_expected = torch.cat([expected[common], expected[~common].sum()[None]])
    statistic = ((pooled_observed - pooled_expected) ** 2 / pooled_expected.clamp(min=1)).sum()
    assert common.sum() == 4
    assert statistic < 23.51  # chi-square with 4 degrees of freedom, 0.9999


def test_trajectories_are_drawn_with_53_bits(monkeypatch):
    """With 24 bits, a position with q below 2^-24 would be revealed too often or never."""
    drawn, original = [], objectives.sample_trajectories
    monkeypatch.setattr(
        objectives, "sample_trajectories", lambda *given: (drawn.append(given[-1]), original(*given))[1]
    )
    order_objective().terms(batch(), IDS, TIMES)
    real = drawn[0] * 2**24
    assert (real != real.round()).float().mean() > 0.9


def test_no_mask_anywhere_is_no_loss():
    """All trajectories of the batch are over: nothing is evaluated, and the gradient is zero."""
    objective = order_objective()
    examples = padded([SEQUENCES[1]] * 2, [RESPONSES[1]] * 2)
    outcome = objective(examples, torch.arange(2), torch.zeros(2))
    assert outcome.loss == 0
    assert outcome.metrics["q_steps"] == 0
    outcome.loss.backward()


def test_one_step_is_plain_denoising_of_everything():
    """T = 1: one forced step from all mask; no KL, and the bound is the reconstruction of the whole response."""
    model = small_model(budget=1)
    objective = OrderObjective(model, 2, LeaveOneOut(), seed=0)
    outcome = objective(ONE, torch.zeros(1, dtype=torch.long), torch.tensor([0.7]))
    x = torch.where(ONE.response, model.denoiser.mask_token_id, ONE.tokens)
    log_mu = model.denoiser(x).log_softmax(-1).gather(-1, ONE.tokens[..., None])[..., 0]
    assert outcome.metrics["elbo"].item() == pytest.approx(log_mu[ONE.response].mean().item(), rel=1e-12)
    assert outcome.metrics["order_kl"] == 0
    assert outcome.metrics["q_steps"] == 1


def test_the_moving_average_is_asked_with_the_times():
    """After one batch, the average of each time is the mean of F over its sequences."""
    objective = order_objective()
    objective.baseline = MovingAverage(BUDGET)
    objective(batch(), IDS, (TIMES + 0.5) / BUDGET)
    objective.baseline.fold()
    terms, _, _ = objective.terms(batch(), IDS, TIMES)
    for t in range(BUDGET):
        assert objective.baseline.mean[t].item() == pytest.approx(terms.elbo[t == TIMES].mean().item(), rel=1e-9)


# --- small pieces -----------------------------------------------------------------------------------------------------


def test_scatter_puts_values_back():
    at = torch.tensor([[True, False], [False, True]])
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    canvas = scatter(values, at.flatten().nonzero()[:, 0], at.shape)
    assert canvas.tolist() == [[[1, 2], [0, 0]], [[0, 0], [3, 4]]]
    canvas.square().sum().backward()
    assert torch.equal(values.grad, 2 * values.detach())


def test_nothing_is_packed_or_masked_where_nothing_is_padded():
    model = small_model()
    assert with_layout(ONE, model)[1].attend is None
    _, layout = with_layout(batch(), model)
    assert torch.equal(layout.at, batch().attention_mask.flatten().nonzero()[:, 0])
    assert torch.equal(layout.attend.ends.diff(), batch().attention_mask.sum(-1))


def test_on_a_gpu_any_number_of_whole_sequences_is_packed():
    """In 16 bits, where packed attention runs: their rows have few different lengths."""

    def packed(any_number, is_cuda=True, dtype=torch.bfloat16):
        weight = SimpleNamespace(device=torch.device("cpu"), is_cuda=is_cuda, dtype=dtype)
        network = SimpleNamespace(parameters=lambda: iter([weight]), buffers=lambda: iter(()))
        return with_layout(ONE, network, any_number=any_number)[1].at is not None

    assert packed(any_number=True)
    assert not packed(any_number=False)
    assert not packed(any_number=True, is_cuda=False)
    assert not packed(any_number=True, dtype=torch.float32)


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "t"), [(2, 0), (8, 0), (8, BUDGET - 1)])
def test_one_scorer_pass_for_each_sequence_whatever_k_and_t(monkeypatch, k, t):
    objective, scored = order_objective(), []
    objective.trajectories = k
    forward = objective.model.scorer.forward
    monkeypatch.setattr(objective.model.scorer, "forward", lambda x, *rest: scored.append(len(x)) or forward(x, *rest))
    objective.terms(batch(), IDS, torch.full_like(IDS, t))
    assert scored == [len(IDS)]


# --- the weight of the KL ---------------------------------------------------------------------------------------------


def test_the_kl_weight_falls_to_one_at_half_time():
    objective = order_objective(initial_kl_weight=5.0)
    weights = []
    for progress in (0.0, 0.25, 0.5, 0.9):
        objective.begin_update(progress)
        weights.append(objective.kl_weight)
    assert weights == [5.0, 3.0, 1.0, 1.0]


def test_the_weighted_loss_is_linear_in_the_weight_and_the_bound_is_reported_unweighted():
    """grad(w) = grad(F1 part) + w grad(KL part), both parts with their score-function terms; metrics never see w."""
    gradients, metrics = [], []
    for weight in (1.0, 2.0, 4.0):
        objective = order_objective(initial_kl_weight=weight)
        objective.begin_update(0.0)
        outcome = objective(batch(), IDS, (TIMES + 0.5) / BUDGET)
        outcome.loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None]))
        metrics.append({key: value.item() for key, value in outcome.metrics.items()})
    one, two, four = gradients
    assert torch.allclose(four - two, 2 * (two - one), atol=1e-12)
    assert (two - one).abs().max() > 1e-3
    assert metrics[0] == metrics[1] == metrics[2]


class Made(TorchDispatchMode):
    """Keeps the shape of everything that is computed."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        self.shapes += [part.shape for part in tree_leaves(result) if isinstance(part, torch.Tensor)]
        return result


def test_logits_are_made_of_masked_positions_only():
    """Whatever the length of the prompt: forward and backward, what has V columns has a row for every mask."""
    for prompt in [2, 40]:
        V, response = 23, 6
        model = small_model(vocab_size=V, longest=prompt + response)
        tokens = [0] * prompt + [1] * response
        examples = padded([tokens] * 3, [[False] * prompt + [True] * response] * 3)
        u = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        with Made() as made:
            DenoiseObjective(model.denoiser, seed=0)(examples, torch.arange(3), u).loss.backward()
        width = model.config.denoiser.width
        over_tokens = {shape for shape in made.shapes if shape[-1:] == (V,)} - {(width, V)}  # the head's own weights
        assert over_tokens == {(int(mask_counts(u, examples.num_response).sum()), V)}


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "backend"), [("denoise", "eager"), ("order", "aot_eager")])
def test_the_compiled_pieces_compute_the_same(monkeypatch, kind, backend):
    """Loss, metrics and gradient; and a KL weight that changes at every update is no reason to compile anew.

    Captured and, for the order, differentiated as on a GPU, without the minute that making the kernels would take.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    found, graphs = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if kind == "order":
            objective = order_objective(initial_kl_weight=3.0, compile=compiled)
        else:
            objective = DenoiseObjective(small_model().denoiser, seed=0, compile=compiled)
        for update in range(3):
            if kind == "order":
                objective.begin_update(update / 10)
            objective.zero_grad()
            outcome = objective(batch(), IDS + update, (TIMES + 0.5) / BUDGET)
            outcome.loss.backward()
            gradient = torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None])
            found.append(torch.cat([torch.stack([outcome.loss, *outcome.metrics.values()]).detach(), gradient]))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    for eager, compiled in zip(found[:3], found[3:], strict=True):
        assert torch.allclose(eager, compiled, rtol=1e-9, atol=1e-10)
    assert graphs[:3] == [0, 0, 0]
    assert graphs[3] > 0
    assert graphs[5] == graphs[4], "nothing is compiled again"
