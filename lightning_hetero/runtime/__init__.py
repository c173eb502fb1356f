"""Where it runs: two kinds of processes, and what they say to each other.

channels/       sockets, TLS, threads that send and receive
worker/         the process on a device of the fleet
coordinator/    the process of the Trainer
finding/        workers on the local network, and what they do now
mesh/           a WireGuard mesh between networks

translation.py  what the pipeline passes on, as messages with tensors, and back
outgoing.py     sends it while it is still being copied from the device
sent.py         tells a recorder what was sent
building.py     layers as a description, and from one
keeping.py      tensors of the last run that need not be sent again
measuring.py    trials of the profiler as messages
device.py       what this process computes on
equipment.py    what it runs on, as it tells whoever it talks to
health.py       how its device is
"""
