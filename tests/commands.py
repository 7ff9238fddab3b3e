"""The command line, in this process; tests/conftest.py has it as fixtures."""

import pytest

from unmask.cli import main


def exit_code(*arguments) -> int:
    """Anything but SystemExit is a traceback, and fails the test."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code or 0
