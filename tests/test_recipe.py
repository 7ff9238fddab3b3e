"""Recipes: everything wrong is found before anything is built, and said in one line."""

import dataclasses
import json

import pytest

from tests.training.small import TINY_RECIPE
from unmask.recipe import EvaluateRecipe, Recipe, RecipeError, continued, load_recipe, recipe_folder
from unmask.tasks import make_task

BUILT_IN = sorted(path.stem for path in recipe_folder().glob("*.toml"))
PUZZLES = [name for name in BUILT_IN if not name.startswith("gsm8k")]


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY_RECIPE)
    return path


def refused(path, *overrides) -> str:
    """The message of the error, which is one line."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


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


def test_there_is_a_recipe_for_every_puzzle():
    assert PUZZLES == ["addition", "chain", "groups", "latin-square", "parity-dag", "permutation"]


@pytest.mark.parametrize("name", PUZZLES)
def test_built_in_recipes_are_whole(name):
    recipe = load_recipe(name)
    options = {key: value for key, value in recipe.task.items() if key != "name"}
    task = make_task(recipe.task["name"], **options)
    assert recipe.task["name"] == name
    assert recipe.model is not None
    assert recipe.denoise is not None
    assert recipe.order is not None
    assert 2 <= recipe.order.budget <= 8, "the natural budgets"
    assert recipe.order.budget in recipe.evaluate.budgets, "or the learned order has no rival at its own budget"
    assert max(recipe.evaluate.budgets) <= task.length
    assert recipe.evaluate.temperature == 1
    assert Recipe.from_json(recipe.to_json()) == recipe


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
        assert Recipe.from_json(recipe.to_json()) == recipe
        assert recipe.evaluate.temperature == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["model.causal=there"], "model: causal = 'there' already says width, layers, heads, intermediate"),
        (["model.shift=true"], "model: shift = true is for a causal language model"),
        (["init=runs/x", "model={causal='there'}"], "both say where to start"),
        (["model={causal='there', tied_head=true}"], "causal = 'there' already says tied_head"),
    ],
)
def test_where_a_model_starts_is_said_once(given, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe("groups", given)


def test_by_path_and_by_name_is_the_same():
    assert load_recipe(recipe_folder() / "groups.toml") == load_recipe("groups")


def test_the_policies_of_a_recipe_are_the_heuristics():
    assert EvaluateRecipe().policies == ("iid", "top-prob", "margin")


def test_any_rule_may_stand_in_a_recipe(tiny):
    """Those that need a network too: whether there is one is seen when the run is evaluated."""
    rules = ("threshold:0.9", "p2", "lo-arm", "reward:0.5", "learned(temperature=0.5)", "blocks(4,margin)")
    recipe = load_recipe(tiny, [f"evaluate.policies={list(rules)}"])
    assert recipe.evaluate.policies == rules
    assert Recipe.from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("threshold:2", "threshold"),
        ("margin:1", "margin has no place for '1'"),
        ("stochastic(margin)", "temperature missing; write it as stochastic(ORDER,TEMPERATURE)"),
        ("blocks(4,margin", "cannot read the policy"),
        ("blocks(4,lo-arm)", "blocks cannot hold lo-arm"),
    ],
)
def test_a_rule_with_wrong_parameters(tiny, rule, expected):
    message = refused(tiny, f"evaluate.policies=['iid', '{rule}']")
    assert message.startswith("evaluate")
    assert expected in message


# --- what a good recipe becomes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("task.grups=3", "task groups has no option 'grups'; did you mean 'groups'"),
        ("task.name=gruops", "unknown task 'gruops'; did you mean 'groups'"),
        ("task.groups=0", "groups"),
        ("task.groups=two", "option groups must be of type int, not str"),
    ],
)
def test_the_task_is_checked_with_the_rest(tiny, override, expected):
    """Before anything is built: `recipe show` and `reproduce --dry-run` tell too."""
    with pytest.raises(RecipeError, match=expected) as caught:
        load_recipe(tiny, [override])
    assert "\n" not in str(caught.value)


def test_another_task_drops_the_options_that_it_does_not_have(tiny, capsys):
    recipe = load_recipe(tiny, ["task.name=chain", "task.length=9"])
    assert recipe.task == {"name": "chain", "seed": 0, "length": 9, "symbols": 3, "branching": 2}
    assert capsys.readouterr().err == "unmask: task chain has no groups, group_size: left out of the recipe\n"
    assert "task chain has no option 'groups'" in refused(tiny, "task.name=chain", "task.groups=2"), "asked for"


def test_a_recipe_without_the_defaults_of_its_task_is_the_same_recipe(tiny):
    """So the runs of earlier versions go on."""
    recipe = load_recipe(tiny)
    values = json.loads(recipe.to_json())
    assert values["task"].pop("seed") == 0
    assert Recipe.from_json(json.dumps(values)) == recipe


def test_values_arrive(tiny):
    recipe = load_recipe(tiny)
    assert recipe.task == {"name": "groups", "groups": 2, "group_size": 2, "symbols": 3, "seed": 0}, "defaults too"
    assert (recipe.model.width, recipe.model.selector.width, recipe.model.scorer.layers) == (16, 8, 1)
    assert (recipe.denoise.updates, recipe.denoise.batch, recipe.order.budget) == (3, 8, 2)
    assert recipe.evaluate.budgets == (2, 4)
    assert (recipe.order.selection, recipe.order.baseline) == ("nonempty", "leave-one-out")


def test_a_whole_number_is_a_number(tiny):
    clip = load_recipe(tiny, ["order.clip=2"]).order.clip
    assert clip == 2.0
    assert type(clip) is float


@pytest.mark.parametrize("section", ["denoise", "order"])
def test_one_objective_is_enough(tmp_path, section):
    other = "order" if section == "denoise" else "denoise"
    path = written(tmp_path, without_section(TINY_RECIPE, other))
    recipe = load_recipe(path, [] if section == "denoise" else ["init=runs/earlier"])
    assert getattr(recipe, other) is None
    assert getattr(recipe, section) is not None


def test_json_round_trip_keeps_everything(tiny):
    overrides = ["seed=7", "init=runs/a", "order.selection=bernoulli", "denoise.ema=0.9", "evaluate.budgets=[1, 3]"]
    recipe = load_recipe(tiny, [*overrides, "precision=bf16", "order.tau=0.05", "model.qk_norm=true"])
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert again.evaluate.budgets == (1, 3)
    assert again != load_recipe(tiny)


def test_json_round_trip_without_sections(tmp_path):
    recipe = load_recipe(written(tmp_path, without_section(TINY_RECIPE, "order")))
    assert Recipe.from_json(recipe.to_json()) == recipe


# --- unknown keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("sede=1", "seed"),
        ("ordre.budget=2", "order"),
        ("order.bugdet=2", "budget"),
        ("order.trajectory=2", "trajectories"),
        ("denoise.learnin_rate=1e-3", "learning_rate"),
        ("model.widht=16", "width"),
        ("model.selector.layer=2", "layers"),
        ("model.scorer.head=2", "heads"),
        ("evaluate.policy=['iid']", "policies"),
    ],
)
def test_an_unknown_key_names_the_nearest(tiny, wrong, right):
    message = refused(tiny, wrong)
    key = wrong.partition("=")[0].split(".")
    assert f"unknown key {key[0] if key[0] == 'ordre' else key[-1]!r}" in message
    assert f"did you mean {right!r}?" in message
    if len(key) > 1 and key[0] != "ordre":
        assert message.startswith(".".join(key[:-1])), "the table that holds the key"


def test_a_key_far_from_all_lists_them(tiny):
    message = refused(tiny, "order.zzz=1")
    assert "did you mean" not in message
    assert "budget" in message
    assert "tau" in message


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("order.selection=nonemtpy", "nonempty"),
        ("order.baseline=leave-one-uot", "leave-one-out"),
        ("precision=bf-16", "bf16"),
        ("evaluate.policies=['iid', 'top-porb']", "top-prob"),
    ],
)
def test_an_unknown_choice_names_the_nearest(tiny, wrong, right):
    message = refused(tiny, wrong)
    assert wrong.partition("=")[0] in message
    assert f"did you mean {right!r}?" in message


# --- wrong values -----------------------------------------------------------------------------------------------------

WRONG_VALUES = [
    # types
    ("order.budget=two", "order.budget must be a whole number, not 'two'"),
    ("order.budget=2.0", "order.budget must be a whole number, not 2.0"),
    ("order.budget=true", "order.budget must be a whole number, not True"),
    ("order.budget=", "order.budget must be a whole number, not ''"),
    ("order.tau=true", "order.tau must be a number, not True"),
    ("order.tau='0.1'", "order.tau must be a number, not '0.1'"),
    ("order.attach_selector=1", "order.attach_selector must be true or false, not 1"),
    ("model.size=3", "model.size must be a string, not 3"),
    ("seed=1.5", "seed must be a whole number"),
    ("seed=1979-05-27", "seed must be a whole number"),
    ("evaluate.budgets=2", "evaluate.budgets must be a list, not 2"),
    ("evaluate.budgets=[2, 'four']", "evaluate.budgets must be a whole number, not 'four'"),
    ("evaluate.budgets=[2, true]", "evaluate.budgets must be a whole number, not True"),
    ("order=3", "order must be a table, not 3"),
    ("task=groups", "task must be a table, not 'groups'"),
    ("order.budget={a = 1}", "order.budget must be a whole number, not a table"),
    # not finite
    ("order.tau=nan", "order.tau must be finite"),
    ("order.tau=inf", "order.tau must be finite"),
    ("denoise.learning_rate=-inf", "denoise.learning_rate must be finite"),
    # out of range
    ("order.budget=0", "budget (T) must be at least 2, got 0"),
    ("order.budget=-3", "budget (T) must be at least 2, got -3"),
    ("order.budget=1", "budget (T) must be at least 2, got 1: in one step everything is revealed"),
    ("order.max_bad=0", "max_bad must be at least 1, got 0"),
    ("order.restored_rate=0", "restored_rate must lie above 0 and be at most 1, got 0"),
    ("order.on_collapse=ignore", "choose from report, restore"),
    ("denoise.on_collapse=ignore", "choose from report, restore"),
    ("saving.keep=0", "keep must be at least 1, got 0"),
    ("saving.every_seconds=-1", "every_seconds must be at least 0, got -1"),
    ("saving.evry_seconds=1", "did you mean 'every_seconds'"),
    ("order.tau=0", "tau must be above 0, got 0"),
    ("order.tau=-0.1", "tau must be above 0, got -0.1"),
    ("order.trajectories=1", "trajectories (k) must be at least 2 with leave-one-out, got 1"),
    ("denoise.updates=0", "updates must be at least 1, got 0"),
    ("order.batch=0", "batch must be at least 1, got 0"),
    ("order.accumulate=0", "accumulate must be at least 1, got 0"),
    ("order.warmup=-1", "warmup must be at least 0, got -1"),
    ("order.final_rate=-0.5", "final_rate must be at least 0"),
    ("order.weight_decay=-1", "weight_decay must be at least 0"),
    ("order.clip=0", "clip must be above 0, got 0"),
    ("order.ema=1", "ema must lie in [0, 1), got 1"),
    ("order.ema=-0.1", "ema must lie in [0, 1), got -0.1"),
    ("denoise.learning_rate=0", "learning_rate must lie above 0"),
    ("order.denoiser_rate=-1e-3", "denoiser_rate must lie between 0 (frozen) and 1"),
    ("order.scorer_rate=-1", "scorer_rate must lie between 0 (frozen) and 1"),
    ("model.selector.layers=0", "layers must be at least 1, got 0"),
    ("model.scorer.width=-8", "width must be at least 0, got -8"),
    ("evaluate.examples=0", "examples must be at least 1, got 0"),
    ("evaluate.temperature=-1", "temperature must be at least 0"),
    ("evaluate.budgets=[2, 0]", "budgets must be between 1 and 65,536, got [2, 0]"),
    ("threads=-1", "threads must be at least 0, got -1"),
    ("seed=99999999999999999999", "seed must fit in 64 bits"),
]


@pytest.mark.parametrize(("override", "expected"), WRONG_VALUES, ids=[override for override, _ in WRONG_VALUES])
def test_a_wrong_value_is_named(tiny, override, expected):
    message = refused(tiny, override)
    assert expected in message
    assert override.partition("=")[0].split(".")[0] in message, "the section is named too"


def test_contradictions(tiny):
    assert "batch = 4 must be a multiple of accumulate = 3" in refused(tiny, "order.accumulate=3")
    assert "attach_selector needs denoiser_rate > 0" in refused(tiny, "order.attach_selector=true")
    assert "all 0" in refused(tiny, "order.selector_rate=0", "order.scorer_rate=0")
    assert "size = '6m' already says width, layers, heads, intermediate" in refused(tiny, "model.size=6m")
    assert "width missing" in refused(tiny, "model.width=0")
    message = refused(tiny, "order.trajectories=0", "order.baseline=none")
    assert "trajectories must be at least 1" in message


def test_one_trajectory_is_enough_without_leave_one_out(tiny):
    assert load_recipe(tiny, ["order.trajectories=1", "order.baseline=none"]).order.trajectories == 1
    assert load_recipe(tiny, ["order.trajectories=1", "order.baseline=moving-average"]).order.trajectories == 1


@pytest.mark.parametrize(
    ("section", "expected"),
    [("task", "'task' is missing"), ("model", "[model] has no shape"), ("denoise", "an order needs a denoiser")],
)
def test_missing_sections(tmp_path, section, expected):
    assert expected in refused(written(tmp_path, without_section(TINY_RECIPE, section)))


def test_nothing_to_train(tmp_path):
    text = without_section(without_section(TINY_RECIPE, "denoise"), "order")
    assert "nothing to train" in refused(written(tmp_path, text))


@pytest.mark.parametrize(("section", "key"), [("denoise", "updates"), ("order", "batch")])
def test_missing_values(tmp_path, section, key):
    lines, inside = [], False
    for line in TINY_RECIPE.splitlines():
        inside = line == f"[{section}]" if line.startswith("[") else inside
        if not (inside and line.startswith(f"{key} =")):
            lines.append(line)
    message = refused(written(tmp_path, "\n".join(lines)))
    assert section in message
    assert f"{key!r} is missing" in message


def test_an_order_without_a_budget(tmp_path):
    assert "budget (T)" in refused(written(tmp_path, TINY_RECIPE.replace("budget = 2\n", "")))


def test_a_task_without_a_name(tmp_path):
    assert "[task] needs a name" in refused(written(tmp_path, TINY_RECIPE.replace('name = "groups"', "")))


# --- overrides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=3", "seed", 3),
        ("seed = 3", "seed", 3),
        ("order.tau=5e-2", "order.tau", 0.05),
        ("model.selector.width=12", "model.selector.width", 12),
        ("init=runs/earlier", "init", "runs/earlier"),
        ('init="runs/earlier"', "init", "runs/earlier"),
        ("init=a=b", "init", "a=b"),
        ("order.selection=bernoulli", "order.selection", "bernoulli"),
        ("order.selection='bernoulli'", "order.selection", "bernoulli"),
        ("evaluate.budgets=[1, 2, 3]", "evaluate.budgets", (1, 2, 3)),
        ('evaluate.policies=["margin"]', "evaluate.policies", ("margin",)),
        ("compile=true", "compile", True),
        ("task.symbols=4", "task.symbols", 4),
    ],
)
def test_overrides(tiny, override, path, value):
    found = load_recipe(tiny, [override])
    for name in path.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == value


def test_the_last_override_stands(tiny):
    assert load_recipe(tiny, ["seed=3", "order.tau=0.2", "seed=4"]).seed == 4


def test_an_override_changes_nothing_else(tiny):
    recipe, changed = load_recipe(tiny), load_recipe(tiny, ["order.tau=0.2"])
    assert changed == dataclasses.replace(recipe, order=dataclasses.replace(recipe.order, tau=0.2))


def test_an_override_may_start_a_section(tmp_path):
    path = written(tmp_path, without_section(TINY_RECIPE, "order"))
    recipe = load_recipe(path, ["order.updates=5", "order.batch=2", "order.budget=3"])
    assert (recipe.order.updates, recipe.order.budget) == (5, 3)


@pytest.mark.parametrize("override", ["seed", "", "=3", " = 3", "order.budget"])
def test_malformed_overrides(tiny, override):
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


@pytest.mark.parametrize("name", ["", "nowhere/at/all.toml", "two\nlines", "."])
def test_no_such_file(name):
    assert "no recipe" in refused(name)


@pytest.mark.parametrize("text", [b"[task\nname =", b"seed = 1\nseed = 2\n", b"seed = \xff\xfe", b"= 3", b"{}"])
def test_not_toml(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_bytes(text)
    message = refused(path)
    assert "broken.toml is not valid TOML" in message


def test_json_that_is_no_recipe():
    for text in ("[]", "3", "{}", '{"task": {}}', '{"task": {"name": "groups"}, "epochs": 3}'):
        with pytest.raises(RecipeError) as caught:
            Recipe.from_json(text)
        assert "\n" not in str(caught.value)


def test_an_order_that_nobody_learns_is_refused():
    overrides = ["order.selector_rate=0", "order.scorer_rate=0", "order.denoiser_rate=1e-3"]
    with pytest.raises(RecipeError, match="no order would be learned"):
        load_recipe("groups", overrides)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_recipe_written_out_is_the_same_recipe(tmp_path, name):
    try:
        recipe = load_recipe(name)
    except RecipeError:  # an order alone, for the denoiser of an earlier run
        recipe = load_recipe(name, ["init=runs/earlier"])
    path = tmp_path / "written.toml"
    path.write_text(recipe.to_toml())
    assert load_recipe(path) == recipe
    assert "every_updates = 0" in recipe.to_toml(), "what the file leaves out is there too"
