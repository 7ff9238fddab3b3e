"""Records and bounds, against stubs that are always right or wrong and against exact enumeration."""

import dataclasses
import math
from itertools import product

import pytest
import torch
from torch import nn

from tests.decoding.small import BUILT_IN
from tests.evaluation.by_hand import flat
from tests.training.small import FixedTask, json_lines, padded, single, small_model
from tests.variational.test_lo_arm import exact_bound as exact_lo_arm_bound
from unmask.decoding.generate import Engine
from unmask.decoding.policies import (
    IID,
    P2,
    WINO,
    Blocks,
    Learned,
    Margin,
    NetworkPolicy,
    OneAtATime,
    RewardTrained,
    Threshold,
    TopProbability,
    parse_policy,
)
from unmask.decoding.tokens import TokenChoice
from unmask.errors import UserError
from unmask.evaluation import bound as bounds
from unmask.evaluation import evaluate as evaluation
from unmask.evaluation.bound import evaluate_bound
from unmask.evaluation.evaluate import HalfTrunk, Setup, device_name, evaluate_policy, half_selector, revision
from unmask.evaluation.records import wilson_interval
from unmask.evaluation.verdicts import VerdictFile
from unmask.models.networks import Selector
from unmask.models.order_model import weights_hash
from unmask.runtime import process_settings
from unmask.tasks.puzzles.chain import Chain
from unmask.tasks.puzzles.groups import Groups
from unmask.tasks.puzzles.latin_square import LatinSquare
from unmask.tasks.puzzles.waiting_lines import WaitingLines
from unmask.variational.enumeration import TinyModel, exact_bound, exact_log_likelihood, exact_self_bound

TASK = Groups(groups=2, group_size=2, symbols=3)
SAMPLED = TokenChoice(temperature=1.0)


# --- the interval -----------------------------------------------------------------------------------------------------


