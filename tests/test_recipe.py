"""Recipes: everything wrong is found before anything is built, and said in one line."""

import dataclasses
import json

import pytest

from tests.training.small import TINY_RECIPE
from unmask.errors import UserError
from unmask.fields import build
from unmask.recipe import Recipe, continued, load_recipe, recipe_folder
from unmask.tasks import make_task

BUILT_IN = sorted(path.stem for path in recipe_folder().glob("*.toml"))
PAIRS = ["gsm8k-30m", "molecules", "statements", "sudoku", "waiting-lines"]
IN_PAIRS = {name for denoiser in PAIRS for name in (denoiser, f"{denoiser}-self")}
PUZZLES = [name for name in BUILT_IN if not name.startswith(("gsm8k", "order")) and name not in IN_PAIRS]


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY_RECIPE)
    return path


def refused(path, *overrides) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def written(tmp_path, text):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def without_section(text, section):
    """The recipe without [section] and its subsections."""
    kept, skipping = [], False
    for line in text.splitlines():
        if line.startswith("["):
            skipping = line.strip("[]").split(".")[0] == section
        if not skipping:
            kept.append(line)
    return "\n".join(kept)


# --- the recipes that come with unmask --------------------------------------------------------------------------------


def test_built_in_recipes_are_whole():
    for name in PUZZLES:
        recipe = load_recipe(name)
        options = {key: value for key, value in recipe.task.items() if key != "name"}
        task = make_task(recipe.task["name"], **options)
        called = name.removesuffix("-self").removesuffix("-blocks").removesuffix("-4x4").removesuffix("-small")
        assert recipe.task["name"] == ("waiting-lines" if called == "remove-random-exact" else called)
        assert (recipe.denoise is None) == (recipe.model.denoiser == "exact")
        assert recipe.order is not None
        assert 2 <= recipe.order.budget <= (32 if recipe.order.prices else 8), "the natural budgets"
        assert recipe.order.budget in recipe.evaluate.budgets, "or the learned order has no rival at its own budget"
        assert max(recipe.evaluate.budgets) <= task.length
        assert recipe.evaluate.temperature == 1
        assert build(Recipe, json.loads(recipe.to_json())) == recipe


@pytest.mark.parametrize("name", PAIRS)
def test_an_order_of_its_own_fits_its_denoiser(name):
    denoiser, order = load_recipe(name), load_recipe(f"{name}-self", ["init=runs/denoiser"])
    assert denoiser.order is None
    assert order.denoise is None
    assert (order.task, order.evaluate.temperature) == (denoiser.task, denoiser.evaluate.temperature)
    assert order.order.posterior == "selector"


def test_the_recipes_of_gsm8k_are_the_papers():
    paper, causal = load_recipe("gsm8k-170m-paper"), load_recipe("gsm8k-135m")
    assert (paper.denoise.updates, paper.denoise.batch) == (45_000, 256)
    assert (paper.order.updates, paper.order.batch, paper.order.trajectories) == (15_000, 32, 8)
    assert (continued(paper).updates, continued(paper).batch) == (15_000, 256)
    assert paper.task["prompt_length"] + paper.task["response_length"] == 256
    assert (paper.model.size, paper.order.selection, paper.order.kl_weight) == ("170m", "bernoulli", 1.0)
    assert causal.model.causal == causal.task["tokenizer"] == "smollm2-135m"
    for recipe in (paper, causal):
        assert (recipe.precision, recipe.compile) == ("bf16", True)
        assert build(Recipe, json.loads(recipe.to_json())) == recipe
        assert recipe.evaluate.temperature == 0


def test_where_a_model_starts_is_said_once():
    for given, said in [
        (["model.causal=there"], "model: causal = 'there' already says width, layers, heads, intermediate"),
        (["model.shift=true"], "model: shift = true is for a causal language model"),
        (["init=runs/x", "model={causal='there'}"], "both say where to start"),
    ]:
        with pytest.raises(UserError, match=said):
            load_recipe("groups", given)


