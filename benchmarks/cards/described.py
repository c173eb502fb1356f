"""What is known of devices: `python -m benchmarks.cards.described [DEVICE ...]` prints it as JSON.

It is a process of its own: a process that has looked at a card keeps memory there until its end.
"""

from __future__ import annotations

import importlib.util
import json
import sys

import torch

from benchmarks.cards.jobs import FINE_TUNE_LIBRARIES
from lightning_hetero.devices.description import accelerators_here, equipment_here, named_device


def main() -> None:
    """Print the devices that were named, or else the accelerators."""
    found = {}
    versions: dict[str, str] = {}
    for name in sys.argv[1:] or accelerators_here():
        device = named_device(name)
        equipment = equipment_here(device)
        versions.update(equipment.versions)
        found[str(device)] = {
            "title": equipment.device_name,
            "memory_bytes": equipment.memory_bytes,
            "num_processors": num_processors(device),
        }
    libraries = [name for name in FINE_TUNE_LIBRARIES if importlib.util.find_spec(name)]
    print(json.dumps({"devices": found, "versions": versions, "libraries": libraries}))


def num_processors(device: torch.device) -> int | None:
    """The multiprocessors that this process may use; None where there is no such number.

    Under CUDA MPS it is the process's part of the card.
    """
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


if __name__ == "__main__":
    main()
