"""Quality against steps: frontiers, gains and areas by hand, the sweep, and the command."""

import dataclasses
import json
import shutil
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

import unmask
from tests.evaluation.by_hand import changed
from tests.evaluation.test_compare import result, without_verdicts
from tests.training.small import TINY_RECIPE, contents
from unmask.decoding.policies import Margin, Threshold
from unmask.evaluation.compare import crossed_difference
from unmask.evaluation.curve import (
    CAPS,
    WHERE_SAMPLED,
    Point,
    compared_curves,
    diversity,
    family,
    frontier,
    height,
    mean_weights,
    read_curve,
    steps_for,
    sweep,
    weights_at,
    write_curve,
)
from unmask.evaluation.records import read_run
from unmask.jsonl import ResultsError
from unmask.report.html import Section
from unmask.report.plots import curve_plot
from unmask.report.tables import curve_table, curve_verdict, needed_table

PLAIN = "0123456789ab"


def points(*pairs, policy="top-prob"):
    return [Point(policy, policy, 1, None, m, s, s, s, f"{m}/{s}") for m, s in pairs]


def corners(*pairs):
    return [(point.mean_steps, point.score) for point in frontier(points(*pairs))]


# --- frontiers --------------------------------------------------------------------------------------------------------


def test_a_frontier_by_hand():
    """(2, 0.3) lies below the line from (1, 0.2) to (3, 0.8), and what is behind (4, 0.9) is no better."""
    assert corners((5, 0.85), (2, 0.3), (1, 0.2), (4, 0.9), (3, 0.8)) == [(1, 0.2), (3, 0.8), (4, 0.9)]
    assert corners((1, 0.2), (2, 0.7), (3, 0.8)) == [(1, 0.2), (2, 0.7), (3, 0.8)], "concave already"
    assert corners((1, 0.5), (2, 0.1), (3, 0.5)) == [(1, 0.5)], "more steps for nothing"
    assert corners((2, 0.5), (2, 0.7), (2, 0.6)) == [(2, 0.7)], "of the same steps the best"
    assert corners((1, 0), (2, 0.25), (3, 0.5)) == [(1, 0), (3, 0.5)], "what is on the line is no corner"


def test_a_frontier_is_the_best_mixture_with_at_most_so_many_steps():
    """The definition, over all pairs of points: two constraints leave a best mixture of two."""
    draws = np.random.default_rng(0)
    for _ in range(20):
        m, s = draws.uniform(1, 8, size=7), draws.random(7)
        hull = frontier(points(*zip(m, s, strict=True)))
        for at in draws.uniform(m.min(), 9, size=10):
            mixed = [s[m <= at].max()]
            for i in np.flatnonzero(m <= at):
                for j in np.flatnonzero(m > at):
                    w = (at - m[i]) / (m[j] - m[i])
                    mixed.append((1 - w) * s[i] + w * s[j])
            assert height(hull, at) == pytest.approx(max(mixed), abs=1e-12)
            assert weights_at(hull, at).sum() == pytest.approx(1)
            assert (weights_at(hull, at) @ [p.mean_steps for p in hull]) <= at + 1e-12


def test_the_steps_that_a_score_needs():
    hull = frontier(points((1, 0.2), (3, 0.8), (4, 0.9)))
    assert [steps_for(hull, score) for score in (0.1, 0.5, 0.8, 0.9)] == pytest.approx([1, 2, 3, 4])
    assert steps_for(hull, 0.91) is None
    assert steps_for([], 0.1) is None


def test_the_mean_over_a_range_is_the_integral():
    """From 2 to 6: 0.5 to 0.8 on [2, 3], 0.8 to 0.9 on [3, 4], and 0.9 behind: (0.65 + 0.85 + 2 x 0.9) / 4."""
    hull = frontier(points((1, 0.2), (3, 0.8), (4, 0.9)))
    assert mean_weights(hull, 2, 6) @ [0.2, 0.8, 0.9] == pytest.approx((0.65 + 0.85 + 1.8) / 4)
    assert mean_weights(hull, 2, 6).tolist() == pytest.approx([0.25 / 4, (0.75 + 0.5) / 4, (0.5 + 2) / 4])


