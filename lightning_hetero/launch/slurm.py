"""Workers placed by SLURM: one `srun`, heterogeneous if it has several components.

    srun --gres=gpu:a100:1 -n4 worker … : --gres=gpu:v100:1 -n8 worker …

SLURM starts the tasks and ends them; it does not carry tensors. Each task is a joining worker; its
shell starts the worker again if it is killed. If srun itself ends, for example after the end of its
allocation on a node, all workers are lost, and srun is started once more.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import PlanError
from ..transport.address import Address
from ..transport.token import Token
from .launcher import Command, check_wishes, reachable, start_command

# If the coordinator is gone and srun goes on, the worker ends by itself after this time.
_REJOIN_SECONDS = 60
_NAME = "slurm-"
# Counts the tasks of all components of a step from 0 on.
_TASK = "$SLURM_PROCID"
# Runs a command in the shell of a task, and again if a signal has ended it. srun ends a step by
# SIGTERM to all of its processes, the command too; the shell then waits for the command. The braces
# end a comment in the user's command.
_AGAIN = (
    "trap 'wait $worker; exit' TERM; "
    "while :; do {{ {}\n}} & worker=$!; wait $worker; status=$?; "
    "[ $status -gt 128 ] || exit $status; sleep 1; done"
)


@dataclass
class SlurmWorkers:
    """Starts workers by one ``srun`` for a run, a worker in each task, and ends it with the run.

    Plans call the workers ``slurm-0``, ``slurm-1``, …, in the order of the components. The nodes
    need this package and the token's file; a shared home folder has both.

    Args:
        components: srun's options for each kind of node, such as
            ``["--gres=gpu:a100:1 -n4", "--gres=gpu:v100:1 -n8"]``.
        command: How the nodes call this package's command: words of their shell.
        options: More options of ``lightning-hetero worker``.
        srun: srun with options for all components, such as ``["srun", "--partition=gpu"]``.
        join: The ``host:port`` at which the nodes reach this process; found by default.
        listen: Where this process waits for the workers, as ``host:port``; port 0 takes a free
            port.
        least: How many workers the run needs; 0 for all, as counted by ``-n`` or ``--ntasks``.
        most: How many workers the run takes; by default all.
        wait_seconds: How long to wait for them, in SLURM's queue too.

    Raises:
        PlanError: If an argument is invalid.
    """

    components: list[str]
    command: str = "lightning-hetero"
    options: list[str] = field(default_factory=list)
    srun: list[str] = field(default_factory=lambda: ["srun"])
    join: str | None = None
    listen: str = "0.0.0.0:0"
    least: int = 0
    most: int | None = None
    wait_seconds: float = 3600.0
    brings_token: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.components:
            raise PlanError(
                "The argument `components` of SlurmWorkers is empty; write srun's options for at "
                "least one kind of node, such as '--gres=gpu:1 -n4'."
            )
        self.least = self.least or sum(tasks_of(component) for component in self.components)
        check_wishes(self, join=self.join)
        self._srun: Command | None = None

    def start(self, join: Address, token: Token | None) -> None:
        """Start srun; it waits for its nodes.

        Raises:
            WorkerError: If srun is missing here.
        """
        where = Address.parse(self.join) if self.join else reachable(join)
        # srun goes on when its input ends, also in the queue.
        self._srun = start_command("srun", self._words(where), ends_with_us=True)

    def start_again(self, name: str) -> str:
        """Start srun once more if it has ended, at most every few seconds. All workers that it
        starts come again, by their names.

        Returns:
            A sentence on that; empty if srun still runs, or the worker is none of its tasks.
        """
        if self._srun is None or not name.startswith(_NAME):
            return ""
        self._srun, said = self._srun.started_again(name)
        return said

    def stop(self) -> None:
        """End srun, and with it the workers. May be called twice."""
        srun, self._srun = self._srun, None
        if srun is not None:
            srun.process.terminate()  # srun passes it on to each task
            srun.stop()

    def faults(self, is_late: bool) -> list[str]:
        """A sentence on srun if it has ended, or if the wait is over."""
        srun = self._srun
        if srun is not None and srun.status is not None:
            return [
                f"srun ended with status {srun.status}.{srun.printed_words} Start that command by "
                f"hand to see more: {shlex.join(srun.words)}"
            ]
        if srun is None or not is_late:
            return []
        return [
            f"srun still runs; `squeue` shows the reason for its wait.{srun.printed_words} Raise "
            "`wait_seconds` if the queue is long."
        ]

    def _words(self, join: Address) -> list[str]:
        """The command line, with a colon between two components."""
        words = ["worker", "--join", str(join), "--rejoin-seconds", str(_REJOIN_SECONDS)]
        words += ["--log-level", "WARNING", *self.options]
        task = _AGAIN.format(f'{self.command} {shlex.join(words)} --name "{_NAME}{_TASK}"')
        line: list[str] = [*self.srun]
        for number, component in enumerate(self.components):
            colon = [":"] if number else []
            line += [*colon, *shlex.split(component), "sh", "-c", task]
        return line


def tasks_of(component: str) -> int:
    """How many tasks srun starts for a component, by its ``-n`` or ``--ntasks``; 1 without it.

    Raises:
        PlanError: If the quotes of the text are not closed.
    """
    try:
        words = shlex.split(component)
    except ValueError as error:
        raise PlanError(
            f"{component!r} is not a list of options: {error}; close each quote."
        ) from error
    return _count_in(words) or 1


def _count_in(words: Sequence[str]) -> int:
    found = re.search(r"(?:^|\0)(?:-n\0?|--ntasks(?:=|\0))([0-9]+)(?:\0|$)", "\0".join(words))
    return int(found[1]) if found else 0
