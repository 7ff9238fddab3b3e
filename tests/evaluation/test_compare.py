"""Comparisons: by hand, against slow definitions, and never between what cannot be compared."""

import dataclasses
import math

import numpy as np
import pytest

from tests.evaluation.by_hand import LEARNED, changed, heuristic
from unmask.evaluation import compare as comparison
from unmask.evaluation.compare import (
    RESAMPLES,
    area,
    at_equal_steps,
    at_most_steps,
    compare,
    crossed_difference,
    curves,
    gains,
    next_budget,
    rivals,
    why_not_won,
)
from unmask.evaluation.records import COMPARED
from unmask.evaluation.verdicts import Verdicts

E = 8


def result(policy="margin", budget=2, valid="00000000", steps=None, trained_budget=None, **values):
    """A record whose score and steps are those of its verdicts."""
    right = np.array([mark == "1" for mark in valid])
    counts = np.array([budget] * len(valid) if steps is None else steps)
    own = {
        "policy": policy,
        "trained_budget": trained_budget,
        "budget": budget,
        "score": float(right.mean()),
        "mean_steps": round(float(counts.mean()), 4),
        "fewest_steps": int(counts.min()),
        "most_steps": int(counts.max()),
        "num_examples": len(valid),
        "selector": None if trained_budget is None else "nonempty",
    }
    return changed(LEARNED, Verdicts(right, counts, []), **{**own, **values})


def without_verdicts(record):
    return dataclasses.replace(record, verdicts=None)


def learned(valid="11111100", steps=(1, 2, 2, 2, 1, 2, 2, 2), **values):
    """Six of eight in 1.75 steps."""
    return result("learned", 2, valid, list(steps), trained_budget=2, **values)


# --- the bootstrap ----------------------------------------------------------------------------------------------------


def slow_bootstrap(differences, seed):
    """The definition: draw as many examples with replacement, take the mean, many times over."""
    draws = np.random.default_rng(seed)
    picked = draws.integers(len(differences), size=(20_000, len(differences)))
    return differences[picked].mean(-1)


def paired(first, second, seed=0):
    """The difference of two rules on the same examples."""
    return crossed_difference(1.0 * first[None] - second, seed)


def test_the_bootstrap_is_that_of_the_definition():
    """The same interval as by resampling examples, to the accuracy of 10,000 resamples; of interpolated scores too."""
    draws = np.random.default_rng(5)
    first, second, other = (1.0 * (draws.random(120) < rate) for rate in (0.7, 0.4, 0.6))
    for scores in (second, 0.7 * second + 0.3 * other):
        found = paired(first, scores, seed=1)
        means = slow_bootstrap(first - scores, seed=2)
        low, high = np.percentile(means, [2.5, 97.5])
        spread = means.std()
        assert found.mean == pytest.approx((first - scores).mean(), abs=1e-12)
        assert abs(found.low - low) < 0.12 * spread
        assert abs(found.high - high) < 0.12 * spread
        assert found.high - found.low > 3 * spread, "the test has power"


def test_the_bootstrap_is_paired_and_repeatable():
    """Two rules right on the same half differ by nothing; on opposite halves by a lot, though each scores the same."""
    half = np.array([1.0, 0.0] * 50)
    assert paired(half, half) == (0, 0, 0)
    mean, low, high = paired(half, 1 - half)
    assert mean == 0
    assert -0.25 < low < -0.15
    assert 0.15 < high < 0.25
    mean, low, high = paired(np.full(30, 0.9), np.full(30, 0.4))
    assert (low, high) == pytest.approx((mean, mean), abs=1e-12), "equal differences leave no width"
    first, second = np.random.default_rng(0).random((2, 5000)) < [[0.6], [0.5]]
    assert paired(first, second, seed=3) == paired(first, second, seed=3) != paired(first, second, seed=4)


def test_the_bootstrap_of_scores_that_all_differ_stays_in_memory():
    """Every difference distinct: the resamples are drawn in parts, and there are still 10,000 of them."""
    scores = np.random.default_rng(0).normal(size=800)
    mean, low, high = paired(scores, np.zeros(800))
    error = scores.std() / math.sqrt(800)
    assert low == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.1 * error)
    assert RESAMPLES == 10_000