def test_families():
    assert [family(rule) for rule in ("threshold:0.9", "threshold(0.9,paced)", "learned(price=0.1)", "margin")] == [
        *("threshold", "paced threshold", "learned", "margin")
    ]
    assert family("blocks(8,threshold(0.9,paced))") == "blocks(8,paced threshold)"
    assert family("top-prob(confidence=sampled)") == "sampled top-prob"


# --- learned against the best rule ------------------------------------------------------------------------------------


def order(policy, cap, valid, steps, seed=0, **values):
    own = {"trained_budget": cap, "trained_seed": seed, "plain_denoiser": PLAIN}
    return result(policy, cap, valid, [steps] * len(valid), **{**own, **values})


RULES = [
    result("threshold:0.9", 2, "11000000", [1] * 8),  # 0.25 in 1 step
    result("threshold:0.9", 9, "11111100", [5] * 8),  # 0.75 in 5 steps
    result("margin", 3, "00000111", [3] * 8),  # 0.375 in 3: below the line between them, which is 0.5
]
ORDERS = [
    order("learned(price=2,deterministic)", 9, "11100000", 2),  # 0.375 in 2: that of the rules there
    order("learned(price=0.1,deterministic)", 9, "11111110", 4),  # 0.875 in 4: the rules have 0.625
    order("learned(price=0.02,deterministic)", 9, "11111100", 6),  # no better in 6
]


def test_gains_and_area_by_hand():
    """From 2 to 5 steps: the gain rises from 0 to 0.25 at 4 and falls to 0.125 at 5."""
    (curve,) = compared_curves([*ORDERS, *RULES])
    assert (curve.start, curve.stop, curve.seeds) == (2, 5, [0])
    at = {found.steps: found.reading for found in curve.at}
    assert list(at) == [2, 2.5, 3, 3.5, 4, 5, 6]
    assert [at[m].rule for m in (2, 3, 4, 5, 6)] == pytest.approx([0.375, 0.5, 0.625, 0.75, 0.75])
    assert [at[m].learned for m in (2, 3, 4, 5, 6)] == pytest.approx([0.375, 0.625, 0.875, 0.875, 0.875])
    assert [at[m].gain for m in (2, 3, 4, 5, 6)] == pytest.approx([0, 0.125, 0.25, 0.125, 0.125])
    assert (at[6].rule_steps, at[6].learned_steps) == (5, 4), "at most six"
    assert at[3].settings == ["threshold:0.9 @ 2", "threshold:0.9 @ 9"]
    assert at[5].settings == ["threshold:0.9 @ 9"]
    assert curve.mean.gain == pytest.approx((2 * 0.125 + 0.1875) / 3, abs=1e-6)
    assert curve.above == [[2, 5]]
    assert (curve.highest.learned, curve.highest.rule) == (0.875, 0.75)
    assert (curve.highest.learned_steps, curve.highest.rule_steps) == (4, 5)


def test_steps_needed_and_rules_without_a_cap_by_hand():
    """One token per step is 0.75 here, of which 2/3 is 0.5: the best rule has that at 3 steps, the order at 2.5."""
    one_by_one = result("top-prob", 9, "11111100", [9] * 8)
    longer = order("learned(price=0.01,deterministic)", 12, "11111100", 6)  # its cap is not one of a rule
    (curve,) = compared_curves([*ORDERS, *RULES, one_by_one, longer])
    (row,) = needed_table([curve], share=2 / 3).rows
    assert row[1:] == ["9", "75.0", "3.00", "2.50 (2.50)"]
    (row,) = needed_table([curve], share=1.2).rows
    assert row[3:] == ["not reached", "not reached (–)"], "0.9 is above both"
    table = curve_table(curve)
    alone = {row[0]: row[table.headings.index("no cap")] for row in table.rows}
    assert (alone["4.00"], alone["5.00"], alone["highest"]) == ("–", "75.0", "75.0"), "its first point is at 5 steps"


