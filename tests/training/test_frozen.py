"""An order for a denoiser that the user has: exactness, what a run holds, and what is refused."""

import json
import shutil
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

transformers = pytest.importorskip("transformers", reason="pip install 'unmask[pretrained]'")

import unmask  # noqa: E402
from tests.models import test_adaptation, test_checkpoints  # noqa: E402
from tests.models.test_masked import MASK, SEQUENCES, WORDS, build, change, tokenizer  # noqa: E402
from tests.training.small import padded, randomised, same, weights  # noqa: E402
from unmask.errors import UserError  # noqa: E402
from unmask.evaluation.evaluate import HalfTrunk  # noqa: E402
from unmask.evaluation.text_run import TextRun  # noqa: E402
from unmask.models.backbone import BackboneConfig  # noqa: E402
from unmask.models.frozen import FrozenDenoiser, weights_fingerprint  # noqa: E402
from unmask.models.networks import Denoiser, SelectorConfig  # noqa: E402
from unmask.models.order_model import ModelFolderError, OrderModel, OrderModelConfig, word_level_tokenizer  # noqa: E402
from unmask.training import self_posterior  # noqa: E402
from unmask.training.run_folder import RunFolderError  # noqa: E402
from unmask.training.self_posterior import SelfObjective  # noqa: E402

K, BUDGET, TRUE = 3, 4, 5  # trajectories, steps, the token that is true wherever one is masked
IDS, PRICE = torch.tensor([7, 2**40]), torch.tensor([0.5, 2.0], dtype=torch.float64)
SMALL = [
    "task.length=12", "task.response_length=6", "task.test_every=4", "task.cache=cache", "order.updates=3",
    "order.batch=4", "order.trajectories=2", "order.budget=4", "order.warmup=1", "model.selector.width=16",
    "model.selector.layers=1", "evaluate.examples=5", "evaluate.policies=['iid']", "threads=1", "precision='no'",
]  # fmt: skip


# --- exactness --------------------------------------------------------------------------------------------------------


