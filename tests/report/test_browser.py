"""The page in a real browser: Debian's Chromium, from the disk.

`pytest tests/report/test_browser.py --screenshot-of RUN` also writes docs/results/report.png, the page of that run.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.evaluation.by_hand import LEARNED, heuristic
from unmask.report.html import Section, write_html, write_report

ROOT = Path(__file__).parents[2]
EVIL = "<script>alert(1)</script>"
RECORDS = [
    LEARNED,
    *(heuristic(rule, T, mean_steps=float(T), score=T / 20) for rule in ("iid", "p2") for T in (1, 2, 16)),
]


def step(tokens, **said):
    return {"tokens": tokens, "confidence": [50] * len(tokens), **said}


def race(**more):
    """Four tokens of a learned order, which is wrong at one, and of a rule that masks one again."""
    learned = [step(["1", None, None, None], selector=[90, 10, 20, 30]), step(["1", "+", "3", EVIL])]
    again = [step(["1", "2", None, None]), step([0, None, "3", 0]), step([0, "+", "3", "5"])]
    policies = [("learned, T = 2", False, learned), ("p2 @ 3", True, again), ("iid @ 3", None, again)]
    return {
        "name": "example 0",
        "prompt": f"What is {EVIL}?",
        "given": [False] * 4,
        "reference": ["1", "+", "3", "4"],
        "grid": [0, 0],
        "policies": [{"name": n, "valid": v, "drawing": "", "steps": s} for n, v, s in policies],
    } | more


def square():
    steps = [step([str(p % 4 + 1) if p % 2 else None for p in range(16)]), step([str(p % 4 + 1) for p in range(16)])]
    policies = [
        {"name": "learned", "valid": True, "drawing": '<svg xmlns="http://www.w3.org/2000/svg"/>', "steps": steps}
    ]
    given = [p % 2 == 1 for p in range(16)]
    return race(name="square", prompt="", given=given, reference=None, grid=[4, 2], policies=policies)


def long(tokens=1000, steps=40):
    shown = [step([f"{p % 10}" if p % steps <= i else None for p in range(tokens)]) for i in range(steps)]
    lines = [{**one, "tokens": [token and token.replace("9", "9\n") for token in one["tokens"]]} for one in shown]
    policies = [{"name": n, "valid": None, "drawing": "", "steps": s} for n, s in (("x" * 90, shown), ("b", lines))]
    return race(name="long", prompt="y" * 3000, given=[], reference=None, policies=policies)


HEAT = {
    "policies": ["learned, T = 2", "p2 @ 3", *["threshold(0.9,confidence=sampled) @ 16"] * 2],
    "grid": [0, 0],
    "groups": [[0, 2], [1, 3]],
    "first": 0,
    "positions": [[1.0, 2.0, 1.5, None], *[[1.0, 3.0, 2.0, 3.0]] * 3],
    "classes": {"digit": [1.5, 2.0, 2.0, 2.0], "operator": [None, 3.0, 1.0, 1.0]},
    "examples": 3,
}
ORDERS = {"examples": [race(), square(), long()], "heat": HEAT}


def section(orders, **more):
    training = {"denoise": [(0, -2.0), (100, -0.5)], "order": [(0, -0.6)]}
    named = {"run": "mine", "task": "groups", "training": training, "recipe": "seed = 0"}
    return Section("mine, groups: 4 tokens", EVIL, RECORDS, [[0, 2], [1, 3]], orders=orders, **named, **more)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(path, [section(ORDERS)])
    return path


@pytest.fixture
def opened(browser):
    """Opens a page; nothing may be logged, fail or be fetched while the test looks at it."""
    trouble, fetched, contexts = [], [], []

    def open_page(file, width=1280, scheme="light", touch=False):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=touch)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: trouble.append(dialog.message))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []
    assert all(url.startswith(("file:", "data:image/svg")) for url in fetched)
    assert sum(url.startswith("file:") for url in fetched) == len(contexts)


@pytest.fixture
def page(opened, page_file):
    return opened(page_file)


def shown(page, lane=0):
    """The tokens of a lane, · where masked."""
    return page.locator(".lane").nth(lane).locator(".token").all_text_contents()


def move_to(page, value):
    page.get_by_role("slider").evaluate(
        "(slider, to) => { slider.value = to; slider.dispatchEvent(new Event('input')) }", value
    )


def test_the_slider_moves_the_tokens(page):
    assert shown(page) == ["1", "+", "3", EVIL]
    for value, tokens in ((0, "····"), (1, "1···")):
        move_to(page, value)
        assert shown(page) == list(tokens)
    assert page.locator(".told").inner_text() == "step 1 of 3"
    colours = [
        page.locator(".lane").nth(1).locator(".token").nth(i).evaluate("e => e.style.background") for i in (0, 2)
    ]
    move_to(page, 3)
    later = [page.locator(".lane").nth(1).locator(".token").nth(i).evaluate("e => e.style.background") for i in (0, 2)]
    assert colours == [later[0], ""], "of the step that revealed it"
    assert later[0] != later[1]


def test_what_is_masked_again_and_what_is_wrong_is_marked(page):
    def classes(lane):
        names = page.locator(".lane").nth(lane).locator(".token").evaluate_all("all => all.map(e => e.className)")
        return [each.split() for each in names]

    assert [("differs" in names) for names in classes(0)] == [False, False, False, True]
    assert not any("differs" in names for names in classes(1)), "a valid answer may differ from the reference"
    move_to(page, 2)
    assert shown(page, 1) == ["1", "↺", "3", "·"]
    assert "again" in classes(1)[1]
    move_to(page, 3)
    assert "again" in classes(1)[1], "written twice"
    assert "again" not in classes(1)[0]


def test_a_letter_in_two_parts_is_written_once(opened, tmp_path):
    parts = [{"name": "a", "valid": None, "drawing": "", "steps": [step(["\ufffd", None]), step([["é"], ""])]}]
    write_html(
        tmp_path / "page.html", [section({**ORDERS, "examples": [race(policies=parts, reference=None, given=[])]})]
    )
    page = opened(tmp_path / "page.html")
    assert shown(page) == ["é", ""]
    page.locator(".lane .token").first.hover()
    assert page.locator(".hover").inner_text().split("\n")[:2] == ['position 1: "é"', "revealed at step 1"]
    assert page.locator(".again").count() == 0


def test_play_runs_to_its_end(page):
    page.get_by_role("button", name="Play").evaluate("(play) => play.click()")
    assert shown(page)[1:] == list("···")
    page.get_by_text("step 3 of 3", exact=True).wait_for()
    assert shown(page, 1) == list("1+35")
    assert page.get_by_role("button", name="Play").is_visible(), "no longer Pause"


def test_the_keyboard_works(page):
    page.locator(".viewer").focus()
    told = page.locator(".told")
    for key, expected in (("ArrowLeft", 2), ("ArrowLeft", 1), ("ArrowRight", 2), ("End", 3)):
        page.keyboard.press(key)
        assert told.inner_text() == f"step {expected} of 3"
    page.get_by_role("slider").focus()
    page.keyboard.press("ArrowLeft")
    assert told.inner_text() == "step 2 of 3", "one step at a time on the slider too"
    page.keyboard.press("Home")
    assert told.inner_text() == "before step 1 of 3"
    page.keyboard.press("Space")
    page.get_by_role("button", name="Pause").wait_for()
    page.keyboard.press("Space")
    assert page.get_by_role("button", name="Play").is_visible()


def test_pointing_at_a_token_says_what_the_networks_said(page):
    move_to(page, 0)
    page.locator(".lane .token").nth(1).hover()
    assert page.locator(".hover").inner_text().split("\n") == [
        "position 2: masked",
        "selector: 10% to reveal it now",
        "denoiser: 50% sure now",
    ]
    move_to(page, 3)
    page.locator(".lane .token").nth(3).hover()
    text = page.locator(".hover").inner_text()
    assert EVIL in text
    assert 'reference: "4"' in text
    assert "revealed at step 2" in text


def test_a_tap_says_it_too(opened, page_file):
    page = opened(page_file, width=420, touch=True)
    for name, said in (
        (".lane .token", "position 1"),
        (".heat rect", "position 1"),
        (".chart > svg path", "97.3% valid"),
    ):
        page.locator(name).nth(-1 if "path" in name else 0).tap(force=True)
        assert said in page.locator(".hover:not([hidden])").inner_text()
    page.evaluate("scrollTo(0, 0)")
    page.locator(".hover").wait_for(state="hidden")


def test_an_end_of_sequence_is_explained(opened, tmp_path):
    ends = [{"name": "a", "valid": None, "drawing": "", "steps": [step(["1", "░", "░", "░"])]}]
    write_html(tmp_path / "page.html", [section({**ORDERS, "examples": [race(policies=ends), race()]})])
    page = opened(tmp_path / "page.html")
    assert "end of sequence" in page.locator(".key").inner_text()
    page.get_by_role("button", name="the next example").click()
    assert "end of sequence" not in page.locator(".key").inner_text()


def test_policies_race_side_by_side(page):
    boxes = [page.locator(".lane").nth(i).bounding_box() for i in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert not page.locator(".lane").nth(2).is_visible()
    page.get_by_role("button", name="iid @ 3").click()
    assert page.locator(".lane").nth(2).is_visible()
    page.get_by_role("button", name="the next example").click()
    assert page.locator(".lane").count() == 1
    page.get_by_role("button", name="the example before").click()
    assert page.locator(".lane").count() == 3


def test_a_rule_that_is_still_writing(page):
    """As a server would show it: no step at first, then one after the other."""
    page.evaluate(
        """() => {
          const box = document.createElement('div'), policies = [{name: 'live', valid: null, drawing: '', steps: []}];
          document.body.prepend(box);
          const data = {prompt: '', given: [false, false], reference: null, grid: [0, 0], policies};
          window.viewer = orderViewer(box, data);
        }"""
    )
    assert shown(page) == ["·", "·"]
    for tokens, expected in ((["a", None], ["a", "·"]), ([0, "b"], ["a", "b"])):
        page.evaluate("(tokens) => window.viewer.add(0, {tokens, confidence: [50, 50]})", tokens)
        assert shown(page) == expected
    assert page.locator(".told").first.inner_text() == "step 2 of 2"


def test_squares_and_drawings(page):
    page.get_by_role("button", name="the next example").click()
    boxes = [cell.bounding_box() for cell in page.locator(".lane .token").all()]
    assert len({round(box["x"]) for box in boxes}) == len({round(box["y"]) for box in boxes}) == 4
    assert len({round(box["width"]) for box in boxes}) == 1
    assert page.locator("img.drawing").count() == 1


def test_a_click_isolates_a_rule(page):
    chart = page.locator(".chart").first

    def faded():
        return chart.locator("g.faded").count()

    assert faded() == 0
    chart.get_by_role("button", name="iid").click()
    assert faded() == 2
    chart.get_by_role("button", name="iid").click()
    assert faded() == 0
    chart.locator("> svg path").last.click(force=True)
    assert faded() == 2, "on a point too"
    chart.locator("> svg path").last.hover(force=True)
    assert "97.3% valid" in page.locator(".hover").inner_text()


def test_other_columns_are_behind_a_switch(page):
    heading = page.get_by_role("columnheader", name="passes")
    assert not heading.is_visible()
    page.get_by_label("all columns").check()
    assert heading.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_it(opened, tmp_path, scheme):
    axe = pytest.importorskip("axe_core_python.sync_playwright", reason="pip install 'unmask[dev]'").Axe()
    examples = [race(), square(), *([long(300, 4)] if scheme == "light" else [])]  # long enough to scroll
    write_html(tmp_path / "page.html", [section({**ORDERS, "examples": examples})])
    page = opened(tmp_path / "page.html", scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true })")
    for _ in examples:
        page.evaluate("document.getAnimations().forEach((one) => one.finish())")
        serious = [found for found in axe.run(page)["violations"] if found["impact"] in ("serious", "critical")]
        assert [(found["id"], [node["html"] for node in found["nodes"]][:3]) for found in serious] == []
        page.get_by_role("button", name="the next example").click()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(17, 20, 27)") == (scheme == "dark")


def test_a_phone_cuts_nothing(opened, page_file):
    page = opened(page_file, width=420)
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true })")
    page.get_by_label("all columns").check()
    for _ in range(3):
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
        cut = page.locator("table").evaluate_all(
            "all => all.filter((one) => one.scrollWidth > one.parentElement.clientWidth + 1).length"
        )
        assert cut == 0
        page.get_by_role("button", name="the next example").click()


def test_a_thousand_tokens(page):
    page.get_by_role("button", name="the example before").click()
    assert page.locator(".lane").nth(0).locator(".token").count() == 1000
    started = page.evaluate("performance.now()")
    for value in (0, 20, 40):
        move_to(page, value)
    assert page.evaluate("performance.now()") - started < 5000
    assert "·" not in shown(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_two_hundred_examples_are_below_3_mb(tmp_path):
    """Of 128 tokens, four rules, eight steps each."""
    draw, words = np.random.default_rng(0), [f" word{i}" for i in range(500)]

    def policy(name):
        when, text = draw.integers(8, size=128), draw.choice(words, size=128).tolist()
        steps = []
        for i in range(8):
            masked = (when >= i).tolist()
            said = [
                [p if m else None for p, m in zip(row, masked, strict=True)]
                for row in draw.integers(101, size=(2, 128)).tolist()
            ]
            tokens = [t if w == i else 0 if i else None for t, w in zip(text, when, strict=True)]
            steps.append({"tokens": tokens, "confidence": said[0], "selector": said[1]})
        return {"name": name, "valid": True, "drawing": "", "steps": steps}

    examples = [
        race(reference=draw.choice(words, size=128).tolist(), policies=[policy(name) for name in "abcd"])
        for _ in range(200)
    ]
    write_html(tmp_path / "page.html", [section({"examples": examples, "heat": HEAT})])
    assert (tmp_path / "page.html").stat().st_size < 3_000_000


def test_the_screenshot_of_the_docs(opened, request, tmp_path):
    run = request.config.getoption("--screenshot-of")
    if run is None:
        pytest.skip("made only with --screenshot-of RUN")
    write_report([Path(run)], tmp_path / "page.html")
    page = opened(tmp_path / "page.html", width=1120)
    page.set_viewport_size({"width": 1120, "height": 1390})
    page.screenshot(path=ROOT / "docs" / "results" / "report.png")