def test_diversity_stands_beside_the_gain():
    """At 3 steps: half of each of two settings; from 2 to 5, 1/3 and 2/3 of the order's, 3/8 and 5/8 of the rule's."""
    unique = dict(zip([record.key for record in (*ORDERS, *RULES)], (0.9, 0.6, 0.1, 0.84, 0.2, 0.1), strict=True))
    found = [changed(record, record.verdicts, metrics={"unique": unique[record.key]}) for record in (*ORDERS, *RULES)]
    (curve,) = compared_curves(found)
    table = curve_table(curve)
    told = {row[0]: row[table.headings.index("unique")] for row in table.rows}
    assert (told["2.00"], told["3.00"], told["5.00"]) == ("0.90, 0.68", "0.75, 0.52", "0.60, 0.20")
    assert told["mean, 2.00 to 5.00"] == "0.70, 0.44"
    assert told["highest"] == "0.60, 0.20"
    assert "]. Diversity, unique: 0.70; of the rules 0.44. The highest" in curve_verdict(curve)
    assert "different samples, as a fraction of the valid ones" in table.caption
    for width in (80, 60):
        printed = StringIO()
        Console(file=printed, width=width).print(table)
        lines = printed.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert "…" not in printed.getvalue()
        assert any("mean steps" in line and "unique" in line for line in lines)
    none_valid = [changed(found[0], found[0].verdicts, metrics={}, distinct=None), *found[1:]]
    (row,) = (row for row in curve_table(compared_curves(none_valid)[0]).rows if row[0] == "2.00")
    assert "–, 0.68" in row
    (plain,) = compared_curves([changed(record, record.verdicts, distinct=None) for record in (*ORDERS, *RULES)])
    assert "unique" not in curve_table(plain).headings
    assert "Diversity" not in curve_verdict(plain)
    silent = [changed(record, record.verdicts, distinct=None) for record in (*ORDERS, *RULES[:-1])]
    assert "Diversity" not in curve_verdict(compared_curves([*silent, found[-1]])[0]), "told by no setting of the mean"


def test_what_is_diverse_is_compared_as_verdicts_are():
    """Copies count together once: at 1 step the rule has 1 of its 2, at 5 2 of 6; the order 3 of 3 and 7 of 7."""
    shares = {"11000000": 1 / 2, "11111100": 1 / 3, "00000111": 1 / 3, "11100000": 1.0, "11111110": 1.0}

    def counted(record):
        marks = "".join("1" if valid else "0" for valid in record.verdicts.valid)
        share = 1.0 if record.spec.learned else shares[marks]
        parts = share * record.verdicts.valid
        return changed(record, record.verdicts._replace(diverse=parts), metrics={"unique": share})

    records = [counted(record) for record in (*ORDERS, *RULES)]
    (curve,) = compared_curves(records)
    assert dataclasses.replace(curve, diverse=None) == compared_curves([changed(r, r.verdicts._replace(diverse=None))
        for r in records])[0]  # fmt: skip
    assert [one.measure for one in curve.by_measure] == ["valid", "valid x unique"]
    at = {found.steps: found.reading for found in curve.diverse.at}
    assert [at[m].rule for m in (2, 3, 4, 5)] == pytest.approx([5 / 32, 3 / 16, 7 / 32, 1 / 4], abs=1e-6)
    assert [at[m].learned for m in (2, 3, 4, 5)] == pytest.approx([3 / 8, 5 / 8, 7 / 8, 7 / 8])
    assert curve.diverse.highest.gain == pytest.approx(7 / 8 - 1 / 4)
    interval = crossed_difference(np.array([[1, 1, 1, 1, 1, 1, 1, 0]]) - np.array([[1, 1, 1, 1, 1, 1, 0, 0]]) / 3)
    assert (curve.diverse.highest.low, curve.diverse.highest.high) == pytest.approx(interval[1:], abs=1e-6)
    told = curve_verdict(curve)
    assert told.count("above the best rule") == 2
    assert " By valid x unique: learned is above" in told
    assert told.count("Diversity") == 1, "the second measure has it in its scores"
    assert "copies count once together" in curve_table(curve.diverse).caption
    assert curve_table(curve.diverse).title == "learned against the best rule, valid x unique"
    one_by_one = counted(result("top-prob", 9, "11111100", [9] * 8))
    (row,) = needed_table(compared_curves([*records, one_by_one]), share=1.0).rows
    assert row[0].endswith("valid x unique")
    assert row[2] == "25.0"
    section = Section("title", "caption", list(RULES), (), curve=curve)
    for low in (0.05, -0.05):
        mean = dataclasses.replace(curve.diverse.mean, held_out=[0.1, low, 0.2])
        diverse = dataclasses.replace(curve.diverse, mean=mean)
        assert section._replace(curve=dataclasses.replace(curve, diverse=diverse)).is_better == (low > 0)
    some = [*records[:-1], changed(records[-1], records[-1].verdicts._replace(diverse=None))]
    assert compared_curves(some)[0].diverse is None, "not known of one"
    nameless = compared_curves([changed(record, record.verdicts, metrics={}) for record in records])[0].diverse
    assert nameless.measure == "valid and diverse"
    assert nameless.highest.gain == curve.diverse.highest.gain
    assert "as the task scores it" in curve_table(nameless).caption