def test_wilson_interval():
    """Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I, method 3."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_wilson_interval_solves_its_equation():
    """Its ends are the rates p at which |p^ - p| = z sqrt(p (1 - p) / n)."""
    for successes, trials in [(3, 17), (950, 1000), (40, 41)]:
        for p in wilson_interval(successes, trials):
            distance = abs(successes / trials - p)
            assert distance == pytest.approx(1.959964 * math.sqrt(p * (1 - p) / trials), rel=1e-9)


def test_wilson_interval_stays_inside():
    for successes in range(6):
        low, high = wilson_interval(successes, 5)
        assert 0 <= low <= successes / 5 + 1e-12
        assert successes / 5 - 1e-12 <= high <= 1


# --- records ----------------------------------------------------------------------------------------------------------


class StubDenoiser(nn.Module):
    """Knows the log-probabilities of every position from what is revealed: `law(tokens [L]) -> p [L, V]`."""

    def __init__(self, law, vocab_size=3):
        super().__init__()
        self.law, self.mask_token_id = law, vocab_size
        self.weight = nn.Parameter(torch.zeros(1))

    def hidden(self, tokens, attention_mask=None):
        return torch.stack([self.law(row) for row in tokens]).clamp(min=1e-30).log()

    def logits(self, hidden):
        return hidden


class StubModel(nn.Module):
    def __init__(self, law, vocab_size=3):
        super().__init__()
        self.denoiser = StubDenoiser(law, vocab_size)


def always(sequence):
    """A denoiser that writes the same sequence whatever it sees."""
    return StubModel(lambda row: nn.functional.one_hot(torch.tensor(sequence), 3).double())


def exact_conditionals(task):
    """The denoiser of the true distribution: p(x_n | what is revealed), by enumeration of all valid sequences."""
    everything = torch.tensor(list(product(range(3), repeat=task.length)))
    valid = everything[task.valid(everything, task.examples(torch.arange(len(everything)), "test"))]

    def law(row):
        agreeing = valid[((row == 3) | (valid == row)).all(-1)]
        return nn.functional.one_hot(agreeing, 3).double().mean(0) if len(agreeing) else torch.full((4, 3), 1 / 3)

    return StubModel(law)


def recorded(model, policy, budget, task=TASK, examples=60, **options):
    """The record; options are those of Setup and of evaluate_policy."""
    given = {"plain": model, "label": "stub", "choice": SAMPLED, "seed": 0, "num_examples": examples, **options}
    setup = {name: given.pop(name) for name in Setup.__dataclass_fields__ if name in given}
    return evaluate_policy(Setup(model=model, task=task, **setup), policy, budget, **given)


def run(model, policy, budget, task=TASK, **options):
    return flat(recorded(model, policy, budget, task, **options))


def same(first, second, *but):
    """Whether flat records agree in everything but the seconds and these fields."""
    return {**vars(first), **dict.fromkeys(("seconds", *but))} == {**vars(second), **dict.fromkeys(("seconds", *but))}


def test_the_trunk_in_half_precision():
    """Other hidden states, by a rounding; logits in float32; another evaluation, of the same weights."""
    model = small_model(longest=4).float()
    tokens = torch.tensor([[0, 1, 3, 3]])
    half = HalfTrunk(model.denoiser)
    exact = model.denoiser.hidden(tokens)
    assert half.hidden(tokens).dtype == half.logits(half.hidden(tokens)).dtype == torch.float32
    assert 0 < (half.hidden(tokens) - exact).abs().max() < 0.02 * exact.abs().max()
    for rule in (WINO(), TopProbability()):
        full, rounded = (run(model, rule, 2, precision=precision) for precision in ("no", "bf16"))
    assert (full.precision, rounded.precision) == ("no", "bf16")
    assert full.denoiser == rounded.denoiser


def test_the_selector_in_half_precision(monkeypatch):
    """As under autocast, with logits in float32; an evaluation in half precision reads it so, in blocks too."""
    model, policy = learned_model()
    selector = model.float().selector
    generator, width = torch.Generator().manual_seed(0), model.denoiser.backbone.config.width
    hidden, masked = torch.randn(2, 4, width, generator=generator), torch.ones(2, 4, dtype=torch.bool)
    priced = Selector(dataclasses.replace(selector.config, budget=9, prices=(0.1, 1.0)), width)
    for parameter in priced.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    t, steps, price = torch.full((2,), 3), torch.full((2,), 5), torch.full((2,), 0.9)
    asked = hidden, torch.rand(2, 4, 3, generator=generator), masked, t, None, steps, price
    with process_settings(bf16=True):
        half, exact = half_selector(Learned(priced)).network(*asked), priced(*asked)
        with torch.autocast("cpu", torch.bfloat16):
            assert half.equal(priced(*asked))
    assert half.dtype == torch.float32
    assert not half.equal(exact)
    assert half_selector(TopProbability()) == TopProbability()

    rounded, forward = [], Selector.forward

    def noted(self, *given):
        rounded.append(torch.is_autocast_enabled("cpu"))
        return forward(self, *given)

    monkeypatch.setattr(Selector, "forward", noted)
    inside = Blocks(4, Learned(Selector(dataclasses.replace(selector.config, block_size=4), width)))
    for rule, precision in ((policy, "no"), (policy, "bf16"), (inside, "bf16")):
        rounded.clear()
        record = run(model, rule, 2, precision=precision)
        assert set(rounded) == {precision == "bf16"}
        assert record.precision == precision


def test_a_learned_order_is_named_by_its_seed_and_its_rivals(tmp_path):
    model, policy = learned_model()
    plain = small_model(seed=5)
    record = run(model, policy, 2, trained_seed=7, plain=plain)
    assert (record.trained_seed, record.plain_denoiser) == (7, weights_hash(plain.denoiser))
    record = run(model, IID(), 2, trained_seed=7, plain=plain)
    assert (record.trained_seed, record.plain_denoiser) == (None, None)


@dataclasses.dataclass(frozen=True)
class TwoWays(Groups):
    """A puzzle with two held-out splits and metrics of its own."""

    held_out: str = "near"
    held_out_splits = ("near", "far")

    def metrics(self, tokens, examples):
        return {"even": torch.arange(len(tokens)) % 2 == 0, "tenth": torch.arange(len(tokens)) % 10 == 0}


def test_what_a_task_may_say_of_its_held_out_examples(tmp_path, monkeypatch):
    """The split by its name, and the mean of each metric; resumed alike."""
    monkeypatch.setattr(evaluation, "CHUNK", 20)
    task = TwoWays(groups=2, group_size=2, symbols=3)
    stream = VerdictFile(tmp_path / "verdicts.jsonl")
    record = run(always(VALID), Margin(), 2, task=task, verdicts=stream)
    assert (record.split, record.metrics) == ("near", {"even": 0.5, "tenth": 0.1})
    assert run(always(VALID), Margin(), 2, task=task, verdicts=VerdictFile(stream.path)) == record
    far = task.on_split("far")
    record = run(always(VALID), Margin(), 2, task=far, verdicts=stream)
    assert record.split == "far"
    assert len(json_lines(stream.path)) == 6, "another evaluation"
    plain = run(always(VALID), Margin(), 2)
    assert (plain.split, plain.metrics) == ("test", {})
    assert task.on_split("near") is task
    with pytest.raises(ValueError, match=r"no held-out split 'fra'; did you mean 'far'\? choose from near, far"):
        task.on_split("fra")
    with pytest.raises(ValueError, match="task groups has no held-out split 'near'; choose from test"):
        TASK.on_split("near")


def test_figures_of_a_whole_evaluation_stand_beside_the_metrics(tmp_path, monkeypatch):
    """From the codes of all chunks, resumed alike."""
    monkeypatch.setattr(evaluation, "CHUNK", 20)
    task = WaitingLines(operations="remove-random", min_n=4, max_n=4, names=5)
    model = StubModel(lambda row: task.log_posterior(row[None])[0].exp(), len(task.vocabulary))
    stream = VerdictFile(tmp_path / "verdicts.jsonl")
    record = run(model, TopProbability(), 3, task=task, verdicts=stream)
    assert (record.score, record.distinct) == (1, None)
    codes = [code for line in json_lines(stream.path) for code in line["answers"]]
    counts = torch.tensor([code % 100 - 1 for code in codes]).bincount(minlength=4)
    assert record.metrics == {"TV": pytest.approx(float((counts / 60 - 0.25).abs().sum() / 2), abs=1e-6)}
    assert 0 < record.metrics["TV"] < 0.25
    kept = [line["diverse"] for line in json_lines(stream.path)]
    assert kept[:2] == [None, None], "known when all are"
    assert sum(kept[2]) / len(kept[2]) == pytest.approx(1 - record.metrics["TV"], abs=1e-6), "all are valid"
    assert run(model, TopProbability(), 3, task=task, verdicts=VerdictFile(stream.path)) == record


VALID = TASK.examples(torch.tensor([0]), "test").tokens[0].tolist()
WRONG = [VALID[0], *[(token + 1) % 3 for token in VALID[1:]]]


def test_always_wrong():
    assert not TASK.valid(torch.tensor([WRONG]), TASK.examples(torch.tensor([0]), "test")).any()
    record = run(always(WRONG), TopProbability(), 2)
    assert record.score == 0
    assert (record.ci_low, record.ci_high) == pytest.approx(wilson_interval(0, 60), abs=1e-6)
    assert (record.distinct, record.distinct_low, record.distinct_high) == (0, 0, 0)


def test_a_constant_sampler_is_not_diverse():
    """Always valid and always the same: the score cannot see it, the count of distinct samples does."""
    record = run(always(VALID), TopProbability(), 2)
    assert (record.score, record.num_examples) == (1.0, 60)
    assert (record.ci_low, record.ci_high) == pytest.approx(wilson_interval(60, 60), abs=1e-6)
    assert record.distinct == 1
    assert record.distinct_low > 1
    assert not record.diverse


def test_the_true_distribution_is_valid_and_diverse():
    """One position a step from the exact conditionals is an exact sampler, whatever the order."""
    record = run(exact_conditionals(TASK), TopProbability(), 4)
    assert record.score == 1
    assert record.diverse
    assert record.distinct > 5


def test_one_step_of_the_true_conditionals_breaks_dependencies():
    """All at once, every token is uniform by itself: valid with probability 1 / 9."""
    record = run(exact_conditionals(TASK), IID(), 1, examples=300)
    assert abs(record.score - 1 / 9) < 5 * math.sqrt(8 / 81 / 300)
    assert (record.mean_steps, record.fewest_steps, record.most_steps, record.num_forwards) == (1, 1, 1, 300)


def test_steps_and_passes():
    record = run(always(VALID), TopProbability(), 4)
    assert (record.mean_steps, record.fewest_steps, record.most_steps) == (4, 4, 4)
    assert record.num_forwards == 4 * 60
    assert len(record.reveal_step) == evaluation.PICTURED
    assert all(sorted(row) == [0, 1, 2, 3] for row in record.reveal_step)
    record = run(always(VALID), TopProbability(), 11)
    assert (record.budget, record.most_steps) == (11, 4), "no more than the response has"


def test_iid_steps_are_counted_per_sequence():
    record = run(always(VALID), IID(), 4)
    assert record.fewest_steps < record.most_steps <= 4
    assert record.num_forwards == round(record.mean_passes * 60) < round(record.mean_steps * 60)  # some reveal nothing
    assert max(max(row) for row in record.reveal_step) <= 3


def test_what_a_record_says_of_a_heuristic():
    record = run(always(VALID), Margin(), 2, seed=7, choice=TokenChoice(0.5), label="2x16")
    assert (record.task, record.split, record.model, record.policy) == ("groups", "test", "2x16", "margin")
    assert (record.trained_budget, record.budget, record.selector, record.nothing_selected) == (None, 2, None, None)
    assert (record.seed, record.temperature, record.eos_policy, record.device) == (7, 0.5, "none", "cpu")
    assert record.revision == revision()
    assert record.seconds >= 0


def test_a_task_with_a_prompt_has_no_distinct_samples():
    task = LatinSquare()
    model = StubModel(lambda row: torch.full((len(row), len(task.vocabulary)), 0.25).double(), len(task.vocabulary))
    record = run(model, TopProbability(), 2, task, examples=5)
    assert (record.distinct, record.distinct_low, record.distinct_high) == (None, None, None)
    assert record.diverse
    assert any(step == -1 for row in record.reveal_step for step in row), "clues are never revealed"


def learned_model(**options):
    model = small_model(budget=2, **options)
    return model, Learned(model.selector)


def test_what_a_record_says_of_a_learned_order():
    for selection in ["nonempty", "bernoulli"]:
        model, policy = learned_model(selection=selection)
        record = run(model, policy, 2)
        assert (record.policy, record.trained_budget, record.budget, record.selector) == ("learned", 2, 2, selection)
        assert record.denoiser == weights_hash(model.denoiser)
        assert 0 <= record.nothing_selected < 1
        assert (record.nothing_selected > 0) == (selection == "bernoulli"), "of 60 sequences, a few choose nothing"


def test_the_result_does_not_depend_on_the_batch(monkeypatch):
    model, learned = learned_model()
    rules = ((learned, 2), (IID(), 2), (P2(), 3))
    whole = [run(model, rule, budget, examples=23) for rule, budget in rules]
    monkeypatch.setattr(evaluation, "CHUNK", 7)
    for record, (rule, budget) in zip(whole, rules, strict=True):
        assert same(run(model, rule, budget, examples=23), record)
    out = Engine(model.denoiser, P2(), 3, SAMPLED).generate(torch.full((23, 4), 3))
    assert whole[2].mean_revisions == round(int(out.revisions.sum()) / (23 * 4), 6) > 0


def test_more_examples_keep_the_first_ones():
    model, policy = learned_model()
    few, many = (run(model, policy, 2, examples=examples) for examples in (5, 20))
    assert many.reveal_step[:5] == few.reveal_step


def test_the_seed_matters():
    model, policy = learned_model()
    orders = [run(model, policy, 2, seed=seed).reveal_step for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_progress_is_told():
    """As soon as sequences are finished, all of a batch together where they take as many steps."""
    told = []
    run(always(VALID), IID(), 1, examples=2300, advance=told.append)
    assert told == [250] * 9 + [50]
    told.clear()
    run(always(VALID), IID(), 4, examples=300, advance=told.append)
    assert sum(told) == 300
    assert min(told) > 0
    assert len(told) > 2, "some sequences of a batch are finished before others"


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [False, True])
def test_one_engine_an_evaluation(monkeypatch, uncompiled, compile):
    """However many chunks there are, so that it compiles once: also for the last chunk, which is smaller."""
    made, spec = [], []
    create, generate = Engine.__init__, Engine.generate

    def creating(self, *arguments, **options):
        made.append(options)
        create(self, *arguments, **options)

    def generating(self, prompts, **options):
        spec.append(len(prompts))
        return generate(self, prompts, **options)

    monkeypatch.setattr(Engine, "__init__", creating)
    monkeypatch.setattr(Engine, "generate", generating)
    monkeypatch.setattr(evaluation, "CHUNK", 20)
    monkeypatch.setattr(evaluation, "BATCH", 10)
    run(always(VALID), TopProbability(), 2, examples=45, compile=compile)
    assert made == [{"batch_size": 10, "compile": compile, "cache": "auto"}]
    assert spec == [20, 20, 5]
    pieces = len(uncompiled)
    assert (pieces > 0) == compile
    run(always(VALID), TopProbability(), 2, examples=10, compile=compile)
    assert len(uncompiled) == 2 * pieces, "as many for one chunk as for three"


def test_compiled_records_are_eager_ones(monkeypatch, uncompiled):
    """All of the record, the order and the verdicts; but rows that idle in a fixed shape are passes too."""
    monkeypatch.setattr(evaluation, "CHUNK", 20)
    monkeypatch.setattr(evaluation, "BATCH", 10)
    model, _ = learned_model(selection="bernoulli")
    names = ("learned", "lo-arm", "iid", "top-prob", "threshold:0.9", "p2", "blocks(2,margin)")
    for name, guidance in product(names, (0.0, 0.5)):
        policy, choice = parse_policy(name, model.selector), TokenChoice(temperature=1.0, guidance=guidance)
        eager, compiled = (
            recorded(model, policy, 2, examples=40, choice=choice, compile=compile) for compile in (False, True)
        )
        assert compiled.key == eager.key
        assert (compiled.verdicts.valid == eager.verdicts.valid).all()
        assert (compiled.verdicts.steps == eager.verdicts.steps).all()
        assert same(flat(compiled), flat(eager), "compile", "num_forwards")
        idle = compiled.outcome.num_forwards - eager.outcome.num_forwards
        assert idle == 0 or (idle > 0 and eager.outcome.fewest_steps < eager.outcome.most_steps)
    assert uncompiled


def test_an_eager_evaluation_is_not_finished_by_a_compiled_one(tmp_path, uncompiled, monkeypatch):
    """Rounding may differ between the two: a compiled one starts over, and the eager one can still be finished."""
    monkeypatch.setattr(evaluation, "CHUNK", 20)
    model, policy = learned_model()
    path = tmp_path / "verdicts.jsonl"
    whole = run(model, policy, 2, verdicts=VerdictFile(path))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    compiled = run(model, policy, 2, verdicts=VerdictFile(path), compile=True)
    assert uncompiled
    assert same(compiled, whole, "num_forwards", "compile")

    def lines():
        return [(line["compile"], line["first"]) for line in json_lines(path)]

    assert lines() == [(False, 0), (True, 0), (True, 20), (True, 40)]
    resumed = run(model, policy, 2, verdicts=VerdictFile(path))
    assert lines()[4:] == [(False, 20), (False, 40)]
    assert same(resumed, whole)


# --- what a record says of rules of every kind ------------------------------------------------------------------------


def test_re_masking_is_counted_a_position():
    """Null for rules that never re-mask; 0 for one that does and had no occasion."""
    model, policy = learned_model()
    record = run(model, P2(), 4)
    assert (record.policy, record.trained_budget, record.selector) == ("p2", None, None)
    assert 0 < record.mean_revisions < 4
    assert (record.fewest_steps, record.most_steps, record.mean_passes) == (4, 4, 4), "it runs all of its steps"
    assert run(model, P2(), 1).mean_revisions == 0.0
    for rule, budget in ((TopProbability(), 4), (Threshold(), 4), (policy, 2)):
        assert run(model, rule, budget).mean_revisions is None


def test_a_guided_evaluation_doubles_the_passes():
    model, learned = learned_model()
    for policy in (TopProbability(), IID(), P2(), learned):
        record = run(model, policy, 2, examples=50)
        guided = run(model, policy, 2, examples=50, choice=TokenChoice(temperature=1.0, guidance=1.0))
        if policy in (TopProbability(), learned):  # the others may need no pass for a step
            assert record.mean_passes == record.mean_steps
            assert guided.mean_passes == 2 * guided.mean_steps
        assert (record.guidance, guided.guidance) == (0, 1)
        if policy is not learned:
            assert guided.mean_passes == 2 * record.mean_passes
            assert guided.num_forwards == 2 * record.num_forwards


def test_a_threshold_takes_no_more_steps_than_it_must():
    """Certain of everything, it reveals all at once; of nothing, one mask a step."""
    record = run(always(VALID), Threshold(0.9), 4)
    assert (record.policy, record.budget, record.fewest_steps, record.most_steps) == ("threshold:0.9", 4, 1, 1)
    assert record.score == 1
    record = run(StubModel(lambda row: torch.full((4, 3), 1 / 3).double()), Threshold(0.9), 4)
    assert (record.fewest_steps, record.most_steps, record.num_forwards) == (4, 4, 4 * 60)


def test_whatever_a_network_decides_is_recorded_as_a_learned_order():
    for kind in [OneAtATime, RewardTrained]:
        model, _ = learned_model(selection="bernoulli")
        record = run(model, kind(model.selector), 2)
        assert record.policy == kind(model.selector).name
        assert (record.trained_budget, record.budget, record.selector) == (2, 2, "bernoulli")
        with pytest.raises(ValueError, match="trained for T = 2, not for 3"):
            run(model, kind(model.selector), 3)
        if kind is OneAtATime:
            assert (record.fewest_steps, record.most_steps, record.nothing_selected) == (2, 2, 0)
            assert {tuple(sorted(row)) for row in record.reveal_step} == {(0, 1, 1, 1)}
        else:
            assert 0 < record.nothing_selected < 1


def test_a_changed_selector_is_another_evaluation_whatever_the_rule():
    """Its hash is part of what was asked of every rule that reads it, and of no other."""
    keys = []
    for sign in (1, -1):
        model, learned = learned_model()
        with torch.no_grad():
            model.selector.out.weight.mul_(sign)
        policies = (learned, OneAtATime(model.selector), RewardTrained(model.selector), Margin())
        keys.append([recorded(model, policy, 2, examples=5).key for policy in policies])
    assert [first == second for first, second in zip(*keys, strict=True)] == [False, False, False, True]


# --- policies by name -------------------------------------------------------------------------------------------------


def test_every_rule_has_its_name_and_the_models_selector():
    """With parameters where they are needed; those that a network decides get that of the model."""
    model, _ = learned_model()
    needed = {"stochastic": "stochastic(margin,0.5)", "blocks": "blocks(2,margin)"}
    for key, kind in BUILT_IN.items():
        policy = parse_policy(needed.get(key, key), model.selector, TASK.token_frequencies)
        assert type(policy) is kind
        assert policy.key == key
        assert parse_policy(policy.name, model.selector, TASK.token_frequencies) == policy
        assert isinstance(policy, NetworkPolicy) == (key in ("learned", "lo-arm", "reward"))
        if isinstance(policy, NetworkPolicy):
            assert policy.network is model.selector


def test_an_unknown_policy_lists_the_known():
    with pytest.raises(
        ValueError,
        match=r"unknown policy 'tob-prob'; did you mean 'top-prob'\? choose from iid, top-prob, margin, .*learned",
    ) as caught:
        parse_policy("tob-prob", small_model().selector)
    assert f"choose from {', '.join(BUILT_IN)}" in str(caught.value)


def test_a_model_without_an_order_has_no_learned_policy():
    for name in ("learned", "lo-arm", "reward"):
        with pytest.raises(ValueError, match=f"^{name} needs a learned order, and there is none: train one with an"):
            parse_policy(name, None)


# --- the bound --------------------------------------------------------------------------------------------------------

BUDGET = 3
ROWS = padded(
    [[2, 0, 1, 1], [1, 2, 0], [0, 2, 2, 1, 0]],
    [[False, True, True, True], [True, True, True], [True, False, True, True, True]],
)


def tiny_of(model):
    """The same three networks as functions of sequences without padding, for exact enumeration."""

    def denoiser(x):
        return model.denoiser(x).log_softmax(-1)

    def selector(x, t):
        masked = x == model.denoiser.mask_token_id
        p = denoiser(x).exp()
        best = p.sort(-1, descending=True).values
        said = torch.stack([best[..., 0], best[..., 0] - best[..., 1], -(p * p.log()).sum(-1)], dim=-1)
        said = torch.where(masked[..., None], said, 0.0)
        times = torch.full((len(x),), t)
        return model.selector(model.denoiser.hidden(x), said, masked, times)

    return TinyModel(denoiser, selector, model.scorer, model.selection, 3, model.config.tau)


@torch.no_grad()
def exact_order_bounds(model, rows):
    """[B, T]: the exact terms of the bound of each row, in nats a token."""
    terms = []
    for row in range(len(rows)):
        x0, response = single(rows, row)
        terms.append(exact_bound(tiny_of(model), x0, BUDGET, response) / response.sum())
    return torch.stack(terms)


@torch.no_grad()
def exact_mdm_bounds(model, rows):
    """[B]: sum_t 1/(t+1) E[sum over masks of log mu] / N, every position masked with probability (t+1)/T."""
    bounds = []
    for row in range(len(rows)):
        x0, response = single(rows, row)
        N, total = int(response.sum()), 0.0
        for subset in product([False, True], repeat=N):
            masked = torch.zeros_like(response)
            masked[response] = torch.tensor(subset)
            x = torch.where(masked, model.denoiser.mask_token_id, x0)[None]
            log_mu = model.denoiser(x)[0].log_softmax(-1)[torch.arange(len(x0)), x0][masked].sum().item()
            for t in range(BUDGET):
                rate = (t + 1) / BUDGET
                total += rate ** sum(subset) * (1 - rate) ** (N - sum(subset)) * log_mu / (t + 1)
        bounds.append(total / N)
    return torch.tensor(bounds, dtype=torch.float64)


def bound_of(model, rows, plain=None, task=None, **options):
    settings = {"examples": len(rows), "samples": 2, "seed": 0, **options}
    return evaluate_bound(model, plain or model, task or FixedTask(rows), **settings)


def test_the_bound_is_exact_where_the_posterior_is_certain():
    """At a tiny temperature Q draws one trajectory only, so that the estimate has no variance: all T terms, padding
    and prompts, and the mean over sequences of nats a token."""
    for selection in ["nonempty", "bernoulli"]:
        model = small_model(budget=BUDGET, selection=selection, tau=1e-4)
        exact = exact_order_bounds(model, ROWS)
        bound = bound_of(model, ROWS)
        assert bound.order_bound == pytest.approx(exact.sum(-1).mean().item(), rel=1e-9)
        by_time = [F1 - KL for F1, KL in zip(bound.reconstruction, bound.order_kl, strict=True)]
        assert by_time == pytest.approx(exact.mean(0).tolist(), rel=1e-9)
        assert bound.order_bound_se == pytest.approx(exact.sum(-1).std().item() / math.sqrt(3), rel=1e-9)
        assert bound.order_kl[0] == 0
        assert max(bound.order_kl) > 0.01
        assert (bound.budget, bound.num_examples) == (BUDGET, 3)


def test_the_bound_is_unbiased():
    """One sequence many times over: the estimate lies within five of its own standard errors of the exact bound."""
    for row in range(3):
        model = small_model(budget=BUDGET, tau=0.15)
        x0, response = single(ROWS, row)
        one = padded([x0.tolist()], [response.tolist()], left=True, extra=1)
        bound = bound_of(model, one, examples=3000, samples=1)
        exact = exact_order_bounds(model, one).sum().item()
        assert 0 < bound.order_bound_se < 0.02, "the test has power"
        assert abs(bound.order_bound - exact) < 5 * bound.order_bound_se
        mdm = exact_mdm_bounds(model, one).item()
        assert 0 < bound.mdm_bound_se < 0.02
        assert abs(bound.mdm_bound - mdm) < 5 * bound.mdm_bound_se


@torch.no_grad()
def test_the_selectors_own_bound_is_unbiased_and_grows_with_the_samples():
    """J within five standard errors of the enumerated one; J < from 4 samples < from 64 < log P."""
    model = small_model(budget=BUDGET)
    model.denoiser.head.weight.mul_(4)  # far from indifferent to the order
    x0, response = single(ROWS, 0)
    one = padded([x0.tolist()], [response.tolist()], left=True, extra=1)
    tiny, N = tiny_of(model), int(response.sum())
    exact, limit = exact_self_bound(tiny, x0, BUDGET, response), exact_log_likelihood(tiny, x0, BUDGET, response) / N
    few, many = bound_of(model, one, examples=2000, samples=4), bound_of(model, one, examples=200, samples=64)
    assert 0 < few.self_bound_se < 0.02, "the test has power"
    assert abs(few.self_bound - exact.gain.sum() / N) < 5 * few.self_bound_se
    assert few.steps == pytest.approx(float(exact.chain.expected_steps()), abs=0.05)
    assert few.self_bound + 0.02 < few.many_sample_bound < many.many_sample_bound + 5 * many.many_sample_bound_se
    assert abs(many.many_sample_bound - limit) < 0.01 + 5 * many.many_sample_bound_se
    assert many.samples == 64
    assert many.price is None


class Spelled(FixedTask):
    """Tokens are text: the last of a response says how many characters it has."""

    text_tokenizer = object()

    def text(self, tokens):
        return "é" * (1 + 10 * tokens[-1])


def test_bits_per_character_are_those_of_all_responses():
    """Not the mean of each response's: the characters differ, and so do the tokens."""
    model = small_model(budget=BUDGET, tau=1e-4)  # Q is certain: the estimate has no variance
    bound, silent = bound_of(model, ROWS, task=Spelled(ROWS)), bound_of(model, ROWS)
    assert (silent.characters, silent.bits) == (0, {})
    nats, C = exact_order_bounds(model, ROWS).sum(-1) * ROWS.response.sum(-1), torch.tensor([11.0, 1, 1])
    assert bound.characters == 13
    bits = -nats / math.log(2)
    ratio = float(bits.sum() / 13)
    error = float((bits - ratio * C).std() / math.sqrt(3) / C.mean())
    assert bound.bits["order"] == pytest.approx([ratio, error], rel=1e-6)
    assert set(bound.bits) == {"order", "self", "many_sample", "mdm"}
    own, many = (bound.bits[name][0] for name in ("self", "many_sample"))
    assert many < own, "more samples, a tighter bound, fewer bits"
    one = bound_of(model, ROWS.rows(torch.tensor([0])), task=Spelled(ROWS.rows(torch.tensor([0]))), examples=2)
    for name, value in (("self", one.self_bound), ("many_sample", one.many_sample_bound), ("mdm", one.mdm_bound)):
        assert one.bits[name][0] == pytest.approx(-3 * value / math.log(2) / 11, rel=1e-6)


