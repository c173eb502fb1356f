"""The grammar of the command line: every command with its options, and the checks of single values.

This module does not import torch, so help, errors and completion come at once. The work of a
command is in the module of its name.
"""

from __future__ import annotations

import argparse
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
    for name, (text, add_options) in COMMANDS.items():
        add_options(commands.add_parser(name, help=text, description=f"{text}."))
    return parser


def _add_worker_options(worker: argparse.ArgumentParser) -> None:
    worker.add_argument(
        "--listen",
        type=_checked(Address.parse),
        metavar="HOST:PORT",
        help="address to listen on; beyond loopback only with a token; port 0 takes a free port "
        f"(default: {DEFAULT_LISTEN}; with --join a free port)",
    )
    _add_join_options(worker)
    _add_token_option(worker, "accept only coordinators and workers with this token")
    worker.add_argument(
        "--announce",
        action=argparse.BooleanOptionalAction,
        help="answer searches on the local network for workers of this token (default: if other "
        "machines can reach the worker and the extra `discovery` is installed)",
    )
    worker.add_argument(
        "--device", default="auto", help="a torch device such as cuda:0 (default: %(default)s)"
    )
    worker.add_argument(
        "--threads", type=_count, metavar="N", help="compute threads on the CPU (default: torch's)"
    )
    worker.add_argument(
        "--log-level",
        default="INFO",
        type=str.upper,
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help="how much the worker logs (default: %(default)s)",
    )
    worker.add_argument(
        "--allow",
        action="append",
        default=[],
        type=_module_name,
        metavar="PACKAGE",
        help="a package or module whose layer classes and functions a coordinator may have "
        "imported and run here; repeatable (default: none)",
    )
    _add_owner_options(worker)
    _add_local_options(worker)


def _add_join_options(worker: argparse.ArgumentParser) -> None:
    worker.add_argument(
        "--join",
        type=_checked(Address.parse),
        metavar="HOST:PORT",
        help="dial the waiting coordinator there, serve, and dial again",
    )
    worker.add_argument(
        "--name",
        type=_checked(checked_name),
        metavar="NAME",
        help="with --join: the worker's name in plans (default: the machine's name and the port)",
    )
    worker.add_argument(
        "--rejoin-seconds",
        type=_seconds(0, _MOST_SECONDS),
        default=600.0,
        metavar="SECONDS",
        help="with --join: end after so long without being let in (default: %(default)g)",
    )


def _add_owner_options(worker: argparse.ArgumentParser) -> None:
    worker.add_argument(
        "--memory",
        type=_checked(parse_bytes),
        metavar="10GiB",
        help="the limit of the device's memory for stages (default: all of it)",
    )
    worker.add_argument(
        "--linger-seconds",
        type=_seconds(0, MOST_LINGER_SECONDS),
        default=LINGER_SECONDS,
        metavar="SECONDS",
        help="how long a run with `recovery` may keep this worker while their connection is "
        "broken; 0 for not at all (default: %(default)g)",
    )


def _add_local_options(worker: argparse.ArgumentParser) -> None:
    """The strategy's options for its own local workers; they do not use a token file."""
    # An open socket to listen on, the end together with the parent process, and the user's script.
    # The script must come last, because its own arguments follow.
    worker.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    worker.add_argument("--stop-with-stdin", action="store_true", help=argparse.SUPPRESS)
    # How the process of a session starts, and its inheritance if it is not forked. On macOS the
    # frameworks of the system do not survive a fork.
    how = "fork" if sys.platform.startswith("linux") else "spawn"
    worker.add_argument(
        "--sessions", choices=("fork", "spawn"), default=how, help=argparse.SUPPRESS
    )
    worker.add_argument("--place", help=argparse.SUPPRESS)
    worker.add_argument("--script", nargs=argparse.REMAINDER, default=[], help=argparse.SUPPRESS)


def _add_workers_options(workers: argparse.ArgumentParser) -> None:
    _add_token_option(workers, "the token of the workers")


def _add_token_options(token: argparse.ArgumentParser) -> None:
    token.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=DEFAULT_FILE,
        metavar="FILE",
        help="file for the token; an existing file is not overwritten (default: %(default)s)",
    )
    token.add_argument(
        "--paste",
        action="store_true",
        help="use the token of another machine: ask for it, or read it from standard input",
    )