def test_the_verdict_of_a_report_is_that_of_its_curve():
    """A run of which only the sweep was evaluated has an order nonetheless."""
    (curve,) = compared_curves([*ORDERS, *RULES])
    section = Section("title", "caption", list(RULES), (), curve=curve)
    assert section.verdict == curve_verdict(curve)
    for low in (0.05, -0.05):
        mean = dataclasses.replace(curve.mean, held_out=[0.1, low, 0.2])
        assert section._replace(curve=dataclasses.replace(curve, mean=mean)).is_better == (low > 0)
    (rules,) = compared_curves(RULES)
    assert section._replace(curve=rules).verdict.startswith("There is no learned order here")
    assert not section._replace(curve=rules).is_better


def test_what_tells_a_rule_of_few_answers():
    def told(**outcome):
        return diversity(changed(RULES[0], **outcome).outcome)

    assert told(metrics={"TV remove-random": 0.2, "TV shuffle": 0.4, "valid copy": 1.0}) == ("TV", pytest.approx(0.3))
    assert told(metrics={"unique": 0.5, "valid x unique": 0.4}) == ("valid x unique", 0.4)
    assert told(distinct=7) == ("different", 7)
    assert told(metrics={"novel": 0.3}, distinct=None) == ("", None)


def test_rules_without_a_cap_where_the_order_has_more_steps():
    """The order's own cap is none of the rules."""
    longer = [order("learned(price=0.1,deterministic)", 16, "11111110", 4)]
    (curve,) = compared_curves([*longer, *RULES])
    table = curve_table(curve)
    assert {row[0]: row[table.headings.index("no cap")] for row in table.rows}["highest"] == "75.0"


def test_steps_needed_without_an_order_and_in_several_settings():
    rules = [*RULES, result("top-prob", 9, "11111100", [9] * 8)]
    warm = [result("top-prob", 9, "11110000", [9] * 8, temperature=0.5)]
    in_blocks = result("blocks(4,margin)", 9, "11110000", [9] * 8, temperature=0.7)
    (row,) = needed_table(compared_curves([in_blocks])).rows
    assert row[2:4] == ["50.0", "9.00"]
    rows = needed_table(compared_curves([*rules, *warm]), share=2 / 3).rows
    assert [row[-1] for row in rows] == ["–", "–"]
    assert [row[0].rpartition(", ")[2] for row in rows] == ["temperature 1.0", "temperature 0.5"]


def test_rules_on_the_denoisers_of_several_seeds_are_not_mixed():
    """1.0 on one denoiser and 0.5 on the other is 0.75, not the better of them."""
    seeds = {0: ("a" * 12, "11111111"), 1: ("b" * 12, "11110000")}
    rules = [result("top-prob", 4, valid, [4] * 8, denoiser=of) for of, valid in seeds.values()]
    orders = [
        order("learned(price=2,deterministic)", 4, "11111111", 4, seed, denoiser=of, plain_denoiser=of)
        for seed, (of, _) in seeds.items()
    ]
    (curve,) = compared_curves([*orders, *rules])
    table = curve_table(curve)
    assert curve.highest.rule == 0.75
    assert {row[0]: row[table.headings.index("no cap")] for row in table.rows}["highest"] == "75.0"
    (row,) = needed_table([curve], share=1.0).rows
    assert row[1:] == ["4", "75.0", "4.00", "4.00 (4.00, 4.00)"]