def test_any_rule_may_stand_in_a_recipe(tiny):
    """Those that need a network too: whether there is one is seen when the run is evaluated."""
    rules = ("threshold:0.9", "p2", "lo-arm", "reward:0.5", "learned(temperature=0.5)", "blocks(4,margin)")
    recipe = load_recipe(tiny, [f"evaluate.policies={list(rules)}"])
    assert recipe.evaluate.policies == rules
    assert build(Recipe, json.loads(recipe.to_json())) == recipe


def test_a_rule_with_wrong_parameters(tiny):
    message = refused(tiny, "evaluate.policies=['iid', 'margin:1']")
    assert message.startswith("evaluate: ")
    assert "margin(count=even) has no place for '1'" in message


# --- what a good recipe becomes ---------------------------------------------------------------------------------------


def test_the_task_is_checked_with_the_rest(tiny):
    """Before anything is built: `recipe show` and `reproduce --dry-run` tell too."""
    for override, expected in [
        ("task.grups=3", "task: unknown key 'grups'; did you mean 'groups'"),
        ("task.name=gruops", "unknown task 'gruops'; did you mean 'groups'"),
        ("task.groups=two", "task.groups must be a whole number, got 'two'"),
    ]:
        with pytest.raises(UserError, match=expected):
            load_recipe(tiny, [override])


def test_another_task_drops_the_options_that_it_does_not_have(tiny, capsys):
    recipe = load_recipe(tiny, ["task.name=chain", "task.length=9"])
    assert recipe.task == {"name": "chain", "seed": 0, "length": 9, "symbols": 3, "branching": 2}
    assert capsys.readouterr().err == "unmask: task chain has no groups, group_size: left out of the recipe\n"
    assert "task: unknown key 'groups'" in refused(tiny, "task.name=chain", "task.groups=2"), "asked for"


def test_values_arrive(tiny):
    recipe = load_recipe(tiny)
    assert recipe.task == {"name": "groups", "groups": 2, "group_size": 2, "symbols": 3, "seed": 0}, "defaults too"
    assert (recipe.model.width, recipe.model.selector.width, recipe.model.scorer.layers) == (16, 8, 1)
    assert (recipe.denoise.updates, recipe.denoise.batch, recipe.order.budget) == (3, 8, 2)
    assert recipe.evaluate.budgets == (2, 4)
    assert (recipe.order.selection, recipe.order.baseline) == ("nonempty", "leave-one-out")
    assert type(load_recipe(tiny, ["order.clip=2"]).order.clip) is float, "a whole number is a number"


def test_one_objective_is_enough(tmp_path):
    for section in ["denoise", "order"]:
        other = "order" if section == "denoise" else "denoise"
        path = written(tmp_path, without_section(TINY_RECIPE, other))
        recipe = load_recipe(path, [] if section == "denoise" else ["init=runs/earlier"])
        assert getattr(recipe, other) is None
        assert getattr(recipe, section) is not None


def test_json_round_trip_keeps_everything(tiny):
    overrides = ["seed=7", "init=runs/a", "order.selection=bernoulli", "denoise.ema=0.9", "evaluate.budgets=[1, 3]"]
    recipe = load_recipe(tiny, [*overrides, "precision=bf16", "order.tau=0.05"])
    again = build(Recipe, json.loads(recipe.to_json()))
    assert again == recipe
    assert again.evaluate.budgets == (1, 3)
    assert again != load_recipe(tiny)


# --- wrong keys and values: one of each kind --------------------------------------------------------------------------

