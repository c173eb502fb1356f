"""A stand-in for `srun`: no SLURM runs here."""

from __future__ import annotations

from pathlib import Path

# Reads its words as srun does: options, a program with its words, and a colon before the next
# component. Passes SIGTERM on to all processes of the tasks.
_SRUN = r"""#!/usr/bin/env python3
import os, re, signal, subprocess, sys
line, tasks = sys.argv[1:] + [":"], []
signal.signal(signal.SIGTERM, lambda *_: [os.killpg(task.pid, signal.SIGTERM) for task in tasks])
while line:
    end = line.index(":")
    component, line = line[:end], line[end + 1 :]
    program = component.index("sh")
    count = int(re.search(r"-n *([0-9]+)", " ".join(component[:program]))[1])
    for _ in range(count):
        number = {"SLURM_PROCID": str(len(tasks))}
        environment = {**os.environ, **number}
        tasks.append(
            subprocess.Popen(component[program:], env=environment, start_new_session=True)
        )
sys.exit(max(task.wait() for task in tasks))
"""


def stand_in_srun(folder: Path) -> Path:
    """A program that starts the tasks of all components on this machine, and waits for them."""
    program = folder / "srun"
    program.write_text(_SRUN)
    program.chmod(0o755)
    return program
