"""Whatever is thrown at the command line: exit code 0 or 2, one line, never a traceback, and no file changed on 2.

Hundreds of mutated recipes, policy strings, data lines and checkpoint folders, the same ones in every run.
"""

import dataclasses
import functools
import json
import re
import shutil
import tomllib

import pytest
import typer
import typer.main
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.commands import exit_code
from tests.training.small import TINY_RECIPE, contents
from unmask import files
from unmask.recipe import load_recipe
from unmask.tasks import make_task, task_class
from unmask.training.loop import Stage
from unmask.training.run import train

BASE = tomllib.loads(TINY_RECIPE)
KEYS = [
    *(f"{table}.{key}" for table, values in BASE.items() if isinstance(values, dict) for key in values),
    *(key for key, value in BASE.items() if not isinstance(value, dict)),
    *(f"saving.{key}" for key in ("every_seconds", "every_updates", "keep")),
    *(f"order.{key}" for key in ("tau", "selection", "baseline", "denoiser_rate", "ema", "accumulate", "kl_weight")),
    *("init", "precision", "compile", "trackers", "denoise.clip", "model.size", "denoise.max_bad"),
]


def thrown(examples):
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module", autouse=True)
def one_command():
    """typer reads the signatures of all commands anew for each call, which would be most of the time of these tests."""
    patch = pytest.MonkeyPatch()
    patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A recipe, a finished run that is evaluated, and one that was interrupted after a few checkpoints."""
    folder = tmp_path_factory.mktemp("thrown")
    (folder / "tiny.toml").write_text(TINY_RECIPE)
    train(load_recipe(folder / "tiny.toml"), folder / "run", cpu=True)
    assert exit_code("evaluate", folder / "run", "--cpu") == 0

    def interrupt(stage, update):
        if (stage, update) == (Stage.ORDER, 2):
            raise KeyboardInterrupt

    often = load_recipe(folder / "tiny.toml", ["saving.every_updates=1"])
    with pytest.raises(KeyboardInterrupt):
        train(often, folder / "interrupted", cpu=True, on_update=interrupt)
    return folder


def assert_refused_or_done(code, folder, before, err):
    assert code in (0, 2)
    if code == 2:
        assert contents(folder) == before
        assert err.startswith("unmask: ")
        assert "Traceback" not in err


scalars = st.one_of(
    st.integers(-3, 5),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.sampled_from(["groups", "nonempty", "leave-one-out", "34m", "../..", "bf16", ""]),
)
values = st.one_of(scalars, st.lists(scalars, max_size=3), st.dictionaries(st.text(max_size=5), scalars, max_size=2))


@st.composite
def recipes(draw):
    """The text of the tiny recipe with a few characters changed or not, and a few overrides."""
    keys = st.one_of(st.sampled_from(KEYS), st.text(max_size=9))
    text, overrides = TINY_RECIPE, draw(st.lists(st.tuples(keys, values), min_size=1, max_size=3))
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.text(max_size=3)) + text[at + draw(st.integers(0, 3)) :]
    return text, [f"--set={key}={json.dumps(value)}" for key, value in overrides]


@pytest.mark.filterwarnings("ignore")
def test_recipes(place, tmp_path, call):
    outcomes = set()

    @thrown(150)
    @given(recipes())
    def check(given):
        text, overrides = given
        path = tmp_path / "recipe.toml"
        path.write_bytes(text.encode(errors="surrogatepass"))
        before = contents(tmp_path)
        code, out, err = call("recipe", "show", path, *overrides)
        assert_refused_or_done(code, tmp_path, before, err)
        assert contents(tmp_path) == before
        outcomes.add(code)
        if code == 0:  # what is printed is the same recipe
            shown = tmp_path / "shown.toml"
            shown.write_text(out)
            again = load_recipe(path, [override.removeprefix("--set=") for override in overrides])
            assert load_recipe(shown).to_json() == again.to_json()
            shown.unlink()

    check()
    assert outcomes == {0, 2}, "the test has power on both sides"


names = ["iid", "top-prob", "margin", "learned", "threshold", "klass", "eb", "blocks", "stochastic", "p2", "rdm", "dus"]
policies = st.one_of(
    st.sampled_from(names),
    st.text(max_size=12),
    st.builds("{}:{}".format, st.sampled_from(names), scalars),
    st.builds("{}({},{})".format, st.sampled_from(names), scalars, scalars),
    st.builds("{}({},{}({}))".format, st.sampled_from(names), scalars, st.sampled_from(names), scalars),
)


def test_policy_strings(place, call):
    run, outcomes = place / "run", set()
    before = contents(run)

    @thrown(60)
    @given(policies, st.integers(-1, 6))
    def check(policy, steps):
        code, _, err = call("evaluate", run, "--cpu", "--examples", 1, f"--policy={policy}", f"--steps={steps}")
        assert_refused_or_done(code, run, before, err)
        outcomes.add(code)
        for name in contents(run).keys() | before.keys():
            (run / name).write_bytes(before[name])

    check()
    assert outcomes == {0, 2}


@st.composite
def damages(draw, text):
    """A text with one line or a few characters of it changed."""
    lines = text.split("\n")
    at = draw(st.integers(0, len(lines) - 1))
    how = draw(st.integers(0, 4))
    if how == 0:
        lines[at] = draw(st.text(max_size=20))
    elif how == 1:
        del lines[at]
    elif how == 2:
        lines.insert(at, draw(st.one_of(values, st.none()).map(json.dumps)))
    elif how == 3 and lines[at].startswith("{"):
        row = json.loads(lines[at])
        row[draw(st.sampled_from([*row, "new"]))] = draw(st.one_of(values, st.none()))
        lines[at] = json.dumps(row)
    else:
        cut = draw(st.integers(0, len(lines[at])))
        lines[at] = lines[at][:cut] + draw(st.text(max_size=2)) + lines[at][cut + 1 :]
    return "\n".join(lines)


@pytest.mark.parametrize("name", ["results.jsonl", "verdicts.jsonl", "recipe.json", "config.json"])
def test_data_lines(place, call, name):
    """The files of a run, as an editor or a bad disk may leave them."""
    run = place / "run"
    before = contents(run)

    @thrown(12)
    @given(damages(before[name].decode()))
    def check(text):
        (run / name).write_bytes(text.encode(errors="surrogatepass"))
        damaged = contents(run)
        code, _, err = call("evaluate", run, "--cpu")
        assert_refused_or_done(code, run, damaged, err)
        for path in contents(run):
            (run / path).write_bytes(before[path])

    check()


def test_checkpoint_folders(place, tmp_path, ok):
    """Files of a checkpoint cut, changed, taken away or added: the run goes on from another, to the same end."""
    whole = contents(place / "interrupted")
    files = sorted(name for name in whole if name.startswith("checkpoints/"))
    end = contents(place / "run")["model.safetensors"]

    @thrown(10)
    @given(st.sampled_from(files), st.integers(0, 3), st.integers(0, 10**6), st.binary(max_size=8))
    def check(name, how, at, data):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(place / "interrupted", run)
        path = run / name
        content = whole[name]
        at = at % (len(content) + 1)
        if how == 0:
            path.unlink()
        elif how == 1:
            path.write_bytes(content[:at])
        elif how == 2:
            path.write_bytes(content[:at] + data + content[at + len(data) :])
        else:
            (path.parent / "more.bin").write_bytes(data)
            path.rename(path.with_name("odd"))
        ok("train", place / "tiny.toml", "--out", run, "--cpu")
        assert contents(run)["model.safetensors"] == end

    check()


# --- one bad thing each -----------------------------------------------------------------------------------------------

BIG = 10**20 - 1
TRAINED = {
    "task.name=../x:Y": "task '../x:Y': write a task of your own as module:Class",
    "threads=100000": "threads must be between 0 and 1,024",
    f"denoise.weight_decay={BIG}": "denoise.weight_decay must fit in 64 bits",
    f"task.seed={BIG}": "task.seed must fit in 64 bits",
    "task.groups=1000000": "set groups between 1 and 256",
    "order.trajectories=1000000000": "trajectories must be between 1 and 10,000",
    "order.budget=100000000": "budget must be between 2 and 65,536",
    "model.width=1000000000": "model: width must be between 1 and 65,536",
    "model.selector.layers=1000000000": "layers must be between 1 and 1,000",
    f"seed={'[' * 1000}": "override of seed: the value is nested too deeply",
}


def test_a_bad_override_is_one_line(place, tmp_path, refused):
    for override, said in TRAINED.items():
        assert said in refused("train", place / "tiny.toml", "--out", tmp_path / "run", "--cpu", "--set", override)


def test_every_number_of_a_task_has_an_upper_bound():
    for task in ["gsm8k", "text"]:
        numbers = [field.name for field in dataclasses.fields(task_class(task)) if type(field.default) is int]
        for option in set(numbers) - {"seed"}:
            with pytest.raises(ValueError, match=f"set {option} between"):
                make_task(task, **{option: 10**10})


def test_a_bad_number_on_the_command_line_is_one_line(place, refused):
    for arguments, said in [
        (["sample", "--steps", 10**8], "'--steps'"),
        (["sample", "--num", BIG, "--find", "right"], "'--num'"),
        (["sample", "--example", BIG], "'--example'"),
        (["evaluate", "--policy", "iid", "--steps", 10**8], "--steps must be between 1 and 65,536"),
        (["evaluate", "--examples", BIG], "'--examples'"),
        (["evaluate", "--bound", "--samples", BIG], "'--samples'"),
    ]:
        command, *options = arguments
        assert said in refused(command, place / "run", *options)


def test_a_model_that_does_not_fit_is_refused_before_it_is_built(place, tmp_path, refused, monkeypatch):
    monkeypatch.setattr("unmask.runtime.available_memory", lambda device: 3_000_000)
    monkeypatch.setattr("unmask.training.build.OrderModel", None)
    large = ["--set", "model.width=128", "--set", "model.intermediate=512"]
    message = refused("train", place / "tiny.toml", "--out", tmp_path / "run", "--cpu", *large)
    # 4 D^2 + 3 D I, embeddings of 3 tokens, the mask and 4 positions, a head of 3: 263,552 weights, 16 bytes each.
    assert "263,552 weights takes at least 4.2 MB of memory, of which 3.0 MB are available" in message


DEEP = "[" * 5_000
SPOILED = [
    ("results.jsonl", lambda text: DEEP + "\n" + text, "line 1: not a JSON object"),
    (
        "results.jsonl",
        lambda text: text.replace('"budget": ', f'"budget": {"9" * 400}', 1),
        "budget must fit in 64 bits",
    ),
    ("config.json", lambda text: DEEP, "is not the config of an unmask model"),
    (
        "config.json",
        lambda text: text.replace('"tied_head": false', '"tied_head": "no"'),
        "tied_head must be true or false",
    ),
    ("config.json", lambda text: text.replace('"qk_norm": false', '"qk_norm": 0.5', 1), "denoiser.qk_norm must"),
    ("config.json", lambda text: text.replace('"layers": 1', '"layers": 1000000000', 1), "layers must be between"),
]


def test_a_spoiled_file_is_one_line(place, refused):
    """The checksums agree, as in a file that another version wrote."""
    for name, spoil, said in SPOILED:
        path = place / "run" / name
        whole = path.read_text()
        spoiled = spoil(re.sub(r', "crc": "\w+"\}', "}", whole))
        assert spoiled != whole
        files.write_listed(path.parent, name, spoiled)
        try:
            assert said in refused("evaluate", place / "run", "--cpu")
        finally:
            files.write_listed(path.parent, name, whole)


def test_a_deeply_nested_file_is_one_line(tmp_path, refused):
    for command in [["recipe", "show"], ["reproduce", "--out", "x"]]:
        (tmp_path / "deep.toml").write_text(f"a = {DEEP}")
        assert "deep.toml is not valid TOML" in refused(*command, tmp_path / "deep.toml")
