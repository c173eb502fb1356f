"""The grammar of the command line: every command with its options, and the checks of single values.

This module does not import torch, so help, errors and completion come at once. The work of a
command is in the module of its name.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..errors import HeteroError, PlanError
from ..recovery import LINGER_SECONDS, MOST_LINGER_SECONDS
from ..transport.address import Address, checked_name
from ..transport.token import DEFAULT_FILE, FILE_VARIABLE
from ..units import parse_bytes
from ..version import __version__

Value = TypeVar("Value")

DEFAULT_LISTEN = Address("127.0.0.1", 9999)
PAIR_LISTEN = Address("0.0.0.0", 9999)  # noqa: S104 - other machines shall reach it
_MOST_THREADS = 1024
_MOST_SECONDS = 366 * 86400.0
# Between two looks, for an answer, and to measure a link.
_LEAST_SECONDS, _MOST_LOOK_SECONDS = 0.01, 3600.0


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here, so that the error names their command."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return options, unknown

    def _meant(self, unknown: Sequence[str]) -> str:
        """A question with the likely spelling of misspelt options; empty without a guess."""
        known = [
            option
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for option in action.option_strings
        ]
        given = [text.partition("=")[0] for text in unknown if text.startswith("--")]
        near = [name for text in given for name in get_close_matches(text, known, n=1)]
        return f"; did you mean {' and '.join(near)}" if near else ""

    def error(self, message: str) -> NoReturn:
        """Print the fault and the command for the list of options, and exit with status 2."""
        self.exit(2, f"{self.prog}: {message.rstrip('.')}; see `{self.prog} --help`.\n")


def command_line() -> Parser:
    """The parser of the whole command line; ``command`` is the command's name, or None."""
    parser = Parser("lightning-hetero", description="Train one model on mixed hardware.")
    parser.add_argument("--version", action="version", version=f"lightning-hetero {__version__}")
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "tcsh"),
        help="print a script to complete commands and options in this shell, and exit",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (text, options) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text}.")
        for add_to in options:
            add_to(command)
    return parser


