"""Strings become rules: every rule comes back from its name, and everything wrong is one line that says what is."""

import dataclasses
import inspect
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.small import BUILT_IN
from unmask.decoding.policies import (
    IID,
    P2,
    RDM,
    WINO,
    Blocks,
    Credit,
    Dilated,
    Entropy,
    EntropyBounded,
    Factor,
    JointThreshold,
    KLStable,
    Learned,
    LeftToRight,
    Margin,
    OneAtATime,
    PCSampler,
    Policy,
    Prophet,
    Random,
    ReMDMCap,
    ReMDMConf,
    ReMDMRescale,
    RewardTrained,
    Saber,
    Stochastic,
    Threshold,
    TopProbability,
    check_policy,
    parse_policy,
)
from unmask.decoding.policies.names import usage
from unmask.rule_list import in_words, listed_rules

NETWORK = object()
FREQUENCIES = torch.tensor([0.75, 0.25])


def BACKGROUND():
    return FREQUENCIES


ONE_LINE = r"\A[^\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]+\Z"
SAMPLED = TopProbability(confidence="sampled")
RULE_NAMES = [
    (IID(), "iid"),
    (TopProbability(), "top-prob"),
    (SAMPLED, "top-prob(confidence=sampled)"),
    (Margin(), "margin"),
    (Entropy(), "entropy"),
    (LeftToRight(), "left-to-right"),
    (Margin(count="floor"), "margin(count=floor)"),
    (Entropy(count="cosine"), "entropy(count=cosine)"),
    (LeftToRight(count="cosine"), "left-to-right(count=cosine)"),
    (JointThreshold(), "joint-threshold(0.7,0.5)"),
    (JointThreshold(0.9, 0.0), "joint-threshold(0.9,0)"),
    (Credit(), "credit(0.9,0.7,0.8,0.2)"),
    (Credit(0.5, 1.0, 0.5, 0.1, confidence="sampled"), "credit(0.5,1,0.5,0.1,confidence=sampled)"),
    (Saber(), "saber(2,8)"),
    (Saber(1, 3), "saber(1,3)"),
    (Prophet(), "prophet(0,0)"),
    (Prophet(3, 2, order=Margin(count="floor")), "prophet(3,2,order=margin(count=floor))"),
    (TopProbability(confidence="sampled", count="cosine"), "top-prob(confidence=sampled,count=cosine)"),
    (Random(), "random"),
    (Random(count="cosine"), "random(count=cosine)"),
    (Stochastic(Margin(), 0.5), "stochastic(margin,0.5)"),
    (Stochastic(SAMPLED, 1 / 3), "stochastic(top-prob(confidence=sampled),0.3333333333333333)"),
    (Threshold(), "threshold:0.9"),
    (Threshold(1e-05), "threshold:1e-05"),
    (Threshold(0.1 + 0.2), "threshold:0.30000000000000004"),
    (Threshold(0.7, confidence="sampled"), "threshold(0.7,confidence=sampled)"),
    (Threshold(0.95, paced=True), "threshold(0.95,paced)"),
    (Factor(), "factor:1"),
    (Factor(2.5, confidence="sampled"), "factor(2.5,confidence=sampled)"),
    (EntropyBounded(), "eb:0.1"),
    (EntropyBounded(0.0), "eb:0"),
    (EntropyBounded(2.0, order=Entropy()), "eb(2,order=entropy)"),
    (EntropyBounded(2.0, order=SAMPLED), "eb(2,order=top-prob(confidence=sampled))"),
    (KLStable(), "klass(0.9,0.01,2)"),
    (KLStable(0.0, 1e-9, 7, confidence="sampled"), "klass(0,1e-09,7,confidence=sampled)"),
    (Dilated(), "dus"),
    (Blocks(32, Margin()), "blocks(32,margin)"),
    (Blocks(1, Stochastic(Entropy(), 0.1)), "blocks(1,stochastic(entropy,0.1))"),
    (Blocks(8, EntropyBounded(0.2, order=SAMPLED)), "blocks(8,eb(0.2,order=top-prob(confidence=sampled)))"),
    (RDM(), "rdm(cosine,uncond)"),
    (RDM("linear", "cond"), "rdm(linear,cond)"),
    (P2(), "p2"),
    (ReMDMCap(), "remdm-cap:0.008"),
    (ReMDMCap(1.0), "remdm-cap:1"),
    (ReMDMRescale(), "remdm-rescale:0.015"),
    (ReMDMRescale(0.0), "remdm-rescale:0"),
    (ReMDMConf(), "remdm-conf"),
    (WINO(), "wino(0.6,0.9)"),
    (WINO(0.5, 1.0, confidence="sampled"), "wino(0.5,1,confidence=sampled)"),
    (Blocks(16, WINO()), "blocks(16,wino(0.6,0.9))"),
    (Blocks(4, RDM()), "blocks(4,rdm(cosine,uncond))"),
    (PCSampler(FREQUENCIES), "pc-sampler(0.25,10)"),
    (PCSampler(FREQUENCIES, 0.5, 2.0, count="floor"), "pc-sampler(0.5,2,count=floor)"),
    (Stochastic(PCSampler(FREQUENCIES), 0.5), "stochastic(pc-sampler(0.25,10),0.5)"),
    (Learned(NETWORK), "learned"),
    (Learned(NETWORK, price=0.5), "learned(price=0.5)"),
    (Learned(NETWORK, temperature=0.5), "learned(temperature=0.5)"),
    (Learned(NETWORK, deterministic=True), "learned(deterministic)"),
    (
        Learned(NETWORK, temperature=2.0, floor=0.1, cap=3, deterministic=True),
        "learned(temperature=2,floor=0.1,cap=3,deterministic)",
    ),
    (OneAtATime(NETWORK), "lo-arm"),
    (RewardTrained(NETWORK), "reward:1"),
    (RewardTrained(NETWORK, 0.25), "reward:0.25"),
]