@torch.no_grad()
def test_the_gain_over_iid_is_that_of_the_better_bound():
    model = small_model(budget=BUDGET)
    bound = bound_of(model, ROWS, examples=6)
    assert bound.gain == pytest.approx(max(bound.order_bound, bound.self_bound) - bound.mdm_bound, rel=1e-9)
    assert bound.gain_se > 0


@torch.no_grad()
def test_the_bound_of_lo_arm_is_unbiased():
    """Its own posterior, one token per step: the sum over all orders, within five standard errors."""
    for row in range(3):
        model = small_model(budget=BUDGET, selection="one")
        x0, response = single(ROWS, row)
        one = padded([x0.tolist()], [response.tolist()], left=True, extra=1)
        bound = bound_of(model, one, examples=1500, samples=1)
        exact = exact_lo_arm_bound(tiny_of(model), x0, BUDGET, response) / response.sum()
        assert 0 < bound.order_bound_se < 0.02, "the test has power"
        assert abs(bound.order_bound - exact) < 5 * bound.order_bound_se
        assert bound.steps == BUDGET


def test_one_sample_is_the_bound_itself():
    bound = bound_of(small_model(budget=BUDGET), ROWS, samples=1)
    assert bound.many_sample_bound == pytest.approx(bound.self_bound, rel=1e-9)