def test_the_intervals_are_of_the_weighted_verdicts():
    """At 3 steps: half of each of the order's verdicts against half of each of the rule's, problem by problem."""
    (curve,) = compared_curves([*ORDERS, *RULES])
    first, second, low, high = (
        np.array([mark == "1" for mark in marks]) * 1.0 for marks in ("11100000", "11111110", "11000000", "11111100")
    )
    expected = crossed_difference(((first + second) / 2 - (low + high) / 2)[None])
    found = next(at.reading for at in curve.at if at.steps == 3)
    assert (found.gain, found.low, found.high) == pytest.approx(expected, abs=1e-6)
    # On [2, 4] the learned weights are 1/2 each on average, on [4, 5] the second's; the rule's go from 3/4 to 0 of 1.
    learned, rule = (first + 2 * second) / 3, (0.375 * low + 0.625 * high)
    assert (curve.mean.gain, curve.mean.low, curve.mean.high) == pytest.approx(
        crossed_difference((learned - rule)[None]), abs=1e-6
    )


def test_held_out_corners_are_chosen_on_the_other_problems():
    """A rule, and 200 orders that differ from it on a fifth of the problems, by a coin: the best of them is luck."""
    rule = np.array([0, 1, 1, 0] * 100)
    coins = np.vstack([rule, rule ^ (np.random.default_rng(0).random((200, 400)) < 0.2)])
    coins = ["".join(map(str, coin)) for coin in coins]
    orders = [order(f"learned(price={1 + i / 1000:.3f})", 2, coin, 2) for i, coin in enumerate(coins[1:])]
    (curve,) = compared_curves([result("margin", 2, coins[0]), *orders])
    (at,) = (found.reading for found in curve.at if found.steps == 2)
    assert at.low > 0, "the interval knows nothing of the choice"
    valid = np.array([[mark == "1" for mark in coin] for coin in coins]) * 1.0
    even, odd = (int(valid[1:, half::2].mean(-1).argmax()) + 1 for half in (0, 1))
    expected = (valid[odd, ::2].sum() + valid[even, 1::2].sum()) / 400 - valid[0].mean()
    assert at.held_out[0] == pytest.approx(expected, abs=1e-6)
    assert at.held_out[1] < 0 < at.held_out[2]
    assert "which may be chance" in curve_verdict(curve)


def test_several_seeds_meet_the_same_rules():
    """Each has its own frontier; the interval is over problems and seeds."""
    second = [dataclasses.replace(r, spec=dataclasses.replace(r.spec, trained_seed=1)) for r in ORDERS[:2]]
    weak = order("learned(price=0.1,deterministic)", 9, "11111000", 4, seed=1)
    (curve,) = compared_curves([*ORDERS, second[0], weak, *RULES])
    assert curve.seeds == [0, 1]
    at = {found.steps: found.reading for found in curve.at}
    assert at[4].seed_gains == pytest.approx([0.25, 0])
    assert at[4].gain == pytest.approx(0.125)
    assert curve.stop == 4, "the second was seen to take no more"
    rows = [[mark == "1" for mark in marks] for marks in ("11111110", "11111000")]
    low, high = np.array([1, 1, 0, 0, 0, 0, 0, 0]), np.array([1, 1, 1, 1, 1, 1, 0, 0])
    expected = crossed_difference(np.array(rows) - (low / 4 + 3 * high / 4))
    assert (at[4].gain, at[4].low, at[4].high) == pytest.approx(expected, abs=1e-6)


