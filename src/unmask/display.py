"""Text on its way to people: nothing in it can steer their terminal, and every stream can show it."""

from __future__ import annotations

import codecs
import html
import io
import re
import sys

# Control characters (C0, DEL, C1) but the newline, marks of direction and of line ends, and what XML cannot hold.
_HIDDEN = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_STAND_INS = {"·": ".", "░": "#", "×": "x", "–": "-", "…": "...", "↵": r"\n"}


def visible(text: str) -> str:
    """The text with its control characters written out: ESC as \\x1b.  Newlines stay."""
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def in_markup(text: str) -> str:
    """The same for rich: square brackets are no markup."""
    from rich.markup import escape

    return escape(visible(text))


def in_html(text: str) -> str:
    """The same for HTML and SVG."""
    return html.escape(visible(text))


def say(text: str, err: bool = False, end: str = "\n") -> None:
    """Print a line, or with `err` on stderr."""
    print(visible(text), end=end, file=sys.stderr if err else sys.stdout, flush=True)


def accept_any_character() -> None:
    """From now on stdout and stderr show what their encoding lacks by a stand-in of ASCII, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="unmask")


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_STAND_INS.get(letter, ascii(letter)[1:-1]) for letter in lacking), error.end


codecs.register_error("unmask", _stand_in)
