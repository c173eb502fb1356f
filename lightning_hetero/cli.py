"""The command `lightning-hetero`."""

from __future__ import annotations

import argparse
import getpass
import importlib
import logging
import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from rich.console import Console
from rich.text import Text

from .errors import HeteroError, PlanError, ProfileError, TokenError
from .model.imports import Allowed
from .planning.profile import Profile
from .planning.rendering import render
from .planning.solver import solve
from .planning.verdict import judge
from .planning.wishes import Wishes, parse_memory, parse_pin
from .runtime.address import Address
from .runtime.tls import credentials_of
from .runtime.token import DEFAULT_FILE, FILE_VARIABLE, Token, find_token_file, write_token_file
from .runtime.worker import Worker, address_of, listen
from .strategy import HeteroPipelineStrategy

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main() -> None:
    """Entry point of the command."""
    options = _parser().parse_args()
    try:
        options.run(options)
    except HeteroError as error:
        sys.exit(f"lightning-hetero: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-hetero", description="Train one model on mixed hardware."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_worker(commands)
    _add_token(commands)
    _add_profile(commands)
    _add_plan(commands)
    return parser


def _add_worker(commands: Commands) -> None:
    worker = commands.add_parser("worker", help="serve stages to one coordinator after the other")
    worker.set_defaults(run=_run_worker)
    worker.add_argument(
        "--listen",
        type=Address.parse,
        default="127.0.0.1:9999",
        metavar="HOST:PORT",
        help="beyond loopback only with a token; port 0 takes a free one (default: %(default)s)",
    )
    worker.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"listen only to those who have this token (default: ${FILE_VARIABLE}, or "
        f"{DEFAULT_FILE} if it is there; an empty variable stands for none)",
    )
    worker.add_argument(
        "--device", default="auto", help="a torch device such as cuda:0 (default: %(default)s)"
    )
    worker.add_argument(
        "--threads", type=int, metavar="N", help="compute threads on the CPU (default: torch's)"
    )
    worker.add_argument(
        "--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"]
    )
    worker.add_argument(
        "--allow",
        action="append",
        default=[],
        type=_module_name,
        metavar="PACKAGE",
        help="a package or module whose layer classes and functions may be imported and run when "
        "a coordinator asks for them; repeatable (default: none)",
    )
    # For the strategy's own local workers, which use no token: a socket that it listens on, and its
    # death; and its script with the script's arguments, which is therefore the last option.
    worker.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    worker.add_argument("--stop-with-stdin", action="store_true", help=argparse.SUPPRESS)
    worker.add_argument("--script", nargs=argparse.REMAINDER, default=[], help=argparse.SUPPRESS)


def _add_token(commands: Commands) -> None:
    token = commands.add_parser("token", help="make the secret that all machines of a run share")
    token.set_defaults(run=_make_token)
    token.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=DEFAULT_FILE,
        metavar="FILE",
        help="where to put it; nothing is overwritten (default: %(default)s)",
    )
    token.add_argument(
        "--paste",
        action="store_true",
        help="ask for the token of another machine, or read it from standard input",
    )


def _make_token(options: argparse.Namespace) -> None:
    path = options.file.expanduser().absolute()
    if options.paste:
        write_token_file(path, _pasted_token())
        print(f"Wrote the token to {path}.")
        return
    write_token_file(path, Token.new())
    print(
        f"Wrote a new token to {path}. Whoever has it may train on your workers, so copy it only "
        "to machines of the run, for instance with\n\n"
        f"  ssh MACHINE 'umask 077; mkdir -p {DEFAULT_FILE.parent}; cat > {DEFAULT_FILE}' "
        f"< {shlex.quote(str(path))}\n\n"
        "or by pasting its one line into `lightning-hetero token --paste` there. "
        "Then `lightning-hetero worker --listen 0.0.0.0:9999` finds it by itself. Elsewhere than "
        f"in {DEFAULT_FILE} it is named by `--token-file`, by `token_file=` of the strategy, or by "
        f"the environment variable {FILE_VARIABLE}."
    )


def _pasted_token() -> Token:
    """The token that stands on standard input; on a terminal it is asked for and not shown.

    Raises:
        TokenError: If it is none.
    """
    text = getpass.getpass("Token: ") if sys.stdin.isatty() else sys.stdin.readline()
    try:
        return Token.from_text(text)
    except ValueError as error:
        raise TokenError(f"Nothing was written: {error}; copy its whole line.") from None


def _add_profile(commands: Commands) -> None:
    profile = commands.add_parser(
        "profile", help="measure a model on its devices, and train nothing"
    )
    profile.set_defaults(run=_run_profile)
    profile.add_argument(
        "config", metavar="CONFIG", help="a config of LightningCLI, with the strategy in it"
    )
    profile.add_argument(
        "--model",
        metavar="CLASS",
        help="module.Class where the config has no class_path for it",
    )
    profile.add_argument(
        "--data", metavar="CLASS", help="module.Class where the config has no class_path for it"
    )
    profile.add_argument(
        "--force", action="store_true", help="measure, also what was measured before"
    )
    profile.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where it is written, in place of what is there (default: a new profile.yaml)",
    )