def test_a_run_without_a_scorer_has_the_selectors_own_bound():
    model = small_model(budget=BUDGET)
    with_scorer, model.scorer = bound_of(model, ROWS), None
    without = bound_of(model, ROWS)
    assert (without.order_bound, without.order_bound_se, without.reconstruction) == (None, None, [])
    for field in ("self_bound", "self_bound_se", "many_sample_bound", "steps", "mdm_bound"):
        assert getattr(without, field) == getattr(with_scorer, field)


def test_a_price_changes_the_selectors_own_bound():
    model = small_model(prices=(0.1, 3.0), budget=BUDGET)
    lowest, low, high = (bound_of(model, ROWS, price=price) for price in (0.0, 0.1, 3.0))
    assert lowest == low
    assert (low.price, high.price) == (0.1, 3.0)
    assert low.self_bound != high.self_bound
    with pytest.warns(UserWarning, match="price 5 is outside the range that was trained, 0.1 to 3"):
        assert bound_of(model, ROWS, price=5.0) == high
    with pytest.raises(UserError, match="price must be 0 or more, got -1"):
        bound_of(model, ROWS, price=-1.0)
    with pytest.raises(UserError, match="trained without prices: leave price out"):
        bound_of(small_model(budget=BUDGET), ROWS, price=1.0)