def test_where_the_curves_cross():
    """0.25 against 0.375 at 2 steps and 0.875 against 0.625 at 4: equal at 2 + 2/3."""
    weak = order("learned(price=2,deterministic)", 9, "11000000", 2)
    (curve,) = compared_curves([weak, *ORDERS[1:], *RULES])
    assert curve.above == [[pytest.approx(2 + 2 / 3, abs=1e-6), 5]]
    said = curve_verdict(curve)
    assert said.startswith("learned is on average above the best rule (3 settings) from 2.00 to 5.00 steps, by +")
    assert "It is above from 2.67 to 5.00 steps." in said
    bad = [order("learned(price=2,deterministic)", 9, "00000000", 2), order("learned", 9, "00000001", 4)]
    (curve,) = compared_curves([*bad, *RULES])
    assert curve.above == []
    assert curve_verdict(curve).startswith("learned is below the best rule (3 settings) from 2.00 to 4.00 steps, by -")


def test_scores_alone_have_no_interval():
    (curve,) = compared_curves([without_verdicts(record) for record in (*ORDERS, *RULES)])
    assert curve.mean.gain == pytest.approx(0.4375 / 3, abs=1e-6)
    assert (curve.mean.low, curve.highest.high) == (None, None)
    (curve,) = compared_curves([*ORDERS, *RULES[:1], without_verdicts(RULES[1])])
    assert (curve.mean.low, curve.mean.held_out) == (None, [])
    assert "points on average (no interval). Diversity" in curve_verdict(curve)


def test_an_order_with_one_point_is_compared_there():
    (curve,) = compared_curves([ORDERS[1], *RULES])
    assert (curve.start, curve.stop, curve.mean, curve.at[0].steps) == (4, None, None, 4)
    assert curve_verdict(curve).startswith(
        "learned is above the best rule (3 settings) at 4.00 steps, by +25.0 points ["
    )


def test_rules_alone_and_orders_alone():
    (curve,) = compared_curves(RULES)
    assert (curve.start, curve.mean, curve.highest.rule, curve.highest.learned) == (None, None, 0.75, None)
    assert curve_verdict(curve) == "There is no learned order here; the best rule reaches 75.0% in 5.00 steps."
    assert [row[:4] for row in curve_table(curve).rows][-1] == ["highest", "–", "75.0 @ 5.00", "–"]
    assert compared_curves(ORDERS) == []


def test_what_cannot_be_compared_is_not(tmp_path):
    """Rules on another denoiser or of another split are no rivals."""
    strong = result("threshold:0.9", 1, "11111111", [1] * 8, denoiser="ba9876543210")
    other = result("threshold:0.9", 1, "11111111", [1] * 8, split="test2")
    assert compared_curves([*ORDERS, *RULES, strong, other]) == compared_curves([*ORDERS, *RULES])


def test_a_curve_is_kept_whole(tmp_path):
    (curve,) = compared_curves([*ORDERS, *RULES])
    write_curve(tmp_path, [curve])
    assert read_curve(tmp_path / "curve.json") == curve
    text = (tmp_path / "curve.json").read_text()
    (tmp_path / "curve.json").write_text(text.replace("0.875", "0.975", 1))
    with pytest.raises(ResultsError, match="damaged or from another version: run `unmask evaluate --curve` again"):
        read_curve(tmp_path / "curve.json")
    write_curve(tmp_path, [])
    assert read_curve(tmp_path / "curve.json") is None


def test_the_plot_names_each_family_once():
    second = [dataclasses.replace(r, spec=dataclasses.replace(r.spec, trained_seed=1)) for r in ORDERS]
    for orders, names in ((ORDERS, ["learned"]), ([*ORDERS, *second], ["learned, 2 seeds"])):
        (curve,) = compared_curves([*orders, *RULES])
        (axes,) = curve_plot(curve, "valid, %").axes
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["margin", "threshold", *names]


# --- the sweep --------------------------------------------------------------------------------------------------------


def planned(*arguments):
    return {(rule.name, cap) for rule, cap in sweep(*arguments)}