# --- at equal steps ---------------------------------------------------------------------------------------------------


def test_interpolation_between_floor_and_ceiling():
    """m = 1.75: a quarter of one step and three quarters of two, in every example."""
    curve = [result(budget=1, valid="10000000"), result(budget=2, valid="11110000"), result(budget=3, valid="11111111")]
    found = at_equal_steps(1.75, curve)
    assert found.score == pytest.approx(0.25 * 1 / 8 + 0.75 * 4 / 8)
    assert found.by_example.tolist() == [1, 0.75, 0.75, 0.75, 0, 0, 0, 0]
    assert found.missing == ""


def test_a_whole_number_of_steps_is_one_record():
    curve = [result(budget=1, valid="10000000"), result(budget=2, valid="11110000"), result(budget=3, valid="11111111")]
    for mean_steps in (2, 2 + 1e-12, 2 - 1e-12):
        assert at_equal_steps(mean_steps, curve).score == pytest.approx(0.5)
        alone = at_equal_steps(mean_steps, curve[1:2])
        assert (alone.score, alone.missing) == (0.5, "")


def test_a_rule_that_takes_other_steps_than_its_budget_is_read_along_its_own():
    """Means of 1.5 and 2.25 at budgets of 4 and 8: at 1.75 steps the weight of the second is a third."""
    curve = [
        result(budget=4, valid="10000000", steps=[1, 2] * 4),
        result(budget=8, valid="11110000", steps=[2, 2, 2, 3] * 2),
    ]
    found = at_equal_steps(1.75, curve)
    assert found.score == pytest.approx(2 / 3 * 1 / 8 + 1 / 3 * 4 / 8)
    assert found.by_example[1] == pytest.approx(1 / 3)


def test_points_too_far_apart_are_not_interpolated():
    curve = [result(budget=1), result(budget=3)]
    found = at_equal_steps(1.75, curve)
    assert found.score is None
    assert found.by_example is None
    assert found.missing == "evaluate it at 1 and 2 steps, if it can run there"
    assert at_equal_steps(1.75, [result(budget=1), result(budget=2)]).score == 0, "one step apart is near enough"


def test_what_is_missing_is_said():
    for budgets, mean_steps, first in [([2], 1.75, 1), ([1], 1.75, 1), ([4, 8], 2.5, 2), ([4], 5, 5)]:
        missing = at_equal_steps(mean_steps, [result(budget=budget) for budget in budgets]).missing
        assert missing == f"evaluate it at {first} and {first + 1} steps, if it can run there"
    adaptive = [result("threshold", budget, steps=[3] * E) for budget in (4, 16)]  # three steps whatever its budget
    assert at_equal_steps(5.5, adaptive).missing == "takes 3.00 steps at a budget of 16"


def test_the_budget_that_is_missing():
    """At 1.75 steps."""
    for taken, expected in [
        ({1: 1, 2: 2}, None),  # nothing is missing
        ({1: 1, 2: 1.7}, 3),  # a little less than its budget
        ({1: 1, 2: 1.7, 5: 3}, 3),
        ({1: 1, 4: 1.7, 9: 3}, 5),  # much less
        ({1: 1, 2: 1.5, 4: 1.7}, None),  # it ends before: with 4 it could have taken more
        ({2: 2, 3: 3}, None),  # no smaller budget was run
    ]:
        curve = [result(budget=budget, steps=[steps] * E) for budget, steps in taken.items()]
        assert next_budget(1.75, curve) == expected


def test_a_rule_a_little_below_its_budget_needs_one_step_more():
    """iid takes 1.875 steps of 2: for the score at 2 steps its budget of 3 is needed, and the table says so."""
    iid = [result("iid", 1), result("iid", 2, steps=[1] + [2] * 7)]
    assert at_equal_steps(2, iid).missing == "evaluate it at 2 and 3 steps, if it can run there"
    assert at_equal_steps(2, [*iid, result("iid", 3, "11111111", steps=[2, 3] * 4)]).score == pytest.approx(0.2)


def test_of_points_with_the_same_mean_the_smallest_budget_counts():
    curve = [result(budget=50, valid="11111111", steps=[2] * E), result(budget=2, valid="11000000")]
    assert at_equal_steps(2, curve).score == 0.25
    assert at_equal_steps(2, curve[::-1]).score == 0.25