WRONG = [
    # unknown keys and choices name the nearest
    ("sede=1", "unknown key 'sede'; did you mean 'seed'?"),
    ("ordre.budget=2", "unknown key 'ordre'; did you mean 'order'?"),
    ("model.selector.layer=2", "model.selector: unknown key 'layer'; did you mean 'layers'?"),
    ("order.zzz=1", "order: unknown key 'zzz'; known keys are updates, batch"),
    ("order.baseline=leave-one-uot", "got 'leave-one-uot'; did you mean 'leave-one-out'?"),
    ("evaluate.policies=['iid', 'top-porb']", "unknown policy 'top-porb'; did you mean 'top-prob'?"),
    # types
    ("order.budget=two", "order.budget must be a whole number, got 'two'"),
    ("order.budget=2.0", "order.budget must be a whole number, got 2.0"),
    ("order.budget=true", "order.budget must be a whole number, got True"),
    ("order.tau='0.1'", "order.tau must be a number, got '0.1'"),
    ("order.from_init=1", "order.from_init must be true or false, got 1"),
    ("model.size=3", "model.size must be a string, got 3"),
    ("seed=1979-05-27", "seed must be a whole number"),
    ("evaluate.budgets=2", "evaluate.budgets must be a list, got 2"),
    ("evaluate.budgets=[2, true]", "evaluate.budgets must be a whole number, got True"),
    ("order=3", "order must be a table, got 3"),
    ("task=groups", "task must be a table, got 'groups'"),
    ("order.budget={a = 1}", "order.budget must be a whole number, got a table"),
    ("order.tau=nan", "order.tau must be finite"),
    ("seed=99999999999999999999", "seed must fit in 64 bits"),
    # ranges
    ("order.budget=1", "order: budget (T) must be at least 2, got 1: in one step everything is revealed"),
    ("order.tau=0", "order: tau must be above 0, got 0"),
    ("order.trajectories=1", "trajectories (k) must be at least 2 with leave-one-out, got 1"),
    ("denoise.updates=0", "denoise: updates must be at least 1, got 0"),
    ("order.batch=0", "batch must be between 1 and 1,000,000, got 0"),
    ("order.clip=0", "clip must be above 0, got 0"),
    ("order.ema=1", "ema must be at least 0 and below 1, got 1"),
    ("order.restored_rate=0", "restored_rate must be above 0 and at most 1, got 0"),
    ("denoise.learning_rate=0", "learning_rate must be above 0"),
    ("order.denoiser_rate=-1e-3", "denoiser_rate must be between 0 and 1"),
    ("model.scorer.width=-8", "model.scorer: width must be at least 0, got -8"),
    ("saving.keep=0", "saving: keep must be at least 1, got 0"),
    ("evaluate.budgets=[2, 0]", "budgets must be between 1 and 65,536, got [2, 0]"),
]


def test_what_is_wrong_is_named(tiny):
    for override, expected in WRONG:
        assert expected in refused(tiny, override)


def test_contradictions(tiny):
    assert "batch = 4 must be a multiple of accumulate = 3" in refused(tiny, "order.accumulate=3")
    assert "no order would be learned" in refused(tiny, "order.selector_rate=0", "order.scorer_rate=0")
    assert "size = '6m' already says width, layers, heads, intermediate" in refused(tiny, "model.size=6m")
    assert "width missing" in refused(tiny, "model.width=0")
    message = refused(tiny, "order.trajectories=0", "order.baseline=none")
    assert "trajectories must be between 1 and 10,000" in message


def test_one_trajectory_is_enough_without_leave_one_out(tiny):
    assert load_recipe(tiny, ["order.trajectories=1", "order.baseline=none"]).order.trajectories == 1
    assert load_recipe(tiny, ["order.trajectories=1", "order.baseline=moving-average"]).order.trajectories == 1


def test_missing_sections(tmp_path):
    for section, expected in [
        ("task", "'task' is missing"),
        ("model", "[model] has no shape"),
    ]:
        assert expected in refused(written(tmp_path, without_section(TINY_RECIPE, section)))
    text = without_section(without_section(TINY_RECIPE, "denoise"), "order")
    assert "nothing to train" in refused(written(tmp_path, text))


def test_missing_values(tmp_path):
    for line, said in [
        ("updates = 3\nbatch = 8\n", "denoise: 'updates' is missing"),
        ("budget = 2\n", "budget (T)"),
        ('name = "groups"', "[task] needs a name"),
    ]:
        assert said in refused(written(tmp_path, TINY_RECIPE.replace(line, "")))


# --- overrides --------------------------------------------------------------------------------------------------------