def test_a_name_gives_the_rule_back():
    for rule, name in RULE_NAMES:
        assert rule.name == name
        assert parse_policy(name, NETWORK, BACKGROUND) == rule
        assert type(parse_policy(name, NETWORK, BACKGROUND)) is type(rule)


def test_the_list_above_holds_every_rule_with_and_without_its_defaults():
    assert {type(rule) for rule, _ in RULE_NAMES} == set(BUILT_IN.values())
    assert len({name for _, name in RULE_NAMES}) == len(RULE_NAMES)
    for kind in BUILT_IN.values():
        for parameter in dataclasses.fields(kind):
            if parameter.repr:
                values = [getattr(rule, parameter.name) for rule, _ in RULE_NAMES if type(rule) is kind]
                assert any(value != values[0] for value in values), f"{kind.key}: {parameter.name} never varies"


def test_other_ways_to_write_the_same():
    for text, rule in (
        ("threshold", Threshold()),
        ("klass", KLStable()),
        ("rdm", RDM()),
        ("reward", RewardTrained(NETWORK)),
        ("  margin ", Margin()),
        ("margin()", Margin()),
        ("threshold( 0.5 )", Threshold(0.5)),
        ("threshold : 0.5", Threshold(0.5)),
        ("threshold(threshold=0.5)", Threshold(0.5)),
        ("threshold:confidence=sampled", Threshold(confidence="sampled")),
        ("stochastic( order = margin , temperature = 2 )", Stochastic(Margin(), 2.0)),
        ("stochastic(temperature=2,order=margin)", Stochastic(Margin(), 2.0)),
        ("blocks(4, threshold:0.5)", Blocks(4, Threshold(0.5))),
        ("blocks(4,inner=eb(order=margin))", Blocks(4, EntropyBounded(order=Margin()))),
        ("klass(0.5,h=3)", KLStable(0.5, h=3)),
        ("rdm:linear", RDM("linear")),
        ("rdm(revise=cond)", RDM(revise="cond")),
        ("learned(deterministic=true)", Learned(NETWORK, deterministic=True)),
        ("learned(deterministic=false)", Learned(NETWORK)),
        ("learned:cap=2", Learned(NETWORK, cap=2)),
    ):
        assert parse_policy(text, NETWORK, BACKGROUND) == rule
        check_policy(text)