def test_means_are_exact_where_verdicts_are_kept():
    """Records round to four digits: 1.999975 would become 2, and its floor 2 instead of 1."""
    steps = [2] * 39_999 + [1]
    found = result("learned", 2, "1" * 40_000, steps, trained_budget=2)
    assert found.outcome.mean_steps == 2.0
    assert math.floor(found.mean_steps) == 1
    assert without_verdicts(found).mean_steps == found.outcome.mean_steps


# --- a learned order against heuristics -------------------------------------------------------------------------------


def test_a_comparison_by_hand():
    order = learned()
    one, two, four = result(budget=1, valid="10000000"), result(budget=2, valid="11110000"), result(budget=4)
    (found,) = compare([four, order, two, one])
    assert (found.learned, found.policy, found.learned.mean_steps) == (order, "margin", 1.75)
    assert found.equal.score == pytest.approx(13 / 32)
    assert found.at_floor is one
    assert found.at_maximum is two
    differences = np.array([1, 1, 1, 1, 1, 1, 0, 0]) - np.array([1, 0.75, 0.75, 0.75, 0, 0, 0, 0])
    low, high = np.percentile(slow_bootstrap(differences, seed=0), [2.5, 97.5])
    assert found.interval == pytest.approx((low, high), abs=0.07)


def test_the_maximum_is_the_most_steps_that_were_taken_not_the_budget():
    order = result("learned", 5, "11111111", [2, 3] * 4, trained_budget=5)
    (found,) = compare([order, result(budget=2), result(budget=3), result(budget=5)])
    assert (found.at_floor.spec.budget, found.at_maximum.spec.budget) == (2, 3)


def test_without_verdicts_there_is_a_score_and_no_interval():
    """Records of older versions: their verdicts were not kept."""
    curve = [result(budget=1, valid="10000000"), result(budget=2, valid="11110000")]
    for kept in ([without_verdicts(learned()), *curve], [learned(), without_verdicts(curve[0]), curve[1]]):
        (found,) = compare(kept)
        assert found.equal.score == pytest.approx(13 / 32)
        assert found.interval is None


def test_every_order_meets_every_rule_once():
    rules = [result(policy, budget) for policy in ("iid", "margin") for budget in (1, 2, 3)]
    other = result("learned", 3, "11111111", [3] * E, trained_budget=3)
    found = compare([learned(), other, *rules])
    assert [(c.learned.spec.budget, c.policy) for c in found] == [(2, "iid"), (2, "margin"), (3, "iid"), (3, "margin")]
    assert compare(rules) == []
    assert compare([learned(), other]) == []


OTHER = {
    "task": "chain",
    "split": "train",
    "num_examples": 9,
    "seed": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "guidance": 1.5,
    "eos_policy": "min-length:20",
    "precision": "bf16",
    "cache": "prefix",
}


def test_nothing_is_compared_across_tasks_and_token_choices():
    """Not with the learned order, not between the two ends of an interpolation, not in one area."""
    assert set(OTHER) == set(COMPARED)
    one, two = result(budget=1), result(budget=2, valid="11110000")
    for field, value in OTHER.items():
        both = [changed(record, **{field: value}) for record in (one, two)]
        assert compare([learned(), *both]) == [], field
        (found,) = compare([learned(), one, both[1]])
        assert found.equal.score is None, field
        assert (found.at_floor, found.at_maximum) == (one, None), field
        assert [area(curve) for curve in curves([one, both[1]])] == [None, None], field


def test_a_rule_on_two_denoisers_is_two_rules():
    """Never one end of an interpolation from one denoiser and the other end from another."""
    one, two = result(budget=1), result(budget=2, denoiser="ba9876543210")
    assert [c.equal.score for c in compare([learned(), one, two])] == [None, None]


def test_an_order_meets_only_rules_on_the_denoiser_that_it_names():
    """Where its record names none, as those of older versions, any."""
    one, two = result(budget=1), result(budget=2, denoiser="ba9876543210")
    named = learned(plain_denoiser="ba9876543210")
    assert [c.at_maximum for c in compare([named, one, two])] == [two]