def test_the_mdm_bound_of_one_step_is_exact():
    """T = 1: everything is masked, once."""
    model = small_model(budget=1)
    bound = bound_of(model, ROWS)
    exact = []
    for row in range(len(ROWS)):
        x0, response = single(ROWS, row)
        x = torch.where(response, model.denoiser.mask_token_id, x0)[None]
        log_mu = model.denoiser(x)[0].log_softmax(-1)[torch.arange(len(x0)), x0]
        exact.append(log_mu[response].mean().item())
    assert bound.mdm_bound == pytest.approx(sum(exact) / 3, rel=1e-9)
    for own in (bound.order_bound, bound.self_bound, bound.many_sample_bound):
        assert own == pytest.approx(bound.mdm_bound, rel=1e-9), "one step leaves nothing to choose"


def test_the_mdm_bound_is_that_of_the_plain_denoiser():
    model, plain = small_model(budget=BUDGET), small_model(budget=BUDGET, seed=9)
    both, own = bound_of(model, ROWS, plain), bound_of(model, ROWS)
    assert both.order_bound == own.order_bound
    assert both.mdm_bound != own.mdm_bound
    assert both.mdm_bound == bound_of(plain, ROWS).mdm_bound


def test_the_bound_does_not_depend_on_the_batch(monkeypatch):
    model = small_model(budget=BUDGET)
    whole = bound_of(model, ROWS, examples=11)
    monkeypatch.setattr(bounds, "BATCH", 4)
    in_parts = bound_of(model, ROWS, examples=11)
    for field, value in dataclasses.asdict(whole).items():
        if value is not None:
            assert getattr(in_parts, field) == pytest.approx(value, rel=1e-9), field