def refused(text, *messages, network=NETWORK):
    with pytest.raises(ValueError, match=ONE_LINE) as caught:
        parse_policy(text, network, BACKGROUND)
    for message in messages:
        assert message in str(caught.value)


def test_an_unknown_name_is_told_the_nearest():
    for text, nearest in (
        ("margn", "margin"),
        ("top_prob", None),
        ("topprob", "top-prob"),
        ("treshold:0.9", "threshold"),
        ("left-to-rigth", "left-to-right"),
        ("remdm-caps", "remdm-cap"),
        ("block(32,margin)", "blocks"),
        ("blocks(32,entrpy)", "entropy"),
        ("stochastic(margine,0.5)", "margin"),
        ("zzzzzzzz", None),
    ):
        if nearest:
            refused(text, "unknown policy", f"did you mean {nearest!r}?")
        elif "_" in text:
            refused(text, "cannot read the policy")
        else:
            refused(text, "unknown policy 'zzzzzzzz'; choose from iid, top-prob")


UNREADABLE = [
    *("", " ", ":", "()", "(margin)", "margin)", "margin(", "margin()(", "blocks(32,margin", "blocks(32,margin))"),
    *("blocks)32,margin(", "blocks(32,eb(0.1)", "blocks(32,)eb(0.1)", "threshold:", "threshold:(0.9)"),
    *("threshold 0.9", "threshold:0.9:0.8", "0.9"),
    *("Margin", "MARGIN", "margin;iid", "margin,iid", "-", "ＩＩＤ", "margin\x00"),
    *("blocks(2,threshold(0.9)x)", "stochastic(margin),0.5", "blocks 32 margin"),
]


def test_what_cannot_be_read():
    for text in UNREADABLE:
        refused(text)


