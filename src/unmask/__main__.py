"""The way in to the command line: Ctrl-C is told in one line, even while Python is still importing."""

import signal
import sys


def main() -> None:
    """Run the command line.  An import that is interrupted may raise anything, not only KeyboardInterrupt."""
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is to be ignored, as under nohup
        signal.signal(signal.SIGINT, interrupt)
    try:
        from unmask.cli import main as command_line

        command_line(interrupted=lambda: interrupted)
    except (Exception, KeyboardInterrupt):
        if not interrupted:
            raise
        print("unmask: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