def test_the_default_sweep():
    """So many points for an order of ten steps, prices within their range, the cap part of the sweep for all."""
    selector = SimpleNamespace(budget=10, prices=(0.0123456, 2.0))
    plan = sweep(selector, [], [], 72)
    assert len(plan) == len(planned(selector, [], [], 72)) == 161
    learned = [(rule, cap) for rule, cap in plan if family(rule.name) == "learned"]
    assert {cap for _, cap in learned} == {2, 3, 4, 5, 6, 8, 10}
    prices = sorted(rule.price for rule, cap in learned if cap == 10)
    assert (len(prices), prices[0], prices[-1]) == (8, 0.0123456, 2.0)
    assert np.diff(np.log(prices)) == pytest.approx(np.log(2 / 0.0123456) / 7, rel=0.01)
    assert all(rule.deterministic for rule, _ in learned)
    frequencies, denoiser = (lambda: torch.full((3,), 0.3)), SimpleNamespace(hidden_with=None)
    drawn = planned(selector, [], [], 72, True, frequencies, denoiser) - planned(selector, [], [], 72)
    positions = {(rule, cap) for rule in WHERE_SAMPLED for cap in (*CAPS, 72)}
    assert drawn - positions == {(f"learned(price={price:g})", 10) for price in prices}, "where tokens are sampled"
    assert positions <= drawn
    unknown = planned(selector, [], [], 72, True, None, denoiser)
    assert {rule for rule, _ in drawn - unknown} == {"pc-sampler(0.25,10)"}, "it reads the frequencies of tokens"
    assert {rule for rule, _ in unknown - planned(selector, [], [], 72, True)} == {"wino(0.6,0.9)", "wino(0.3,0.6)"}
    for name in ("threshold", "paced threshold", "factor", "eb", "klass", "top-prob", "margin"):
        assert {2, 3, 4, 5, 6, 8, 16, 32, 72} <= {cap for rule, cap in plan if family(rule.name) == name}
    assert ("top-prob", 1) in planned(selector, [], [], 72)
    assert ("threshold:0.5", 72) in planned(selector, [], [], 72)
    assert {cap for rule, cap in planned(None, ["margin"], [], 129)} == set(CAPS), "one per step would take too long"


def test_a_sweep_can_be_restricted():
    assert planned(None, ["margin"], [3, 5], 72) == {("margin", 3), ("margin", 5)}
    assert planned(None, ["threshold:0.97", Threshold(0.5), Margin()], [3], 72) == {
        *(("threshold:0.97", 3), ("threshold:0.5", 3), ("margin", 3))
    }
    family_only = planned(None, ["threshold"], [3, 5], 72)
    assert {("threshold:0.95", 3), ("threshold:0.95", 5), ("threshold:0.7", 5)} < family_only
    assert ("threshold:0.7", 3) not in family_only
    assert {family(rule) for rule, _ in family_only} == {"threshold", "paced threshold"}
    assert {cap for _, cap in planned(None, [], [], 4)} == {1, 2, 3, 4}, "four tokens take no more than four steps"
    plain = SimpleNamespace(budget=5, prices=())
    assert planned(plain, ["learned"], [], 72) == {("learned", 5), ("learned(deterministic)", 5)}
    assert {cap for _, cap in planned(SimpleNamespace(budget=5, prices=(0.1, 1.0)), ["learned"], [2, 9], 72)} == {2, 5}


def test_a_sweep_inside_the_blocks_of_the_denoiser():
    """Three blocks of 24: at least three steps, T = 4 in each, and caps over the whole response."""
    denoiser = SimpleNamespace(block_size=24, hidden_with=None)
    selector = SimpleNamespace(budget=4, prices=(0.1, 1.0), block_size=24)
    plan = planned(selector, [], [], 72, False, None, denoiser)
    assert {cap for rule, cap in plan if rule == "blocks(24,margin)"} == {6, 9, 12, 15, 18, 24, 48, 72}
    assert ("blocks(24,top-prob)", 3) in plan
    assert {cap for rule, cap in plan if family(rule) == "learned"} == {6, 9, 12}
    assert all(rule.startswith(("blocks(24,", "learned(price=")) for rule, _ in plan)
    drawn = planned(selector, [], [], 72, True, None, denoiser)
    assert not {"wino", "prophet"} & {name.split(",")[1].split("(")[0] for name, _ in drawn if "blocks" in name}
    for rule in ("p2", "joint-threshold(0.7,0.5)", "threshold(0.5,confidence=sampled,paced)"):
        assert {cap for name, cap in drawn if name == f"blocks(24,{rule})"} == {6, 9, 12, 15, 18, 24, 48, 72}
    assert planned(selector, ["eb"], [7], 72, False, None, denoiser) == {
        (f"blocks(24,eb:{gamma})", 7) for gamma in (0.001, 0.003, 0.01, 0.03, 0.1)
    }