def test_what_is_wrong_is_said():
    for text, messages in (
        ("threshold:high", ["threshold must be a number, got 'high'"]),
        ("threshold: ", ["threshold must be a number, got ''"]),
        ("threshold(,)", ["must be a number, got ''"]),
        ("klass(0.9,0.01,1.5)", ["h must be a whole number, got '1.5'"]),
        ("blocks(2.0,margin)", ["size must be a whole number, got '2.0'"]),
        ("blocks(4,2)", ["unknown policy '2'"]),
        ("stochastic(0.5,margin)", ["0.5"]),
        ("stochastic(margin,entropy)", ["temperature must be a number, got 'entropy'"]),
        ("threshold(0.9,confidence=mean)", ["confidence must be max or sampled, got 'mean'"]),
        ("rdm(sine)", ["schedule must be cosine or linear, got 'sine'"]),
        ("learned(deterministic=yes)", ["deterministic must be true or false, got 'yes'"]),
        # too many, too few, unknown, twice
        ("margin:0.5", ["has no place for '0.5'"]),
        ("threshold(0.9,0.8)", ["threshold(0.9,confidence=max,paced=false) has no place for '0.8'"]),
        ("blocks(4,margin,3)", ["blocks(SIZE,INNER) has no place for '3'"]),
        ("stochastic", ["order and temperature missing", "stochastic(ORDER,TEMPERATURE)"]),
        ("stochastic(margin)", ["temperature missing"]),
        ("blocks:32", ["inner missing"]),
        ("threshold(level=0.9)", ["threshold has no parameter 'level'", "threshold(0.9,confidence=max,paced=false)"]),
        ("learned(network=3)", ["learned has no parameter 'network'"]),
        ("threshold(0.9,threshold=0.8)", ["threshold is given twice"]),
        ("klass(eps=0.1,0.2)", ["eps is given twice"]),
        # rules in rules
        ("blocks(4,prophet)", ["blocks cannot hold prophet(0,0)", "write prophet(order=blocks(4,top-prob))"]),
        ("blocks(4,blocks(2,rdm))", ["blocks cannot hold blocks(2,rdm(cosine,uncond))", "is no blocks"]),
        ("pc-sampler(frequencies=1)", ["pc-sampler has no parameter 'frequencies'"]),
        ("eb(order=pc-sampler)", ["eb orders by top-prob, margin or entropy, not by pc-sampler(0.25,10)"]),
        ("stochastic(wino,0.5)", ["stochastic needs an order such as margin, not wino(0.6,0.9)"]),
        ("margin(count=half)", ["count must be even or floor or cosine, got 'half'"]),
        ("eb(order=margin(count=floor))", ["leave count out of its order"]),
        ("stochastic(random,0.5)", ["stochastic needs an order such as margin, not random"]),
        ("joint-threshold(1)", ["joint-threshold: tau must be at least 0 and below 1, got 1"]),
        ("credit(0)", ["credit: threshold must be above 0 and at most 1, got 0"]),
        ("credit(0.9,0.7,1)", ["beta at least 0 and below 1"]),
        ("saber(0)", ["saber: n and mu must be at least 1, got 0 and 8"]),
        ("prophet(-1)", ["prophet: start and size must be 0 or more, got -1 and 0"]),
        ("prophet(order=iid)", ["prophet needs an order such as margin, not iid"]),
        ("blocks(4,learned)", ["blocks cannot hold learned", "needs no network"]),
        ("blocks(4,lo-arm)", ["blocks cannot hold lo-arm"]),
        ("blocks(4,reward)", ["blocks cannot hold reward:1"]),
        ("blocks(4,blocks(2,margin))", ["blocks cannot hold blocks(2,margin)"]),
        ("stochastic(iid,0.5)", ["stochastic needs an order such as margin, not iid"]),
        ("stochastic(stochastic(margin,1),0.5)", ["stochastic needs an order"]),
        ("eb(order=left-to-right)", ["eb orders by top-prob, margin or entropy, not by left-to-right"]),
        ("eb(order=threshold)", ["not by threshold:0.9"]),
        ("blocks(4,threshold:2)", ["threshold must be above 0 and at most 1, got 2.0"]),
        ("blocks(4,stochastic(margin))", ["temperature missing"]),
        ("blocks(4,eb(0.1,order=margn))", ["did you mean 'margin'?"]),
    ):
        refused(text, *messages)


ALWAYS_WRONG = ("nan", "inf", "-inf", "-1", "1e999")
OUT_OF_RANGE = {
    "stochastic(margin,{})": (*ALWAYS_WRONG, "0"),
    "threshold:{}": (*ALWAYS_WRONG, "0", "1.0001"),
    "factor:{}": (*ALWAYS_WRONG, "0"),
    "eb:{}": (*ALWAYS_WRONG, "-1e-9"),
    "klass({})": (*ALWAYS_WRONG, "1", "-0.1"),
    "klass(0.9,{})": (*ALWAYS_WRONG, "0"),
    "klass(0.9,0.01,{})": ("0", "-1", "nan", "inf"),
    "blocks({},margin)": ("0", "-1", "nan", "inf", ""),
    "remdm-cap:{}": (*ALWAYS_WRONG, "1.01"),
    "wino({})": (*ALWAYS_WRONG, "1"),
    "wino(0.6,{})": (*ALWAYS_WRONG, "0", "1.01"),
    "pc-sampler({})": ALWAYS_WRONG,
    "pc-sampler(0.25,{})": (*ALWAYS_WRONG, "0"),
    "remdm-rescale:{}": (*ALWAYS_WRONG, "1.01"),
    "learned(temperature={})": (*ALWAYS_WRONG, "0"),
    "learned(floor={})": (*ALWAYS_WRONG, "1"),
    "learned(cap={})": ("-1", "nan", "inf"),
    "reward:{}": (*ALWAYS_WRONG, "0"),
}


def test_what_is_out_of_range():
    for form in OUT_OF_RANGE:
        for value in OUT_OF_RANGE[form]:
            refused(form.format(value))
            with pytest.raises(ValueError, match=ONE_LINE):
                check_policy(form.format(value))