def test_the_bound_of_a_puzzle_stays_below_its_entropy():
    """In nats a token, and no bound of any model may exceed minus the true entropy (but by chance)."""
    bound = bound_of(small_model(budget=2), ROWS, task=TASK, examples=50)
    assert bound.entropy == pytest.approx(2 * math.log(3) / 4)
    assert bound.order_bound < -bound.entropy
    assert bound.self_bound < -bound.entropy
    assert bound.mdm_bound < -bound.entropy
    assert bound_of(small_model(), ROWS).entropy is None


def test_the_exact_log_likelihood_is_of_the_same_sequences():
    """In nats a token: the mean of what the task says of each; None where it does not know."""
    task = Chain()
    truth = task.examples(torch.arange(7), "test")
    expected = task.log_likelihood(truth.tokens, truth) / truth.response.sum(-1)
    model = small_model(vocab_size=len(task.vocabulary), longest=task.length)
    bound = bound_of(model, ROWS, task=task, examples=7)
    assert bound.true_log_likelihood == pytest.approx(expected.mean().item(), rel=1e-9)
    assert expected.std() > 0.01, "the test has power"
    assert bound_of(small_model(), ROWS).true_log_likelihood is None


def test_the_bound_leaves_no_graph_and_no_gradient():
    model = small_model(budget=BUDGET)
    bound_of(model, ROWS)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bounds_that_cannot_be():
    model = small_model(budget=BUDGET)
    with pytest.raises(ValueError, match="at least 2 examples, got 1"):
        bound_of(model, ROWS, examples=1)
    model.selector = None
    with pytest.raises(ValueError, match="no learned order"):
        bound_of(model, ROWS)


# --- where a number comes from ----------------------------------------------------------------------------------------


def test_the_hash_names_the_weights():
    denoiser, twin, other = small_model().denoiser, small_model().denoiser, small_model(seed=1).denoiser
    digest = weights_hash(denoiser)
    assert len(digest) == 12
    assert int(digest, 16) >= 0
    assert weights_hash(twin) == digest
    assert weights_hash(other) != digest
    with torch.no_grad():
        denoiser.head.weight[0, 0] += 1e-3
    assert weights_hash(denoiser) != digest


def test_device_and_revision():
    assert device_name(torch.device("cpu")) == "cpu"
    assert revision()
    assert "\n" not in revision()
