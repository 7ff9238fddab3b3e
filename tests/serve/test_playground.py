"""The playground in a real browser: two rules race, by mouse or by keyboard, on a wide page and on a narrow one.

`pytest tests/serve/test_playground.py --screenshot-of RUN` races on that run and writes docs/results/playground.png.
"""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.serve.serving import held, served, serving
from unmask.serve.app import Limits

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
axe = pytest.importorskip("axe_core_python.sync_playwright", reason="pip install axe-core-python")
playwright.expect.set_options(timeout=20_000)
PICTURE = Path(__file__).parents[2] / "docs" / "results" / "playground.png"


@pytest.fixture(scope="module")
def address(models, request):
    run = request.config.getoption("--screenshot-of")
    shown = served(Path(run)) if run else [models[2]]
    with serving([*shown, *models[:2]]) as (client, _):
        yield str(client.base_url)


@contextmanager
def opened(browser, address, errors=None, wait=True, **options):
    """A page, once it can be used; nothing may appear in its console, unless it is collected in `errors`."""
    found = [] if errors is None else errors
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 760}, **options})
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.goto(address)
    if wait:
        ready(page)
    yield page
    context.close()
    assert errors is not None or found == []


def ready(page):
    playwright.expect(page.locator("#first")).not_to_be_empty()


def finish(page):
    playwright.expect(page.locator("#verdict")).to_contain_text(" wrote ")


def race(page):
    page.click("#write")
    finish(page)


def tokens(page, lane=0):
    return page.locator(".lane").nth(lane).locator(".token").all_inner_texts()


def assert_accessible(page):
    bad = [one for one in axe.Axe().run(page)["violations"] if one["impact"] in ("serious", "critical")]
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in bad] == []


def test_two_rules_race(browser, address, request):
    with opened(browser, address) as page:
        race(page)
        assert page.locator(".lane h2").all_inner_texts() == ["learned", "top-prob"]
        assert re.fullmatch(
            r"learned wrote a (right|wrong) answer in \d steps?; top-prob wrote a (right|wrong) answer in \d steps?\.",
            page.inner_text("#verdict"),
        )
        assert not page.is_visible("#ends")
        for lane in range(2):
            assert "·" not in tokens(page, lane)
            steps, passes = (page.locator(name).nth(lane).inner_text() for name in (".steps", ".passes"))
            assert int(steps) >= 1 <= int(passes)
            assert re.search(r"\d ms", page.locator(".time").nth(lane).inner_text())
        commands = page.locator(".repeat code").all_inner_texts()
        assert [command.split()[:2] for command in commands] == [["unmask", "sample"]] * 2
        assert "--policy top-prob" in commands[1]
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.locator(".copy").nth(1).click()
        playwright.expect(page.locator(".copy").nth(1)).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == commands[1]
        playwright.expect(page.locator(".copy").nth(1)).to_have_text("Copy command")  # the tokens stand still by then
        assert_accessible(page)
        if request.config.getoption("--screenshot-of"):
            page.screenshot(path=PICTURE, full_page=True)
        for part, texts in ((".valid", ["✓", "✗ not right"]), (".time", ["9 ms", "9999 ms"])):
            page.locator(part).evaluate_all(
                "(all, texts) => all.forEach((one, i) => { one.textContent = texts[i] })", texts
            )
        tops = [box.bounding_box()["y"] for box in page.locator(".lane .tokens").all()]
        assert tops[0] == tops[1], "side by side, whatever is said of them"


def test_the_keyboard_is_enough(browser, address):
    with opened(browser, address) as page:
        page.focus("#model")
        for wanted in ("source", "example", "another", "first", "second", "steps", "temperature", "seed", "write"):
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.id || document.activeElement.name") == wanted
        page.focus("#second")
        page.keyboard.press("Control+A")
        page.keyboard.type("left-to-right")
        assert page.inner_text("#second-help") == "left-to-right(count=even): From left to right."
        page.keyboard.press("Control+Enter")
        finish(page)
        last = tokens(page, 1)
        slider = page.locator(".step").nth(1)
        slider.focus()
        for _ in range(int(slider.input_value())):
            page.keyboard.press("ArrowLeft")
        assert set(tokens(page, 1)) == {"·"}
        page.keyboard.press("ArrowRight")
        assert "·" in tokens(page, 1)
        page.keyboard.press("Shift+Tab")  # the play button
        page.keyboard.press("Space")
        playwright.expect(page.locator(".play").nth(1)).to_have_text("▶")
        assert tokens(page, 1) == last