def _run_profile(options: argparse.Namespace) -> None:
    path = _new_file("profile.yaml") if options.output is None else Path(options.output)
    # Projects import their own modules by plain names, as `python main.py` finds them.
    sys.path.insert(0, os.getcwd())
    # LightningCLI reads the command line, and warns where it is given another.
    sys.argv = [sys.argv[0], "fit", "--config", options.config]
    cli = _ProfilingCLI(
        None if options.model is None else _class_named(options.model, pl.LightningModule),
        None if options.data is None else _class_named(options.data, pl.LightningDataModule),
        save_config_callback=None,
    )
    profile = cli.measured(options.force)
    try:
        profile.to_yaml(path)
    except OSError as error:
        raise PlanError(f"The profile cannot be written to {str(path)!r}: {error}.") from error
    Console().print(Text(f"The profile is in {path}."))


class _ProfilingCLI(LightningCLI):
    """Builds model, data and Trainer from a config, and has the strategy measure them."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing is run while the objects are made."""

    def measured(self, force: bool) -> Profile:
        """What the strategy's devices take.

        Raises:
            ProfileError: If the config has another strategy, or nothing was measured.
        """
        strategy = self.trainer.strategy
        if not isinstance(strategy, HeteroPipelineStrategy):
            raise ProfileError(
                f"The config's strategy is {type(strategy).__name__}, and only "
                "HeteroPipelineStrategy measures devices; name it under trainer.strategy."
            )
        # No run, so no folder for it either.
        self.trainer.loggers = []
        with strategy.plan_choice.only_measuring(force):
            self.trainer.fit(self.model, datamodule=self.datamodule)
        return strategy.plan_choice.measured_profile(self.model)


def _class_named(name: str, base: type) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise ProfileError(f"There is no class {name!r}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ProfileError(f"{name!r} is no {base.__name__}.")
    return found


def _add_plan(commands: Commands) -> None:
    plan = commands.add_parser("plan", help="from measurements, decide who gets which layers")
    plan.set_defaults(run=_run_plan)
    plan.add_argument("profile", metavar="PROFILE", help="file with the measurements")
    plan.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="WORKER=START:END",
        help="layers that a worker, or the coordinator, has to hold; repeatable",
    )
    plan.add_argument(
        "--exclude", action="append", default=[], metavar="WORKER", help="leave out; repeatable"
    )
    plan.add_argument(
        "--memory",
        action="append",
        default=[],
        metavar="WORKER=10GiB",
        help="memory to reckon with in place of the measured one; repeatable",
    )
    plan.add_argument("--batch-size", type=int, metavar="N", help="samples in a training batch")
    plan.add_argument(
        "--micro-batches", type=int, metavar="N", help="pieces of a batch (default: chosen)"
    )
    plan.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where the plan is written, in place of what is there (default: a new plan.yaml)",
    )


def _run_plan(options: argparse.Namespace) -> None:
    path = _new_file("plan.yaml") if options.output is None else Path(options.output)
    profile = Profile.from_yaml(options.profile)
    wishes = Wishes(
        pins=_each_once(parse_pin(text) for text in options.pin),
        exclude=options.exclude,
        memory_bytes=_each_once(parse_memory(text) for text in options.memory),
        batch_size=options.batch_size,
        micro_batches=options.micro_batches,
    )
    solution = solve(profile, wishes)
    try:
        solution.plan.to_yaml(path)
    except OSError as error:
        raise PlanError(f"The plan cannot be written to {str(path)!r}: {error}.") from error
    console = Console()
    console.print(render(judge(solution)))
    console.print(Text(f"The plan is in {path}."))


def _new_file(name: str) -> Path:
    path = Path(name)
    if path.exists():
        raise PlanError(f"{name!r} is there already; name it with --output to replace it.")
    return path


def _each_once(pairs: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name, value in pairs:
        if name in values:
            raise PlanError(f"{name!r} is given twice, as {values[name]} and {value}; keep one.")
        values[name] = value
    return values


def _run_worker(options: argparse.Namespace) -> None:
    logging.basicConfig(
        level=options.log_level, format="%(asctime)s worker %(levelname)s %(message)s"
    )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = _torch_device(options.device)
    if options.listen_fd is None:
        token_file = find_token_file(options.token_file)
        credentials = credentials_of(token_file)
        listener = listen(options.listen, credentials)
    else:
        token_file = credentials = None
        listener = socket.socket(fileno=options.listen_fd)
    if options.stop_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    friends = "everybody on this machine" if token_file is None else f"whoever has {token_file}"
    logger.info("listening on %s, computing on %s, for %s", address_of(listener), device, friends)
    allowed = Allowed(tuple(options.allow), tuple(options.script))
    Worker(listener, device, allowed=allowed, credentials=credentials).serve_forever()


def _module_name(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a package, as in an import")
    return text


def _exit_with_stdin() -> None:
    sys.stdin.buffer.read()
    # The coordinator is gone, so there is nothing to save and nobody to tell; compute threads may
    # be deep inside torch, where an orderly end would have to wait for them.
    os._exit(0)


def _torch_device(name: str) -> torch.device:
    """The device of that name, tried out.

    Raises:
        HeteroError: If this machine does not have it.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise HeteroError(f"The device {name!r} cannot be used here: {error}.") from error
    return device