def _checked(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """The parser of a value; argparse shows its error unchanged."""

    def checked(text: str) -> Value:
        try:
            return parse(text)
        except PlanError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _num_threads(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_THREADS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from 1 to {_MOST_THREADS}."
        )
    return int(text)


def _seconds_from(least: float, most: float) -> Callable[[str], float]:
    """The parser of a number of seconds in this range."""

    def parsed(text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not least <= seconds <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number of seconds from {least:g} to {most:.0f}."
            )
        return seconds

    return parsed


def _module_name(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a package as in an import.")
    return text


Option = Callable[[argparse.ArgumentParser], object]
"""Adds an option to the parser of a command."""


def _option(words: str, text: str, **settings: Any) -> Option:
    """An option with its help; the words are its name and its value. An argument has no hyphens."""
    name, _, value = words.partition(" ")
    return lambda command: command.add_argument(name, help=text, metavar=value or None, **settings)


def _flag(name: str, text: str) -> Option:
    return lambda command: command.add_argument(name, help=text, action="store_true")


def _seconds(
    name: str, text: str, default: float, least: float = 0.0, most: float = _MOST_SECONDS
) -> Option:
    """A number of seconds in this range."""
    text = f"{text} (default: %(default)g)"
    return _option(f"{name} SECONDS", text, default=default, type=_seconds_from(least, most))


def _look_seconds(name: str, text: str, default: float) -> Option:
    return _seconds(name, text, default, _LEAST_SECONDS, _MOST_LOOK_SECONDS)


def _repeated(words: str, text: str, **settings: Any) -> Option:
    """An option for any number of values, one at a time."""
    return _option(words, f"{text}; repeatable", action="append", default=[], **settings)


def _addresses(name: str) -> Option:
    return _option(f"{name} HOST:PORT", "addresses of the workers", nargs="+", type=_ADDRESS)


def _token_file(text: str) -> Option:
    """``--token-file``; the text names the use of the token."""
    text = (
        f"{text} (default: ${FILE_VARIABLE}, where an empty value stands for no token, or "
        f"{DEFAULT_FILE} if it exists)"
    )
    return _option("--token-file FILE", text, type=Path)


def _output(text: str, default: str) -> Option:
    """``-o`` and ``--output`` for a new or existing file; the text describes its content."""
    text = f"{text}; an existing file is replaced (default: {default})"
    return lambda command: command.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=text
    )


def _with_port(text: str) -> Address:
    """An address; without a port, a worker's default port."""
    return Address.parse(text if re.search(r":\d+$", text) else f"{text}:{DEFAULT_LISTEN.port}")


_ADDRESS = _checked(Address.parse)
_PROJECT = (
    _option(
        "config CONFIG",
        "a config of LightningCLI, with the strategy in it; of several the last one wins",
        nargs="+",
    ),
    _option("--model CLASS", "module.Class where the config has no class_path for it"),
    _option("--data CLASS", "module.Class where the config has no class_path for it"),
)
_CLUSTER = _option("cluster FILE", "the cluster file, such as cluster.yaml")
_WORKERS_TOKEN = _token_file("the token of the workers")
_WORKER = (
    _option(
        "--listen HOST:PORT",
        "address to listen on; beyond loopback only with a token; port 0 takes a free port "
        f"(default: {DEFAULT_LISTEN}; with --pair {PAIR_LISTEN}; with --join a free port)",
        type=_ADDRESS,
    ),
    _option(
        "--join HOST:PORT",
        "dial the waiting coordinator there, serve, and dial again",
        type=_ADDRESS,
    ),
    _option(
        "--name NAME",
        "with --join: the worker's name in plans (default: the machine's name and the port)",
        type=_checked(checked_name),
    ),
    _seconds("--rejoin-seconds", "with --join: end after so long without being let in", 600.0),
    _token_file("accept only coordinators and workers with this token"),
    _flag(
        "--pair",
        "first show a code, good once and for five minutes; `lightning-hetero pair` on the "
        "coordinator's machine brings the token for it",
    ),
    _option(
        "--announce",
        "answer searches on the local network for workers of this token (default: if other "
        "machines can reach the worker and the extra `discovery` is installed)",
        action=argparse.BooleanOptionalAction,
    ),
    _option("--device", "a torch device such as cuda:0 (default: %(default)s)", default="auto"),
    _option("--threads N", "compute threads on the CPU (default: torch's)", type=_num_threads),
    _option(
        "--log-level",
        "how much the worker logs (default: %(default)s)",
        default="INFO",
        type=str.upper,
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
    ),
    _repeated(
        "--allow PACKAGE",
        "a package or module whose layer classes and functions a coordinator may have "
        "imported and run here (default: none)",
        type=_module_name,
    ),
    _option(
        "--memory 10GiB",
        "the limit of the device's memory for stages (default: all of it)",
        type=_checked(parse_bytes),
    ),
    _seconds(
        "--linger-seconds",
        "how long a run with `recovery` may keep this worker while their connection is "
        "broken; 0 for not at all",
        LINGER_SECONDS,
        most=MOST_LINGER_SECONDS,
    ),
)
# The strategy's options for its own local workers; they do not use a token file: an open socket to
# listen on, and the end together with the parent process. Then how the process of a session starts,
# and its inheritance if it is not forked; on macOS the frameworks of the system do not survive a
# fork. The user's script must come last, because its own arguments follow.
_LOCAL = (
    _option("--listen-fd", argparse.SUPPRESS, type=int),
    _flag("--stop-with-stdin", argparse.SUPPRESS),
    _option(
        "--sessions",
        argparse.SUPPRESS,
        choices=("fork", "spawn"),
        default="fork" if sys.platform.startswith("linux") else "spawn",
    ),
    _option("--place", argparse.SUPPRESS),
    _option("--script", argparse.SUPPRESS, nargs=argparse.REMAINDER, default=[]),
)
_PLAN = (
    _option("profile PROFILE", "file with the measurements"),
    _repeated(
        "--pin WORKER=START:END",
        "layers from START to before END, which a worker, or the coordinator, must hold",
    ),
    _repeated("--exclude WORKER", "a worker without layers"),
    _repeated("--memory WORKER=10GiB", "memory to plan with instead of the measured memory"),
    _option("--batch-size N", "samples in a training batch", type=int),
    _option(
        "--micro-batches N", "micro-batches in a batch (default: the planner chooses)", type=int
    ),
    _option(
        "--accumulate N",
        "batches for each optimizer step, the Trainer's accumulate_grad_batches",
        type=int,
    ),
    _flag("--no-replicas", "let only one process hold each stage"),
    _option("--given PLAN", "predict this plan instead of choosing one; writes no plan"),
    _repeated(
        "--what-if [WORKER=]CARD",
        "guess a worker more with this card, such as 'RTX 4090', or another card in a worker, "
        "from published peak figures; writes no plan",
    ),
    _output("the plan", "a new plan.yaml"),
)


def _command(text: str, *options: Option) -> tuple[str, Sequence[Option]]:
    return text, options


COMMANDS = {
    "worker": _command("serve stages to one coordinator after another", *_WORKER, *_LOCAL),
    "workers": _command("list the announced workers on the local network", _WORKERS_TOKEN),
    "up": _command("start a worker on each machine of a cluster file", _CLUSTER),
    "down": _command(
        "end the workers of a cluster file",
        _CLUSTER,
        _flag("--now", "end the workers at once, also in the middle of a run"),
    ),
    "status": _command("show the state of the workers of a cluster file", _CLUSTER),
    "token": _command(
        "make the common secret of all machines of a run",
        _option(
            "file FILE",
            "file for the token; an existing file is not overwritten (default: %(default)s)",
            nargs="?",
            type=Path,
            default=DEFAULT_FILE,
        ),
        _flag(
            "--paste",
            "use the token of another machine: ask for it, or read it from standard input",
        ),
    ),
    "pair": _command(
        "give the token to a worker that shows a code",
        _option(
            "address HOST[:PORT]",
            f"where `lightning-hetero worker --pair` waits (default port: {PAIR_LISTEN.port})",
            type=_checked(_with_port),
        ),
        _option("code WORD", "the code that the worker shows", nargs="+"),
        _token_file("the token to give; it is made if there is none"),
    ),
    "doctor": _command(
        "find out why a worker cannot be used, hop by hop",
        _addresses("addresses"),
        _WORKERS_TOKEN,
        _option("--profile FILE", "measurements of a model; the link must meet its needs"),
        _option("--plan FILE", "plan of this model (default: the best plan for the profile)"),
        _look_seconds("--timeout", "deadline of each step of the connection", 10.0),
        _look_seconds("--seconds", "about how long to measure each link", 2.0),
        _flag("--json", "print all findings as JSON"),
    ),
    "profile": _command(
        "measure a model on its devices, without training",
        *_PROJECT,
        _flag("--force", "measure everything again"),
        _output("the profile", "a new profile.yaml"),
    ),
    "plan": _command("choose the layers of each device from measurements", *_PLAN),
    "schema": _command(
        "write the JSON schema of a plan or a profile, for editors",
        _option("kind", "what the file is", choices=("plan", "profile")),
        _output("the schema", "standard output"),
    ),
    "diagram": _command(
        "draw the processes of a plan with their layers",
        _option("plan PLAN", "file with the plan"),
        _option(
            "--profile FILE", "measurements; with them the picture shows devices, memory and links"
        ),
        _option("--title", "title of the picture, such as the model", default=""),
        _output(
            "the file for the picture, with the suffix .svg, .png or .mmd (Mermaid)",
            "a new architecture.svg",
        ),
    ),
    "verify": _command(
        "check whether the workers compute the same as one device",
        *_PROJECT,
        _option(
            "--plan FILE",
            "the layers of each process (default: the config's plan; 'even' if it is 'auto')",
            type=Path,
        ),
    ),
    "check": _command(
        "check whether training is right on the devices of this machine",
        _option(
            "--device DEVICE",
            "check this device, such as cuda:1; may be repeated (default: all accelerators, "
            "and the processor where there is none)",
            action="append",
        ),
        _output("the report as Markdown", "standard output"),
    ),
    "top": _command(
        "show the work of workers live",
        _addresses("workers"),
        _WORKERS_TOKEN,
        _look_seconds("--interval", "time between two looks", 2.0),
        _look_seconds("--patience", "show a worker as gone after this time without an answer", 3.0),
        _flag(
            "--once",
            "show one table and exit, with status 1 if a worker did not answer; of workers in "
            "a run it shows the time between two looks",
        ),
    ),
    "report": _command(
        "write an HTML page about a run",
        _option(
            "folder RUN_DIR",
            "folder with the run's logs, such as lightning_logs/version_0",
            type=Path,
        ),
        _output("the page", "report.html in RUN_DIR"),
    ),
    "replay": _command(
        "show what each worker of a run was after each event",
        _option(
            "record FILE",
            "the record of the run, such as lightning_logs/version_0/events.jsonl",
            type=Path,
        ),
    ),
}
"""By command, in the order of the help text: its help, and its options."""


def new_file(name: str) -> Path:
    """The path of a new file in the current folder.

    Raises:
        PlanError: If the file exists.
    """
    path = Path(name)
    if path.exists():
        raise PlanError(f"{name!r} is there already; name it with --output to replace it.")
    return path


def check_folder(what: str, path: Path | None) -> None:
    """Refuse a file without a folder, before the long work for its content.

    Args:
        what: The content of the file, such as ``"report"``.
        path: The file, if any.

    Raises:
        HeteroError: If the folder is not there, or the file is a folder.
    """
    if path is not None and not path.parent.is_dir():
        raise _no_folder(what, path)
    if path is not None and path.is_dir():
        raise _unwritable(what, path, "it is a folder")


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Write a file in this block; a write error names the file.

    Raises:
        HeteroError: If the block raises an error of the operating system.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise _no_folder(what, path) from error
    except OSError as error:
        raise _unwritable(what, path, error.strerror or str(error)) from error


def _unwritable(what: str, path: Path, why: str) -> HeteroError:
    return HeteroError(f"The {what} cannot be written to {str(path)!r}: {why}; name another file.")


def _no_folder(what: str, path: Path) -> HeteroError:
    return HeteroError(
        f"The {what} cannot be written to {str(path)!r}: there is no folder {str(path.parent)!r}; "
        "make it, or name another file."
    )