def _add_doctor_options(doctor: argparse.ArgumentParser) -> None:
    _add_addresses(doctor, "addresses")
    _add_token_option(doctor, "the token of the workers")
    doctor.add_argument(
        "--profile", metavar="FILE", help="measurements of a model; the link must meet its needs"
    )
    doctor.add_argument(
        "--plan", metavar="FILE", help="plan of this model (default: the best plan for the profile)"
    )
    doctor.add_argument(
        "--timeout",
        type=_seconds(_LEAST_SECONDS, _MOST_LOOK_SECONDS),
        default=10.0,
        metavar="SECONDS",
        help="deadline of each step of the connection (default: %(default)s)",
    )
    doctor.add_argument(
        "--seconds",
        type=_seconds(_LEAST_SECONDS, _MOST_LOOK_SECONDS),
        default=2.0,
        metavar="SECONDS",
        help="about how long to measure each link (default: %(default)s)",
    )
    doctor.add_argument("--json", action="store_true", help="print all findings as JSON")


def _add_profile_options(profile: argparse.ArgumentParser) -> None:
    _add_project_options(profile)
    profile.add_argument("--force", action="store_true", help="measure everything again")
    _add_output_option(profile, "the profile", "a new profile.yaml")


def _add_plan_options(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("profile", metavar="PROFILE", help="file with the measurements")
    plan.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="WORKER=START:END",
        help="layers from START to before END, which a worker, or the coordinator, must hold; "
        "repeatable",
    )
    plan.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="WORKER",
        help="a worker without layers; repeatable",
    )
    plan.add_argument(
        "--memory",
        action="append",
        default=[],
        metavar="WORKER=10GiB",
        help="memory to plan with instead of the measured memory; repeatable",
    )
    plan.add_argument("--batch-size", type=int, metavar="N", help="samples in a training batch")
    plan.add_argument(
        "--micro-batches",
        type=int,
        metavar="N",
        help="micro-batches in a batch (default: the planner chooses)",
    )
    plan.add_argument(
        "--accumulate",
        type=int,
        metavar="N",
        help="batches for each optimizer step, the Trainer's accumulate_grad_batches",
    )
    plan.add_argument(
        "--no-replicas", action="store_true", help="let only one process hold each stage"
    )
    _add_questions(plan)
    _add_output_option(plan, "the plan", "a new plan.yaml")


def _add_questions(plan: argparse.ArgumentParser) -> None:
    plan.add_argument(
        "--given",
        metavar="PLAN",
        help="predict this plan instead of choosing one; writes no plan",
    )
    plan.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="[WORKER=]CARD",
        help="guess a worker more with this card, such as 'RTX 4090', or another card in a worker, "
        "from published peak figures; writes no plan; repeatable",
    )


def _add_schema_options(schema: argparse.ArgumentParser) -> None:
    schema.add_argument("kind", choices=("plan", "profile"), help="what the file is")
    _add_output_option(schema, "the schema", "standard output")


def _add_diagram_options(diagram: argparse.ArgumentParser) -> None:
    diagram.add_argument("plan", metavar="PLAN", help="file with the plan")
    diagram.add_argument(
        "--profile",
        metavar="FILE",
        help="measurements; with them the picture shows devices, memory and links",
    )
    diagram.add_argument("--title", default="", help="title of the picture, such as the model")
    text = "the file for the picture, with the suffix .svg, .png or .mmd (Mermaid)"
    _add_output_option(diagram, text, "a new architecture.svg")


def _add_check_options(check: argparse.ArgumentParser) -> None:
    check.add_argument(
        "--device",
        action="append",
        metavar="DEVICE",
        help="check this device, such as cuda:1; may be repeated (default: all accelerators, and "
        "the processor where there is none)",
    )
    _add_output_option(check, "the report as Markdown", "standard output")


def _add_verify_options(verify: argparse.ArgumentParser) -> None:
    _add_project_options(verify)
    verify.add_argument(
        "--plan",
        metavar="FILE",
        type=Path,
        help="the layers of each process (default: the config's plan; 'even' if it is 'auto')",
    )


def _add_top_options(top: argparse.ArgumentParser) -> None:
    _add_addresses(top, "workers")
    _add_token_option(top, "the token of the workers")
    top.add_argument(
        "--interval",
        type=_seconds(_LEAST_SECONDS, _MOST_LOOK_SECONDS),
        default=2.0,
        metavar="SECONDS",
        help="time between two looks (default: %(default)s)",
    )
    top.add_argument(
        "--patience",
        type=_seconds(_LEAST_SECONDS, _MOST_LOOK_SECONDS),
        default=3.0,
        metavar="SECONDS",
        help="show a worker as gone after this time without an answer (default: %(default)s)",
    )
    top.add_argument(
        "--once",
        action="store_true",
        help="show one table and exit, with status 1 if a worker did not answer; of workers in a "
        "run it shows the time between two looks",
    )