def test_stopping_leaves_the_server(browser, models, monkeypatch):
    with (
        serving(models[2:]) as (client, server),
        held(monkeypatch) as gate,
        opened(browser, str(client.base_url)) as page,
    ):
        page.click("#write")
        playwright.expect(page.locator(".lane .mask")).to_have_count(8)
        page.keyboard.press("Escape")
        assert page.inner_text("#verdict") == "Stopped."
        gate.set()
        for _ in range(200):
            if not server.worker.running:
                break
            page.wait_for_timeout(20)
        assert server.worker.running == 0
        assert not page.is_visible("#stop")


def test_who_stops_to_look_is_told_the_end(browser, address):
    """All has come long before it has been shown."""
    with opened(browser, address) as page:
        page.select_option("#model", "texts")
        page.fill("#first", "left-to-right")
        page.fill("#second", "")
        page.fill("#steps", "10")
        for key in ("ArrowLeft", "Escape"):
            page.click("#write")
            playwright.expect(page.locator("#verdict")).to_have_text("Writing …")
            playwright.expect(page.locator(".at")).to_have_text(re.compile("[1-9] / 10"))
            page.locator(".step").focus()
            page.keyboard.press(key)
            finish(page)
            assert not page.is_visible("#stop")
            assert page.locator(".lane .mask").count()


def test_an_order_for_two_steps_races_a_rule_with_more(browser, address):
    with opened(browser, address) as page:
        page.select_option("#model", "puzzle")
        page.fill("#steps", "4")
        race(page)
        assert [text.split("at most ")[1] for text in page.locator(".of").all_inner_texts()] == ["2,", "4,"]


def test_what_is_left_out_is_asked_for(browser, address):
    with opened(browser, address) as page:
        page.select_option("#model", "pairs")
        assert page.get_attribute("#example", "max") == "3"
        page.select_option("#model", "puzzle")
        assert page.get_attribute("#example", "max") == "", "it has no end of examples"
        for name in ("#first", "#second"):
            page.fill(name, "")
        page.click("#write")
        playwright.expect(page.locator("#verdict.failed")).to_have_text("Name a rule to write with.")


def test_a_text_of_ones_own_is_text(browser, address):
    with opened(browser, address) as page:
        page.select_option("#model", "texts")
        page.check("#own")
        page.fill("#prompt", "<script>x()")
        page.fill("#second", "")
        race(page)
        assert page.inner_text("#question") == "<script>x()"
        assert page.is_visible("#ends")
        assert page.locator(".lane").count() == 1
        assert page.evaluate("document.querySelectorAll('script:not([src])').length") == 0
        page.select_option("#model", "pairs")
        assert page.is_visible("#price")
        page.focus("#price")
        page.keyboard.press("End")
        assert page.inner_text("#price-shown") == "2"
        page.fill("#prompt", "say 3")
        page.click("#write")
        playwright.expect(page.locator("#verdict")).to_contain_text("learned(price=2) wrote")
        assert_accessible(page)


def test_what_goes_wrong_is_told(browser, address, models):
    with opened(browser, address, errors=[]) as page:
        page.fill("#first", "margn")
        page.click("#write")
        page.wait_for_selector("#verdict.failed")
        assert "did you mean 'margin'?" in page.inner_text("#verdict")
    with (
        serving(models[2:], limits=Limits(token="secret")) as (client, _),
        opened(browser, str(client.base_url), errors=[], wait=False) as page,
    ):
        page.wait_for_selector("#token:visible")
        page.fill("#token", "secret")
        page.keyboard.press("Enter")
        ready(page)
        race(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_narrow_page(browser, address, scheme, path):
    narrow = {"viewport": {"width": 420, "height": 800}, "color_scheme": scheme, "reduced_motion": "reduce"}
    with opened(browser, address + path, wait=path == "/", **narrow) as page:
        if path == "/":
            race(page)
        else:
            page.wait_for_selector("section.call >> nth=5")
            assert "Bearer TOKEN" in page.locator("#about code").inner_text()
            assert "`" not in page.inner_text("main")
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
        cut = "found => found.filter(one => one.scrollWidth > one.clientWidth + 1).length"
        assert page.locator("table, .tokens, pre").evaluate_all(cut) == 0
        assert_accessible(page)