def test_overrides(tiny):
    for override, path, value in [
        ("seed=3", "seed", 3),
        ("order.tau=5e-2", "order.tau", 0.05),
        ("init=runs/earlier", "init", "runs/earlier"),
        ("init=a=b", "init", "a=b"),
        ("order.selection='bernoulli'", "order.selection", "bernoulli"),
        ("evaluate.budgets=[1, 2, 3]", "evaluate.budgets", (1, 2, 3)),
        ("compile=true", "compile", True),
        ("task.symbols=4", "task.symbols", 4),
    ]:
        found = load_recipe(tiny, [override])
        for name in path.split("."):
            found = found[name] if isinstance(found, dict) else getattr(found, name)
        assert found == value


def test_the_last_override_stands_and_nothing_else_changes(tiny):
    recipe, changed = load_recipe(tiny), load_recipe(tiny, ["order.tau=0.3", "order.tau=0.2"])
    assert changed == dataclasses.replace(recipe, order=dataclasses.replace(recipe.order, tau=0.2))


def test_an_override_may_start_a_section(tmp_path):
    path = written(tmp_path, without_section(TINY_RECIPE, "order"))
    recipe = load_recipe(path, ["order.updates=5", "order.batch=2", "order.budget=3"])
    assert (recipe.order.updates, recipe.order.budget) == (5, 3)


def test_malformed_overrides(tiny):
    for override in ["seed", " = 3"]:
        message = refused(tiny, override)
        assert repr(override) in message
        assert "key=value" in message


def test_an_override_through_a_value(tiny):
    assert "order.budget.steps=3" in refused(tiny, "order.budget.steps=3")
    assert "budget is a value, not a table" in refused(tiny, "order.budget.steps=3")
    assert "unknown key ''" in refused(tiny, "order..budget=3")


# --- files ------------------------------------------------------------------------------------------------------------


def test_an_unknown_recipe_names_the_nearest():
    message = refused("gruops")
    assert "no recipe 'gruops'; did you mean 'groups'?" in message
    assert all(name in message for name in BUILT_IN)


def test_no_such_file():
    for name in ["", "two\nlines"]:
        assert "no recipe" in refused(name)


def test_not_toml(tmp_path):
    for text in [b"[task\nname =", b"seed = \xff\xfe"]:
        path = tmp_path / "broken.toml"
        path.write_bytes(text)
        message = refused(path)
        assert "broken.toml is not valid TOML" in message


def test_the_recipe_of_a_run_is_a_recipe(tmp_path, monkeypatch):
    recipe = load_recipe("groups-self")
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(recipe, denoise=None, init="runs/denoiser"))))
    again = load_recipe(path, ["denoise.updates=3", "denoise.batch=4", "init="])
    assert again.order == recipe.order
    assert again.denoise is not None
    assert again.denoise.updates == 3
    assert load_recipe(tmp_path) == load_recipe(path)
    (tmp_path / "groups").mkdir()
    (tmp_path / "groups" / "recipe.json").write_text(path.read_text())
    monkeypatch.chdir(tmp_path)
    assert load_recipe("groups") != load_recipe("groups/recipe.json"), "a run does not hide a recipe"
    foreign = {**json.loads(path.read_text()), "task": {"name": "nowhere:Task"}}
    path.write_text(json.dumps(foreign))
    assert "names code of its own, nowhere:Task" in refused(path)
    for text, message in (("[]", "no recipe: give a TOML file"), ("[", "no JSON"), ('{"seed": 3}', "task")):
        path.write_text(text)
        assert message in refused(path)


def test_json_that_is_no_recipe():
    for text in ("[]", "3", "{}", '{"task": {}}', '{"task": {"name": "groups"}, "epochs": 3}'):
        with pytest.raises(UserError):
            build(Recipe, json.loads(text))


def test_a_recipe_written_out_is_the_same_recipe(tmp_path):
    for name in BUILT_IN:
        recipe = load_recipe(name)  # also of an order alone, without the earlier run that it needs
        path = tmp_path / "written.toml"
        path.write_text(recipe.to_toml())
        assert load_recipe(path) == recipe
        assert "every_updates = 0" in recipe.to_toml(), "what the file leaves out is there too"