def _add_cluster_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("cluster", metavar="FILE", help="the cluster file, such as cluster.yaml")


def _add_down_options(down: argparse.ArgumentParser) -> None:
    _add_cluster_options(down)
    down.add_argument(
        "--now", action="store_true", help="end the workers at once, also in the middle of a run"
    )


def _add_report_options(report: argparse.ArgumentParser) -> None:
    report.add_argument(
        "folder",
        type=Path,
        metavar="RUN_DIR",
        help="folder with the run's logs, such as lightning_logs/version_0",
    )
    _add_output_option(report, "the page", "report.html in RUN_DIR")


def _add_replay_options(replay: argparse.ArgumentParser) -> None:
    replay.add_argument(
        "record",
        type=Path,
        metavar="FILE",
        help="the record of the run, such as lightning_logs/version_0/events.jsonl",
    )


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "worker": ("serve stages to one coordinator after another", _add_worker_options),
    "workers": ("list the announced workers on the local network", _add_workers_options),
    "up": ("start a worker on each machine of a cluster file", _add_cluster_options),
    "down": ("end the workers of a cluster file", _add_down_options),
    "status": ("show the state of the workers of a cluster file", _add_cluster_options),
    "token": ("make the common secret of all machines of a run", _add_token_options),
    "doctor": ("find out why a worker cannot be used, hop by hop", _add_doctor_options),
    "profile": ("measure a model on its devices, without training", _add_profile_options),
    "plan": ("choose the layers of each device from measurements", _add_plan_options),
    "schema": ("write the JSON schema of a plan or a profile, for editors", _add_schema_options),
    "diagram": ("draw the processes of a plan with their layers", _add_diagram_options),
    "verify": ("check whether the workers compute the same as one device", _add_verify_options),
    "check": ("check whether training is right on the devices of this machine", _add_check_options),
    "top": ("show the work of workers live", _add_top_options),
    "report": ("write an HTML page about a run", _add_report_options),
    "replay": ("show what each worker of a run was after each event", _add_replay_options),
}
"""By command, in the order of the help text: its help, and what adds its options."""


def _add_project_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "config",
        metavar="CONFIG",
        nargs="+",
        help="a config of LightningCLI, with the strategy in it; of several the last one wins",
    )
    command.add_argument(
        "--model",
        metavar="CLASS",
        help="module.Class where the config has no class_path for it",
    )
    command.add_argument(
        "--data", metavar="CLASS", help="module.Class where the config has no class_path for it"
    )


def _add_addresses(command: argparse.ArgumentParser, name: str) -> None:
    """Add the addresses of one or more workers as the argument ``name``."""
    command.add_argument(
        name,
        nargs="+",
        type=_checked(Address.parse),
        metavar="HOST:PORT",
        help="addresses of the workers",
    )


def _add_token_option(command: argparse.ArgumentParser, text: str) -> None:
    """Add ``--token-file``; the text names the use of the token."""
    command.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"{text} (default: ${FILE_VARIABLE}, where an empty value stands for no token, or "
        f"{DEFAULT_FILE} if it exists)",
    )


def _add_output_option(command: argparse.ArgumentParser, text: str, default: str) -> None:
    """Add ``-o`` and ``--output`` for a new or existing file; the text describes its content."""
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"{text}; an existing file is replaced (default: {default})",
    )


def _checked(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """The parser of a value; argparse shows its error unchanged."""

    def checked(text: str) -> Value:
        try:
            return parse(text)
        except PlanError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1.")
    return int(text)


def _seconds(least: float, most: float) -> Callable[[str], float]:
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
        HeteroError: If the folder is not there.
    """
    if path is not None and not path.parent.is_dir():
        raise _no_folder(what, path)


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
        raise HeteroError(
            f"The {what} cannot be written to {str(path)!r}: {error.strerror or error}; name "
            "another file."
        ) from error


def _no_folder(what: str, path: Path) -> HeteroError:
    return HeteroError(
        f"The {what} cannot be written to {str(path)!r}: there is no folder {str(path.parent)!r}; "
        "make it, or name another file."
    )