def test_a_rule_with_a_network_needs_one():
    for text in ("learned", "lo-arm", "reward:0.5", "blocks(4,learned)", "learned(cap=2)"):
        refused(text, "needs a learned order", network=None)


def test_pc_sampler_needs_a_background():
    for text in ("pc-sampler", "blocks(4,stochastic(pc-sampler,0.5))"):
        with pytest.raises(ValueError, match=r"pc-sampler needs the frequencies .* pass PCSampler\(frequencies\)"):
            parse_policy(text, NETWORK)
        check_policy(text)


def test_the_same_ranges_hold_in_code():
    for wrong in (
        lambda: Threshold(math.nan),
        lambda: Threshold(0.9, confidence="mean"),
        lambda: RDM("sine"),
        lambda: RDM(revise="maybe"),
        lambda: Blocks(0, Margin()),
        lambda: Blocks(4, Prophet()),
        lambda: Blocks(4, "margin"),
        lambda: Stochastic("margin", 0.5),
        lambda: EntropyBounded(order="margin"),
        lambda: Learned(NETWORK, floor=1.0),
    ):
        with pytest.raises(ValueError, match=ONE_LINE):
            wrong()


def test_numbers_too_long_are_refused_in_one_line():
    refused("blocks(" + "9" * 5000 + ",margin)")
    refused("learned(cap=" + "9" * 5000 + ")")


def test_a_deep_nest_is_refused_like_any_other():
    refused("blocks(1," * 600 + "margin" + ")" * 600)


def test_a_message_is_one_line_whatever_the_text_holds():
    for text in (
        "threshold(abc\n)",
        "threshold(\n0.5,level=1)",
        "klass(1,\r\n2)",
        "stochastic(\nmargin)",
        "iid(\u2028)x",
    ):
        refused(text)


WORDS = [
    *BUILT_IN,
    *("(", ")", "(", ")", ",", ",", ":", "=", " ", "\n", "-", "0", "1", "0.9", "2", "32", "nan", "inf", "1e9"),
    *("confidence=", "sampled", "max", "order=", "deterministic", "temperature=", "cap=", "network=", "cond", "x"),
]


words = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)
calls = st.builds("{}({})".format, st.sampled_from(list(BUILT_IN)), st.lists(words, max_size=4).map(",".join))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.one_of(st.text(max_size=30), words, calls))
def test_any_text_is_a_rule_or_one_line(text):
    rule, error = None, ""
    try:
        rule = parse_policy(text, NETWORK, BACKGROUND)
    except ValueError as caught:
        error = str(caught)
    if rule is None:
        assert re.search(ONE_LINE, error), repr(error)
    else:
        assert isinstance(rule, Policy)
        assert parse_policy(rule.name, NETWORK, BACKGROUND) == rule


# --- what is shown of a rule ------------------------------------------------------------------------------------------


def test_the_list_is_read_from_the_sources():
    listed = listed_rules()
    assert [name for _, name, *_ in listed] == [rule.__name__ for rule in BUILT_IN.values()]
    for rule, (shown, _, words, formula) in zip(BUILT_IN.values(), listed, strict=True):
        assert shown == usage(rule)
        assert [words, formula] == inspect.cleandoc(rule.__doc__).split("\n\n")[:2]
        assert re.fullmatch(r"[A-Z][a-z ,;:]{15,110}\.", words), "one plain sentence, no formula"
        assert re.fullmatch(r".{20,116}\.", formula), "one line"
    told = in_words()
    assert list(told) == list(BUILT_IN)
    assert len({*told.values()}) == len(told)


def test_usage_shows_a_string_that_can_be_read():
    for key, rule in BUILT_IN.items():
        assert re.fullmatch(r"[a-z][a-z0-9-]*", key)
        shown = usage(rule).replace("ORDER", "margin").replace("INNER", "margin").replace("SIZE", "4")
        assert type(parse_policy(shown.replace("TEMPERATURE", "0.5"), NETWORK, BACKGROUND)) is rule
        for parameter in dataclasses.fields(rule):
            if parameter.kw_only and parameter.repr:
                assert f"{parameter.name}=" in usage(rule)