def test_an_order_meets_only_rules_on_its_examples():
    """A task may generate others than it did; records of older versions name none."""
    rules = [result(budget=budget, examples=name) for budget, name in ((1, "old"), (2, "new"), (3, None))]
    assert rivals(learned(examples="new"), rules) == rules[1:]
    assert rivals(learned(examples=None), rules) == rules


# --- several seeds ----------------------------------------------------------------------------------------------------


def slow_crossed_bootstrap(differences, seed):
    """The definition: draw orders and examples with replacement, and take the mean of the table that they span."""
    draws, (S, E) = np.random.default_rng(seed), differences.shape
    means = []
    for _ in range(8000):
        orders, examples = draws.integers(S, size=S), draws.integers(E, size=E)
        means.append(differences[orders][:, examples].mean())
    return np.array(means)


def test_orders_and_examples_are_both_resampled():
    """Three orders that differ: the interval is that of the definition, and wider than one over examples alone."""
    draws = np.random.default_rng(3)
    verdicts = draws.random((3, 150)) < np.array([[0.8], [0.6], [0.5]])
    differences = verdicts - 0.7 * (draws.random(150) < 0.5)
    found = crossed_difference(differences)
    means = slow_crossed_bootstrap(differences, seed=4)
    low, high = np.percentile(means, [2.5, 97.5])
    assert found.mean == pytest.approx(differences.mean(), abs=1e-12)
    assert abs(found.low - low) < 0.15 * means.std()
    assert abs(found.high - high) < 0.15 * means.std()
    alone = paired(differences.mean(0), np.zeros(150))
    assert found.high - found.low > 1.2 * (alone.high - alone.low)


def test_gains_by_hand():
    """Two seeds, 2 and 1.75 steps: margin scores 4/8 at 2 steps and 1/8 at 1, iid nothing and top-prob 3/8 at both."""
    orders = [learned("11111111", [2] * E, trained_seed=0), learned("11111100", trained_seed=1)]
    rules = [result("margin", 1, "10000000"), result("margin", 2, "11110000")]
    rules += [result("top-prob", budget, "11100000") for budget in (1, 2)]
    rules += [result("entropy", budget, "11111100") for budget in (1, 2)]
    rules += [result("klass", 1, "11111100")]
    rules += [result("factor:1", budget, "11111110", [1] * E) for budget in (2, 4)]
    found = {gain.rival: gain for gain in gains([*orders, *rules])}
    assert set(found) == {"margin", "top-prob", "entropy", "factor:1"}, "klass was not run at 2 steps"
    factor = found["factor:1"]  # one step, however many it may take
    assert (factor.rival_score, factor.rival_steps) == (0.875, 1.0)
    assert factor.seed_gains == pytest.approx([0.125, -0.125])
    assert found["entropy"].rival_steps == 1.875
    margin = found["margin"]
    at_equal = [0.5, 0.25 * 1 / 8 + 0.75 * 0.5]
    assert margin.seed_gains == pytest.approx([1 - at_equal[0], 0.75 - at_equal[1]], abs=1e-6)
    assert margin.gain == pytest.approx(sum(margin.seed_gains) / 2, abs=1e-6)
    assert margin.rival_score == pytest.approx(sum(at_equal) / 2, abs=1e-6)
    assert (margin.score, margin.mean_steps) == (0.875, 1.875)
    assert margin.low < margin.gain < margin.high
    assert [rival for rival, gain in found.items() if gain.best] == ["margin"], "entropy is none of the three"
    assert (margin.seeds, margin.trained_budget, margin.joint) == ([0, 1], 2, False)


def test_gains_keep_apart_what_differs_in_more_than_the_seed():
    rules = [result("margin", budget, "10000000") for budget in (1, 2)]
    plain, joint = rules[0].spec.denoiser, learned(denoiser="ba9876543210", plain_denoiser=rules[0].spec.denoiser)
    other = [changed(record, split="test2") for record in (learned(), *rules)]
    found = gains([learned(plain_denoiser=plain), joint, *rules, *other])
    assert [(gain.joint, gain.split, len(gain.seeds)) for gain in found] == [
        (False, "test", 1),
        (True, "test", 1),
        (False, "test2", 1),
    ]
    without = [without_verdicts(record) for record in (learned(), *rules)]
    assert gains(without) == []


