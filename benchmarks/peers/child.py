"""One process of a peer: ``python -m benchmarks.peers.child JOB``; `main.py` starts it."""

from __future__ import annotations

import importlib
import sys

from benchmarks.peers.job import Job
from benchmarks.processes import be_quiet

MODULES = {
    "one core": "one_device",
    "one core, whole batches": "one_device",
    "torch 1F1B": "torch_pipeline",
    "torch 1F1B, even split": "torch_pipeline",
    "torch GPipe": "torch_pipeline",
    "torch DDP": "data_parallel",
    "torch DDP, unequal": "data_parallel",
    "Ray server": "parameter_server",
    "hetero": "hetero",
    "hetero, cut layers": "hetero",
    "hetero, replicas": "hetero",
    "hetero, replicas, optimizer split": "hetero",
    "hetero, replicas, a worker beside": "hetero",
    "hetero, coordinator first": "hetero",
    "hetero, 16-bit wire": "hetero",
}


def main() -> None:
    be_quiet()
    job = Job.read(sys.argv[1])
    # Each peer needs libraries of its own, whose memory is not that of the others.
    importlib.import_module(f"benchmarks.peers.{MODULES[job.peer]}").run(job)


if __name__ == "__main__":
    main()