def counting(tokens, attention_mask):
    """Logits [B, L, 12] of a function that counts positions from the left and looks at all that is no padding."""
    table = torch.randn(12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    real = torch.ones_like(tokens) if attention_mask is None else attention_mask.long()
    mean = (table[tokens] * real[..., None]).sum(1, keepdim=True) / real.sum(-1)[:, None, None]
    return table[tokens] + mean + torch.arange(tokens.shape[1])[:, None] * table[0] / 4


@pytest.fixture(params=["bert", "roberta", "electra", "llada", "function"])
def both(request, tmp_path):
    """A denoiser as it is trained on, and the model's own logits [L, V] of one sequence [L]."""
    if request.param == "function":
        return unmask.load_denoiser(counting, mask_token_id=MASK), lambda x: counting(x[None], None)[0]
    if request.param == "llada":
        theirs = {
            name: tensor.double() for name, tensor in test_checkpoints.random_weights(test_checkpoints.LLADA).items()
        }
        save_file(theirs, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(test_checkpoints.LLADA | {"mask_token_id": MASK}))
        return unmask.load_denoiser(tmp_path), partial(test_checkpoints.llada, theirs)
    own = build(request.param).double().eval()
    return unmask.load_denoiser(build(request.param).double(), mask_token_id=MASK), lambda x: own(x[None]).logits[0]


def model_of(denoiser):
    selector = SelectorConfig(8, 1, 2, BUDGET, prices=(0.1, 3.0), reads="hidden" if denoiser.width else "logits")
    config = OrderModelConfig(len(WORDS), denoiser.config(""), selector=selector)
    model = OrderModel(config, word_level_tokenizer(WORDS), denoiser)
    randomised(model.selector.double(), std=0.5)
    return model


def batch(rows, extra=0):
    """Sequences of different lengths, padded on the left, as the task `text` pads them."""
    chosen = [SEQUENCES[row] for row in rows]
    truth = [torch.where(sequence == MASK, TRUE, sequence).tolist() for sequence in chosen]
    return padded(truth, [(sequence == MASK).tolist() for sequence in chosen], left=True, extra=extra)


def test_log_mu_in_training_is_that_of_the_models_own_softmax(both, monkeypatch):
    """At every state that a training visits, next to padding and in train mode."""
    loaded, own = both
    seen = []

    def read(denoiser, tokens, masked, layout, num_masked):
        reading = original(denoiser, tokens, masked, layout, num_masked)
        seen.extend(zip(torch.where(masked, MASK, tokens), masked, layout.attended, reading.log_mu, strict=True))
        return reading

    original = self_posterior.read_denoiser
    monkeypatch.setattr(self_posterior, "read_denoiser", read)
    objective = SelfObjective(model_of(FrozenDenoiser(loaded)), K, BUDGET, seed=0).train()
    objective(batch([0, 1], extra=2), IDS, torch.tensor([0.2, 0.7])).loss.backward()
    assert len(seen) > 4
    for state, masked, attended, log_mu in seen:
        with torch.no_grad():
            logits = own(state[attended]).index_fill(-1, torch.tensor(MASK), -torch.inf)  # it never writes the mask
        expected = logits.log_softmax(-1)[:, TRUE]
        torch.testing.assert_close(log_mu[attended], torch.where(masked[attended], expected, 0.0), rtol=0, atol=1e-6)
    assert all(parameter.grad is None for parameter in objective.model.denoiser.parameters())
    assert all(parameter.grad is not None for parameter in objective.model.selector.parameters())


def test_trajectories_do_not_depend_on_the_batch(both):
    """Every gain, decision and reveal is that of the sequence alone."""
    objective = SelfObjective(model_of(FrozenDenoiser(both[0])), K, BUDGET, seed=0)
    budget = torch.full((2,), BUDGET)
    together = objective.orders(batch([0, 1], extra=2), IDS, budget, PRICE)
    for row in (0, 1):
        alone = objective.orders(batch([row]), IDS[row : row + 1], budget[:1], PRICE[row : row + 1])
        steps, length = len(alone.gain), len(SEQUENCES[row])
        for name in ("gain", "expected", "log_p"):
            found, expected = getattr(together, name)[-steps:, row], getattr(alone, name)[:, 0]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        assert torch.equal(together.revealed_at[row, :, -length:], alone.revealed_at[0])


def test_it_runs_in_the_precision_of_its_weights(monkeypatch):
    """Autocast is for the selector.  Buffers keep theirs: rotary frequencies in bfloat16 are other positions."""
    model = build("modernbert")
    denoiser = FrozenDenoiser(unmask.load_denoiser(model, mask_token_id=MASK))
    logits = denoiser.logits(denoiser.hidden(SEQUENCES[0][None])[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(denoiser.logits(denoiser.hidden(SEQUENCES[0][None])[0]), logits)
    for parameter in denoiser.parameters():
        parameter.data = parameter.data.bfloat16()  # as on a GPU
    objective = SelfObjective(model_of(denoiser), K, BUDGET, seed=0)
    objective.model.selector.float()
    outcome = objective(batch([0, 1]), IDS, torch.tensor([0.2, 0.7]))
    outcome.loss.backward()
    assert torch.isfinite(outcome.loss)
    size = sum(parameter.nbytes for parameter in denoiser.parameters())  # and as much again in float32
    monkeypatch.setattr("unmask.runtime.available_memory", lambda device: size - 1)
    for name, where in (("cpu", "CPU"), ("cuda", "GPU")):
        with pytest.raises(MemoryError, match=f"denoiser on the {where} in .*float.* take a smaller model"):
            denoiser.place(torch.device(name))
    monkeypatch.setattr("unmask.runtime.available_memory", lambda device: size)
    denoiser.place(torch.device("cpu"))
    assert {parameter.dtype for parameter in denoiser.parameters()} == {torch.float32}
    assert {buffer.dtype for buffer in denoiser.buffers() if buffer.is_floating_point()} == {torch.float32}


def test_it_has_shadows_where_its_network_has():
    own = Denoiser(BackboneConfig(width=8, layers=1, heads=2, intermediate=8), 5)
    frozen, tokens = FrozenDenoiser(own), torch.tensor([[1, 2, 5]])
    found = frozen.hidden_with(tokens, torch.ones(1, 3, 3, dtype=torch.bool), torch.arange(3)[None])
    torch.testing.assert_close(found, own.hidden(tokens))
    assert not found.requires_grad
    assert not hasattr(FrozenDenoiser(unmask.load_denoiser(build("modernbert"), mask_token_id=MASK)), "hidden_with")
    shifted = FrozenDenoiser(Denoiser(BackboneConfig(width=8, layers=1, heads=2, intermediate=8), 5, shift=True))
    for denoiser in (shifted, HalfTrunk(shifted)):
        assert not hasattr(denoiser, "hidden_with"), "the state before a token has seen too much"


def test_the_fingerprint_knows_names_shapes_and_every_weight():
    def of(size=(3, 700), name="weight", change=None, dtype=torch.float32):
        network, weight = nn.Module(), torch.arange(3 * 700, dtype=dtype).reshape(size)
        if change is not None:
            weight.view(-1)[change] += 1
        network.register_parameter(name, nn.Parameter(weight))
        return weights_fingerprint(network)

    assert of() == of()
    others = [
        of(size=(700, 3)),
        of(name="bias"),
        of(dtype=torch.bfloat16),
        *(of(change=at) for at in (0, 1, 1001, 2099)),
    ]
    assert len({of(), *others}) == 8


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A tiny random BERT and a file of pairs, in the current folder."""
    monkeypatch.chdir(tmp_path)
    build("bert").save_pretrained("my-model")
    tokenizer().save_pretrained("my-model")
    texts = ["a b c", "b d", "c", "e f g a", "g f"]
    pairs = [{"prompt": texts[i % 5], "response": texts[i * 3 % 5]} for i in range(24)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    return tmp_path


@pytest.fixture
def refused(call):
    """Runs a command that must fail as bad input does; what it says, below what it has read before."""

    def run_command(*arguments):
        code, _, err = call(*arguments)
        assert code == 2, err
        assert "Traceback" not in err
        last = err.splitlines()[-1]
        assert last.startswith("unmask: ")
        return last

    return run_command


def recipe(*overrides):
    return unmask.load_recipe("order-for-your-model", [*SMALL, *overrides])


def train(*overrides, out="run", **options):
    return unmask.train(recipe(*overrides), out, cpu=True, **options)


def test_the_recipe_from_a_folder_and_a_file_to_text(here, call, ok):
    """As its first lines say: the commands of a stranger with a masked language model and a JSONL file."""
    overrides = [word for value in SMALL for word in ("--set", value)]
    named = ["--set", "model.denoiser=my-model", "--set", "task.files=pairs.jsonl"]
    out = ok("train", "order-for-your-model", "--out", "run", "--cpu", *named, *overrides)
    assert "next: unmask evaluate run" in out
    assert "learned, T = 4" in ok("evaluate", "run", "--cpu")
    assert "learned order (J), T = 4" in ok("evaluate", "run", "--bound", "--cpu")
    out = ok("sample", "run", "--prompt", "a b", "--trace")
    assert "0  a b\n" in out
    assert "·" in out, "masks are shown as masks, though the tokenizer has a name for them"
    assert "[MASK]" not in out
    assert "--bf16: a denoiser of your own is in bfloat16" in call("evaluate", "run", "--bf16")[2]

    model = OrderModel.from_pretrained("run")
    canvas = torch.tensor([[3, 4, MASK, MASK, MASK]])
    written = unmask.generate(model.denoiser, canvas, unmask.policies.Learned(model.selector), 3)
    assert (written.tokens != MASK).all()
    records = unmask.evaluate(
        model, unmask.make_task(**recipe().task | {"tokenizer": "run/tokenizer.json"}), examples=2
    )
    assert records[0].spec.denoiser == model.denoiser.fingerprint
    assert records[0].spec.model == "my-model"


def test_a_chat_template_beside_the_denoiser_is_used(here, ok, monkeypatch):
    chat = tokenizer()
    chat.chat_template = "{% for m in messages %}g {{ m.content }} f{% endfor %}"
    chat.save_pretrained("my-model")
    train("task.chat=true")
    assert "g a b f" in ok("sample", "run", "--prompt", "a b", "--cpu")
    (here / "away").mkdir()
    monkeypatch.chdir("away")
    assert "g a b f" in ok("sample", "../run", "--prompt", "a b", "--cpu")
    shutil.move("../my-model", "moved")
    assert "g a b f" in ok("sample", "../run", "--prompt", "a b", "--cpu", "--denoiser", "moved")


def test_the_run_holds_the_order_alone(here):
    def look(stage, update):
        if update == 2:
            found.extend(path for path in here.glob("run/checkpoints/*/tensors.safetensors"))
            names.update(load_file(found[0]))

    found, names = [], set()
    before = weights(unmask.load_denoiser("my-model"))
    model = train("saving.every_updates=1", on_update=look)
    assert names
    assert not [name for name in names if "denoiser" in name], "nor is there optimiser state for it"
    stored = load_file("run/model.safetensors")
    assert {name.partition(".")[0] for name in stored} == {"selector"}
    assert not (here / "run" / "denoiser").exists()
    assert same(before, weights(model.denoiser.network)), "it stays as it is"
    fresh = train(out="fresh").selector
    assert same(weights(fresh), weights(OrderModel.from_pretrained("run").selector)), "bit for bit, from disk too"
    assert not same(weights(fresh), weights(train("seed=1", out="other").selector))


def test_it_resumes_to_the_same_bits_on_the_same_denoiser(here):
    def die(stage, update):
        if update == 2:
            raise KeyboardInterrupt

    whole = train(out="whole")
    for change_it in (True, False):
        with pytest.raises(KeyboardInterrupt):
            train("saving.every_updates=1", on_update=die)
        if change_it:
            shutil.copytree("my-model", "kept")
            change(here / "my-model", {"cls.predictions.bias": torch.ones(12)})
            with pytest.raises(RunFolderError, match="run was begun with another denoiser"):
                train("saving.every_updates=1")
            shutil.rmtree("my-model")
            shutil.move("kept", "my-model")
            shutil.rmtree("run")
    assert same(weights(train("saving.every_updates=1").selector), weights(whole.selector))
    (here / "run" / "checkpoints").mkdir()  # as a crash leaves them that came when the model was saved
    assert same(weights(train("saving.every_updates=1").selector), weights(whole.selector))


def test_the_denoiser_is_found_again_or_refused(here, refused, ok):
    train()
    shutil.move("my-model", "moved")
    said = refused("sample", "run", "--prompt", "a")
    assert f"the denoiser of run is not in {here / 'my-model'}: give its folder with denoiser= (--denoiser)" in said
    ok("sample", "run", "--prompt", "a", "--denoiser", "moved")
    ok("evaluate", "run", "--cpu", "--denoiser", "moved")
    change(here / "moved", {"cls.predictions.bias": torch.ones(12)})
    other = ["--denoiser", "moved"]
    for command in (["evaluate", "run"], ["evaluate", "run", "--bound"], ["sample", "run"]):
        said = refused(*command, *other)
        assert "the order in run was learned for another denoiser (" in said
        assert "than moved (" in said
    ok("sample", "run", "--prompt", "a", *other, "--any-denoiser")
    with pytest.raises(ModelFolderError, match=r"another denoiser \(.*\) than the one given \("):
        OrderModel.from_pretrained("run", denoiser=unmask.load_denoiser("moved"))


def test_a_run_of_texts_may_have_its_denoiser_elsewhere(here):
    train()
    written = TextRun("run", device="cpu").write([("a b", {})])
    shutil.move("my-model", "elsewhere")
    assert TextRun("run", device="cpu", denoiser="elsewhere").write([("a b", {})]) == written
    with pytest.raises(ModelFolderError, match=r"is not in .*my-model: give its folder with denoiser= \(--denoiser\)"):
        TextRun("run", device="cpu")


def test_a_smaller_vocabulary_is_refused_even_where_any_denoiser_will_do(here, refused):
    train()
    build("bert", vocab_size=7).save_pretrained("smaller")
    words = word_level_tokenizer(WORDS[:6])
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, mask_token="[MASK]").save_pretrained("smaller")
    said = refused("sample", "run", "--prompt", "a", "--denoiser", "smaller", "--any-denoiser")
    assert "smaller knows 7 tokens, and the order in run was learned with 11: give a denoiser with the same" in said


def test_the_card_says_that_the_denoiser_is_elsewhere_and_its_code_runs(here, monkeypatch):
    monkeypatch.setattr("unmask.models.hub.upload", lambda folder, *_: str(shutil.copytree(folder, "me/order")))
    train().push_to_hub("me/order")
    card = (here / "me" / "order" / "README.md").read_text()
    assert f"for the denoiser {OrderModel.from_pretrained('run').denoiser.fingerprint}, not in here" in card
    shown: dict = {}
    exec(card.split("```python\n")[1].split("```")[0].replace("FOLDER", "my-model").replace('"..."', '"a b"'), shown)
    assert shown["tokens"][0, :2].tolist() == [3, 4]


def test_what_is_shared_does_not_tell_where_the_denoiser_lay(here):
    train().save_pretrained("shared", here=False)
    assert str(here) not in (here / "shared" / "config.json").read_text()
    with pytest.raises(ModelFolderError, match="has its denoiser elsewhere"):
        OrderModel.from_pretrained("shared")
    assert OrderModel.from_pretrained("shared", denoiser="my-model").selector is not None


def test_fewer_held_out_pairs_than_usual_are_all_used(here, call):
    train("evaluate.examples=500")
    for more in ([], ["--bound"]):
        code, _, err = call("evaluate", "run", "--cpu", *more)
        assert code == 0, err
        assert "task text has 6 test examples: all are used" in err


def test_any_function_from_python(here):
    """The three lines in the docstring of `train`."""
    denoiser = unmask.load_denoiser(counting, mask_token_id=MASK)
    model = train("task.tokenizer=my-model/tokenizer.json", denoiser=denoiser)
    assert (model.config.selector.reads, model.config.denoiser.folder) == ("logits", "")
    with pytest.raises(ModelFolderError, match="has its denoiser elsewhere: give it with denoiser="):
        OrderModel.from_pretrained("run")
    again = OrderModel.from_pretrained("run", denoiser=denoiser)
    assert same(weights(again.selector), weights(model.selector))
    assert unmask.evaluate("run", policies="learned", denoiser=denoiser, cpu=True)[0].spec.learned
    assert model.config.selector.positions == 0
    even = unmask.load_denoiser(lambda tokens, attention_mask: torch.zeros(*tokens.shape, 4), mask_token_id=4)
    unprompted = train("task={name='groups',groups=2,group_size=2,symbols=4}", out="groups", denoiser=even)
    assert unprompted.config.selector.positions == 4, "on a canvas that is all mask, positions look alike"
    drawn = ("order.posterior=selector", "order.reward=true", "model.selector.drawn=true")
    with pytest.raises(UserError, match="does not say its vocab_size"):
        train("task={name='groups',groups=2,group_size=2,symbols=4}", *drawn, out="drawn", denoiser=even)
    with pytest.raises(UserError, match=r"set model\.denoiser to a name for it"):
        unmask.train(unmask.load_recipe("groups"), "x", denoiser=denoiser)


def test_a_checkpoint_of_llada(here):
    shutil.rmtree("my-model")
    tokenizer().save_pretrained("my-model")
    save_file(
        {n: t.bfloat16() for n, t in test_checkpoints.random_weights(test_checkpoints.LLADA).items()},
        "my-model/model.safetensors",
    )
    config = test_checkpoints.LLADA | {"mask_token_id": MASK}
    (here / "my-model" / "config.json").write_text(json.dumps(config))
    model = train()
    assert (model.config.selector.reads, model.config.denoiser.width) == ("hidden", test_checkpoints.D)
    assert {parameter.dtype for parameter in model.denoiser.parameters()} == {torch.float32}, "on a CPU"
    assert OrderModel.from_pretrained("run").denoiser.fingerprint == model.denoiser.fingerprint


def test_a_causal_model_that_was_trained_to_see_both_ways(here):
    shutil.rmtree("my-model")
    tokenizer().save_pretrained("my-model")
    config = test_checkpoints.LLAMA | {"model_type": "llama", "mask_token_id": MASK}
    save_file(test_checkpoints.random_weights(config), "my-model/model.safetensors")
    (here / "my-model" / "config.json").write_text(json.dumps(config))
    for shift in (True, False):
        model = train("model.bidirectional=true", f"model.shift={str(shift).lower()}", out=f"run-{shift}")
        again = OrderModel.from_pretrained(f"run-{shift}")
        assert model.denoiser.network.shift == again.denoiser.network.shift == shift


def test_a_causal_model_turned_into_a_denoiser(here, refused):
    shutil.rmtree("my-model")
    causal = test_adaptation.tiny()
    test_adaptation.save(causal, here / "llama")
    overrides = [word for value in (*SMALL, f"task.eos={test_adaptation.EOS}") for word in ("--set", value)]
    said = refused("train", "order-for-your-model", "--out", "run", "--set", "model.denoiser=llama", *overrides)
    assert "llama is a causal model (llama)" in said
    assert "model.bidirectional" in said
    assert "unmask.adapt_causal" in said
    unmask.adapt_causal(unmask.load_causal("llama")).save_pretrained("my-model")
    model = train(f"task.eos={test_adaptation.EOS}")
    assert model.denoiser.network.shift
    assert model.config.selector.reads == "hidden"
    with pytest.raises(UserError, match=r"init = 'run' has no denoiser of its own: set model\.denoiser"):
        unmask.train(unmask.load_recipe("groups-self", ["init=run"]), "x")
    assert same(weights(unmask.load_denoiser("run")), weights(model.denoiser.network))


def test_the_exact_posterior_teaches_the_binary_search(here, refused):
    """Of four names one is missing: the middle one of the three that are left tells on which side, then both others."""
    overrides = [
        "task.min_n=4", "task.max_n=4", "task.names=6", "order.budget=2", "order.updates=30", "order.batch=16",
        "order.warmup=5", "model.selector.width=32", "model.selector.layers=1",
    ]  # fmt: skip
    model = unmask.train(unmask.load_recipe("remove-random-exact", overrides), here / "run", cpu=True)
    assert model.config.selector.reads == "logits"
    (found,) = unmask.evaluate(here / "run", policies=["learned(deterministic)"], steps=[2], examples=200, cpu=True)
    assert found.outcome.score == 1
    task = unmask.make_task("waiting-lines", operations="remove-random", min_n=4, max_n=4, names=6)
    examples = task.examples(torch.arange(50), "test")
    canvas = torch.where(examples.response, model.denoiser.mask_token_id, examples.tokens)
    rule = unmask.policies.Learned(model.selector, deterministic=True)
    out = unmask.generate(model.denoiser, canvas, rule, max_steps=2, temperature=1.0)
    assert (out.reveal_step[:, -3:] == torch.tensor([1, 0, 1])).all()
    assert 0 < out.tokens[:, -2].eq(examples.tokens[:, 4]).sum() < 50, "either side may be the whole one"
    unknown = ["--set", "task={name='groups'}"]
    assert "posterior of task groups is not known" in refused("train", "remove-random-exact", "--out", "x", *unknown)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_bad_input_is_one_line(here, refused):
    def said(*overrides):
        words = [word for value in (*SMALL, *overrides) for word in ("--set", value)]
        return refused("train", "order-for-your-model", "--out", "run", "--cpu", *words)

    from_hub = (
        "model.denoiser = 'google/bert': no such folder; give that of a masked language model, or of a run; one of"
    )
    assert f"{from_hub} the hub comes here with `hf download" in said("model.denoiser=google/bert")
    assert "task text has sequences of 25 tokens, longer than the model's context of 24" in said("task.length=25")
    assert "model.denoiser = 'my-model' stays as it is: leave [denoise] out" in said("denoise={updates=1,batch=1}")
    assert "leave init out" in said("init=run")
    assert "leave model.max_length out" in said("model.max_length=9")
    assert "denoiser = 'my-model' already says size" in said("model.size=6m")
    assert "give causal, or leave shift out" in said("model.shift=true")
    assert "set order.posterior = 'selector'" in said("order={budget=4,updates=1,batch=2}")

    word_level_tokenizer(["x", *WORDS]).save("other.json")
    assert "it has another tokenizer than task text" in said("task.tokenizer=other.json", "task.eos=a")
    word_level_tokenizer([f"w{i}" for i in range(20)]).save("large.json")
    assert "it knows 12 tokens, and the tokenizer of task text has 21: set task.tokenizer to its own" in said(
        "task.tokenizer=large.json", "task.eos=w1"
    )

    (here / "pairs.jsonl").write_text('{"prompt": "a", "response": " "}\n')
    assert "pairs.jsonl, line 1: the response 'response' is empty" in said()
    (here / "pairs.jsonl").write_text('{"prompt": "a [MASK]", "response": "b"}\n' * 9)
    assert "take the mask token, which stands for what is to be written, out of the text 'a [MASK] b" in said()

    tokenizer(mask=None).save_pretrained("my-model")
    assert (
        "the tokenizer has no mask token: give mask_token_id= (in a folder: in config.json), or add one with" in said()
    )
    (here / "my-model" / "tokenizer.json").unlink()
    assert "has no tokenizer.json: write it with AutoTokenizer.from_pretrained('my-model')" in said()


def test_bad_prompts_and_a_model_without_hidden_states(here, refused):
    train()
    assert "the prompt has 7 tokens, and task text has room for 6" in refused(
        "sample", "run", "--prompt", "a b c d e f g"
    )
    assert "take the mask token" in refused("sample", "run", "--prompt", "a [MASK]")
    build("electra").save_pretrained("my-model")  # its head is not known apart
    with pytest.raises(UserError, match=r"it gives no hidden states: set model\.selector\.reads = 'logits'"):
        train("model.selector.reads=hidden", out="x")
    assert train(out="x").config.selector.reads == "logits"


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted(request):
    """A denoiser in float64 whose adapters are not 0, and the logits of a padded batch before there were any."""
    pytest.importorskip("peft", reason="pip install 'unmask[lora]'")
    torch.manual_seed(0)
    denoiser = FrozenDenoiser(unmask.load_denoiser(build("bert").double(), mask_token_id=MASK))
    tokens, mask = SEQUENCES[0][None], torch.tensor([[1, 1, 1, 1, 0]]).bool()
    before = denoiser.logits(denoiser.hidden(tokens, mask)[0])
    denoiser.adapt(2)
    assert torch.equal(denoiser.logits(denoiser.hidden(tokens, mask)[0]), before), "at first it is what it was"
    for parameter in denoiser.adapters.values():
        torch.nn.init.normal_(parameter, std=0.3)
    return denoiser, lambda: denoiser.logits(denoiser.hidden(tokens, mask)[0]), before


def test_merged_adapters_give_the_same_logits(adapted):
    from peft.tuners.tuners_utils import BaseTunerLayer

    denoiser, logits, before = adapted
    found, fingerprint = logits(), denoiser.fingerprint
    layers = [part for part in denoiser.modules() if isinstance(part, BaseTunerLayer)]
    assert len(layers) == 2 * 6 + 1, "all linear layers but that of the vocabulary"
    for layer in layers:
        layer.merge()
    torch.testing.assert_close(logits(), found, rtol=0, atol=1e-10)
    assert (found - before)[:, :MASK].abs().max() > 0.1
    assert denoiser.fingerprint == fingerprint, "which is that of the denoiser without them"


def test_only_adapters_have_gradients_and_they_are_exact(adapted):
    """Of S g_t, against a difference quotient, with all else held."""
    denoiser = adapted[0]
    objective = SelfObjective(model_of(denoiser), K, BUDGET, seed=0, learn_denoiser=True)
    denoiser.requires_grad_(True)
    examples = batch([0, 1], extra=2)
    orders = objective.orders(examples, IDS, torch.full((2,), BUDGET), PRICE)
    objective._one_step(examples, IDS, orders).sum().backward()
    adapters = list(denoiser.adapters.values())
    assert all(parameter.grad is not None for parameter in adapters)
    ours = {id(parameter) for parameter in adapters}
    assert all(p.grad is None and not p.requires_grad for p in denoiser.parameters() if id(p) not in ours)
    for parameter in adapters[::5]:
        with torch.no_grad():
            at, step, ends = int(parameter.grad.abs().argmax()), 1e-6, []
            for sign in (1, -2):
                parameter.view(-1)[at] += sign * step
                ends.append(float(objective._one_step(examples, IDS, orders).sum()))
            parameter.view(-1)[at] += step
        quotient, gradient = (ends[0] - ends[1]) / (2 * step), float(parameter.grad.view(-1)[at])
        assert abs(gradient) > 1e-3
        assert abs(quotient - gradient) < 1e-5 * max(1, abs(gradient))


JOINT = ["model.lora=2", "order.denoiser_rate=0.05", "saving.every_updates=1"]


def test_adapters_learn_along_and_are_kept_with_the_order(here, ok):
    pytest.importorskip("peft", reason="pip install 'unmask[lora]'")

    def die_in(stage, at):
        def on_update(now, update):
            if (now.label, update) == (stage, at):
                raise KeyboardInterrupt

        return on_update

    before = weights(unmask.load_denoiser("my-model"))
    model = train(*JOINT)
    learned = weights(model.denoiser.adapters)
    assert any(value.any() for name, value in learned.items() if "lora_B" in name)
    assert same(before, weights(unmask.load_denoiser("my-model")))
    assert {name.partition(".")[0] for name in load_file("run/model.safetensors")} == {"selector", "adapters"}
    again, plain = OrderModel.from_pretrained("run"), OrderModel.from_pretrained("run/baseline")
    assert same(weights(again.denoiser.adapters), learned)
    assert plain.selector is None
    assert not same(weights(plain.denoiser.adapters), learned), "the rivals run on a denoiser that learned as long"
    tokens = SEQUENCES[1][None]
    hidden = [part.denoiser.hidden(tokens) for part in (model, again, plain)]
    assert torch.equal(hidden[0], hidden[1])
    assert not torch.allclose(hidden[0], hidden[2])
    for stage in ("order", "baseline"):
        with pytest.raises(KeyboardInterrupt):
            train(*JOINT, out=stage, on_update=die_in(stage, 2))
        assert same(weights(train(*JOINT, out=stage).denoiser.adapters), learned)
        assert same(weights(OrderModel.from_pretrained(f"{stage}/baseline").denoiser), weights(plain.denoiser))
    records = unmask.evaluate("run", policies=["learned", "iid"], cpu=True)
    assert len({record.spec.denoiser for record in records}) == 2
    given = unmask.load_denoiser("my-model")
    other = train(*JOINT, "order.selector_rate=0.2", out="given", denoiser=given)
    assert not same(weights(other.denoiser.adapters), learned), "other orders visit other states"
    assert same(before, weights(given)), "a copy gets the adapters"
    alike = OrderModel.from_pretrained("given/baseline", denoiser=given).denoiser.adapters
    assert same(weights(alike), weights(plain.denoiser.adapters)), "the baseline knows nothing of the order"
    assert unmask.evaluate("given", policies=["learned"], denoiser=given, cpu=True)[0].spec.learned


def test_bad_input_about_adapters(here, refused, monkeypatch):
    def said(*overrides):
        words = [word for value in (*SMALL, *overrides) for word in ("--set", value)]
        return refused("train", "order-for-your-model", "--out", "run", "--cpu", *words)

    assert "learns along through adapters only: set model.lora" in said("order.denoiser_rate=0.1")
    assert "learns along through adapters only: set model.lora" in said("model.lora=4")
    assert "lora must be between 0 and 1,024" in said("model.lora=-1")
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "made by peft: pip install 'unmask[lora]'" in said(*JOINT)
