"""Text that reaches people: control characters are written out, any encoding will do, progress is told in a log too."""

import io
import re
import sys
from types import SimpleNamespace

import pytest

from unmask import progress as told
from unmask.display import accept_any_character, in_html, in_markup, say, visible
from unmask.progress import line, progress

HIDDEN = "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]"  # nothing of this may be shown as it is


def test_control_characters_are_written_out(capsys):
    for text, shown in (
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\tb\rc\x7f\x9b2J\x00", r"a\tb\rc\x7f\x9b2J\x00"),
        ("\u202eevil\u2069 \u2028", r"\u202eevil\u2069 \u2028"),
        ("\udcff\uffff", r"\udcff\uffff"),
        ("lines\nof tëxt, 本 [b] & \\d", "lines\nof tëxt, 本 [b] & \\d"),
    ):
        assert visible(text) == visible(shown) == shown
        assert in_markup(text) == shown.replace("[b]", r"\[b]")
        assert in_html(text) == shown.replace("&", "&amp;")
        say(text, err=True)
        assert capsys.readouterr().err == shown + "\n"


def test_what_an_encoding_lacks_has_a_stand_in(monkeypatch):
    for encoding, shown in (("ascii", b"a.b #x3 1-2 \\xe9\\u672c"), ("latin-1", b"a\xb7b #\xd73 1-2 \xe9\\u672c")):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        accept_any_character()
        say("a·b ░×3 1–2 é本", end="")
        assert sys.stdout.buffer.getvalue() == shown


def test_the_line_of_a_loop():
    task = SimpleNamespace(
        description="order", completed=1200.0, total=3000, speed=24.1, time_remaining=75.0, fields={"note": "bound -1"}
    )
    assert line(task) == "order 1200/3000 24/s 1:15 left bound -1"
    task.time_remaining, task.speed = 7500.0, 1.25
    assert line(task) == "order 1200/3000 1.2/s 2h05 left bound -1"
    task.fields["note"] = "bound -1.234 recon -0.987 KL 0.247 Q steps 1.875"
    assert len(line(task)) <= 80


@pytest.mark.parametrize(
    ("every", "transient", "expected"),
    [
        (0.0, False, ["0/4", "2/4", "3/4 bound", "4/4"]),
        (1e9, False, ["0/4", "4/4"]),
        (0.0, True, ["0/4", "2/4", "3/4 bound", "4/4"]),
        (1e9, True, []),
    ],
)
def test_progress_in_a_log(monkeypatch, capsys, every, transient, expected):
    """A line at the start, now and then, and at the end; of what is transient only now and then."""
    monkeypatch.setattr(told, "EVERY", every)
    with progress("loop", 4, transient=transient) as advance:
        advance(2)
        advance(note="bound")
        advance()
    out, err = capsys.readouterr()
    assert out == ""
    assert [re.sub(r" [\d.]+/s| \S+ left", "", entry) for entry in err.splitlines()] == [f"loop {x}" for x in expected]
    with progress("loop", 4, visible=False) as advance:
        advance()
    assert capsys.readouterr().err == ""


def test_a_log_has_a_line_every_half_minute(monkeypatch, capsys):
    """From the start of a stage, not only at its end."""
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(told, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with progress("order", 9) as advance:
        for _ in range(8):  # ten seconds each
            advance()
    counts = [entry.split()[1] for entry in capsys.readouterr().err.splitlines()]
    assert counts == ["0/9", "3/9", "6/9", "8/9"]