# --- the command ------------------------------------------------------------------------------------------------------

PRICED = TINY_RECIPE.replace("[model.scorer]\nwidth = 8\nlayers = 1\nheads = 2\n", "").replace(
    "[order]\nbudget = 2\n",
    '[order]\nbudget = 4\nposterior = "selector"\nprices = [0.02, 2.0]\nleast_budget = 2\nstart = "threshold"\n',
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curve")
    (folder / "priced.toml").write_text(PRICED)
    unmask.train(unmask.load_recipe(str(folder / "priced.toml")), folder / "priced", cpu=True)
    return folder


def test_the_command_draws_a_curve_and_repeats_nothing(trained, ok, tmp_path):
    run = shutil.copytree(trained / "priced", tmp_path / "run")
    words = ("evaluate", run, "--curve", "--policy", "learned", "--policy", "threshold", "--steps", 2, "--steps", 4)
    out = ok(*words)
    assert out.startswith("learned is "), "the verdict first"
    assert "learned against the best rule" in out
    assert f"curve: {run / 'curve.svg'}" in " ".join(out.split())
    curve = read_curve(run / "curve.json")
    records = read_run(run)
    assert {point.key for point in curve.points} == {record.key for record in records}
    assert len(records) == 8 + 8 + 4 + (7 + 9) * 2 + 5, "nine of the thresholds where tokens are sampled"
    assert curve.asked == ["--policy=learned", "--policy=threshold", "--steps=2", "--steps=4"]
    assert compared_curves(records) == [dataclasses.replace(curve, asked=[])], "from the records alone"
    assert (run / "curve.svg").read_text().startswith("<svg")
    assert json.loads((run / "curve.json").read_text())["crc"]
    before = contents(run)
    ok(*words)
    assert contents(run) == before
    from_python = unmask.evaluate(run, policies=["learned", "threshold"], steps=[2, 4], curve=True, cpu=True)
    assert from_python == records
    assert contents(run) == before


def test_curves_of_a_run_without_prices_or_order(trained, ok, refused, tmp_path):
    run = shutil.copytree(trained / "priced", tmp_path / "run")
    assert "--bound takes no --curve" in refused("evaluate", run, "--curve", "--bound")
    assert "--curve takes no --against" in refused("evaluate", run, "--curve", "--against", run)
    assert "--steps must be between 1 and" in refused("evaluate", run, "--curve", "--steps", 0)
    assert "unknown policy 'thresold'" in refused("evaluate", run, "--curve", "--policy", "thresold")
    (tmp_path / "plain.toml").write_text(PRICED.partition("[order]")[0] + "[evaluate]\nexamples = 20\n")
    unmask.train(unmask.load_recipe(str(tmp_path / "plain.toml")), tmp_path / "plain", cpu=True)
    out = ok("evaluate", tmp_path / "plain", "--curve", "--policy", "margin", "--steps", 2)
    assert out.startswith("There is no learned order here; the best rule reaches")
    assert (tmp_path / "plain" / "curve.svg").exists()
    assert "needs a learned order" in refused("evaluate", tmp_path / "plain", "--curve", "--policy", "learned")
    whole = ok("evaluate", run, "--curve", "--policy", "learned", "--policy", "margin", "--steps", 2)
    before = (run / "curve.json").read_bytes()
    for one_side in ("learned(price=0.3)", "threshold:0.85"):
        told = ok("evaluate", run, "--curve", "--policy", one_side, "--steps", 3)
        assert "add --policy learned, and a rule" in told
    assert ok("evaluate", run, "--curve", "--policy", "margin", "--steps", 2) == whole, "it is part of what is there"
    assert (run / "curve.json").read_bytes() == before