def test_neighbouring_budgets_are_neighbours():
    """iid at a budget of 2 may reveal all at once in some sequence: 1 and a little over 1 apart."""
    almost = [result("iid", 1, "10000000"), result("iid", 2, "11110000", [2] * (E - 1) + [1])]
    further = [*almost, result("iid", 3, "11111111", [3] * E)]  # 1.125 steps behind the second
    assert at_equal_steps(2.5, further).score is not None
    assert at_equal_steps(2.5, [further[0], further[2]]).score is None


def test_a_rule_that_ends_early_is_known_at_whole_steps_too():
    early = [result("factor:1", budget, "11111110", [1] * E) for budget in (2, 3)]
    assert at_most_steps(2.0, early)[1] == 1.0
    assert at_most_steps(2.0, early[:1])[0].score is None, "it had no more"


# --- the area ---------------------------------------------------------------------------------------------------------


def test_an_area_by_hand():
    """Steps 1, 2, 4 with scores 1/8, 1/2, 1: trapezoids of 5/16 and 3/2, over a width of 3."""
    curve = [result(budget=4, valid="1" * 8), result(budget=1, valid="10000000"), result(budget=2, valid="11110000")]
    assert area(curve) == pytest.approx(((5 / 16 + 3 / 2) / 3, 1, 4))


def test_of_an_area_too_the_smallest_budget_counts():
    """A budget beyond the response takes no more steps: it adds nothing, in whatever order the records stand."""
    curve = [result(budget=50, steps=[4] * E), result(budget=4, valid="1" * 8), result(budget=2)]
    assert area(curve) == area(curve[::-1]) == (0.5, 2, 4)
    assert area(curve[:2]) is None, "two points at the same steps are one"


@pytest.mark.parametrize(("spread", "least"), [(0.0, 0.94), (0.03, 0.9)])
def test_the_crossed_interval_covers_the_truth(spread, least, monkeypatch):
    """Over 300 tables of three orders and 400 examples with a true gain of 0.05, about 95 in 100 intervals hold it.

    d = 1, -1 or 0; its mean varies from order to order by `spread`, and most examples are alike for all orders.  Where
    the orders differ it is 83 in 100 without their share of the interval, and 59 without that of the examples.
    """
    monkeypatch.setattr(comparison, "RESAMPLES", 1000)
    draws = np.random.default_rng(1)
    covered = 0
    for trial in range(300):
        gains = 0.05 + draws.normal(0, spread, size=(3, 1))
        shared, own = draws.random((1, 400)), draws.random((3, 400))
        u = np.where(draws.random((1, 400)) < 0.7, shared, own)
        d = np.where(u < 0.1 + gains / 2, 1.0, np.where(u < 0.2, -1.0, 0.0))
        found = crossed_difference(d, seed=trial)
        covered += found.low <= 0.05 <= found.high
    assert least <= covered / 300 <= 0.99


# --- whether the learned order wins -----------------------------------------------------------------------------------


def test_when_the_learned_order_wins():
    """At the same number of steps, by intervals that do not touch, and with samples as varied as true ones."""
    weak = [heuristic(policy, 2, ci_low=0.005, ci_high=0.02) for policy in ("iid", "margin")]
    assert why_not_won([LEARNED, *weak, heuristic("margin", 16, ci_low=0.996, ci_high=1.0)]) == []
    (reason,) = why_not_won([LEARNED, weak[0], heuristic("margin", 2, ci_low=0.95, ci_high=0.961)])
    assert reason == "margin is valid in [0.950, 0.961] at 2 steps, learned in [0.961, 0.981]"
    for distinct in (849, 891):
        (reason,) = why_not_won([changed(LEARNED, distinct=distinct), *weak])
        assert reason.startswith(f"{distinct} distinct valid samples, outside")
        assert "[850, 890]" in reason
    assert why_not_won([]) == why_not_won(weak) == ["no learned order was evaluated"]
    assert why_not_won([LEARNED, heuristic("iid", 4)]) == ["no heuristic was evaluated at 2 steps"]
