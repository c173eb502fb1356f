"""What is almost right, told to pairing ends, the decoder, a door and a live worker; then a run.

python -m tests.fuzz.main [FRAMES] [CONVERSATIONS] [SEED] [PAIRINGS]

One pairing in `PAIRINGS_OF_REAL_ONE` computes in the group of the package, the others in a quick
one.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from random import Random

import torch

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import RemoteProtocolError
from lightning_hetero.transport.compatibility import Identity

from ..conftest import worker_process
from ..faults.scene import be_quiet
from ..launch.guests import knock
from ..models import TinyModule, loader, trainer
from .mutations import mutated, mutated_conversation
from .pairing import fuzz_pairing, quick_group
from .recording import RecordedFrame, joiner_hello, record
from .targets import LiveWorker, OpenDoor, decode, fuzzed_door

# What this machine can spare: a worker that asked for more would be refused instead of killed.
MOST_ADDRESSED_BYTES = 24 * 2**30

PAIRINGS_OF_REAL_ONE = 50


def own_peak_bytes() -> int:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz_decoder(frames: list[RecordedFrame], count: int, seed: int) -> Counter[str]:
    """How many were read and how many refused; anything else is raised."""
    found: Counter[str] = Counter()
    for number in range(count):
        random = Random(f"{seed} {number}")
        try:
            decode(mutated(random, random.choice(frames)))
            found["read"] += 1
        except RemoteProtocolError:
            found["refused"] += 1
        except Exception as error:
            raise AssertionError(f"This was mutation {number} of seed {seed}.") from error
    return found


def fuzz_worker(frames: list[RecordedFrame], worker: LiveWorker, count: int, seed: int) -> None:
    for number in range(count):
        worker.hear(mutated_conversation(Random(f"{seed} {number}"), frames))


def fuzz_door(frames: list[RecordedFrame], door: OpenDoor, count: int, seed: int) -> None:
    """Mostly Hellos that are almost right, and then the door lets an honest worker in."""
    hello = joiner_hello()
    for number in range(count):
        random = Random(f"{seed} {number}")
        frame = hello if random.random() < 0.8 else random.choice(frames)
        door.hear(mutated(random, frame))
    honest = knock(door.door, "honest", Identity())
    assert door.door.names() == ["honest"]
    honest.connection.close()


def pair_with_strangers(count: int, seed: int) -> None:
    """Say how pairings with strangers ended, and how much of tokens they got."""
    num_real, begin = -(-count // PAIRINGS_OF_REAL_ONE), time.monotonic()
    with quick_group():
        found, token_bytes = fuzz_pairing(count - num_real, seed)
    real, real_token_bytes = fuzz_pairing(num_real, seed + 1)
    seconds = time.monotonic() - begin
    say("pairing", f"{count:,} conversations in {seconds:.0f} s: {dict(found + real)}")
    token_bytes += real_token_bytes
    say("", f"{token_bytes} bytes of tokens to strangers; {num_real:,} in the real group")
    assert token_bytes == 0


def main(
    num_frames: int = 200_000,
    num_conversations: int = 2_000,
    seed: int = 0,
    num_pairings: int = 200_000,
) -> None:
    be_quiet()
    torch.set_num_threads(1)
    pair_with_strangers(num_pairings, seed)
    limit = ["prlimit", f"--as={MOST_ADDRESSED_BYTES}"]
    with worker_process(prefix=limit) as process:
        frames = record(process.address)
        say("recorded", f"{len(frames)} frames: {dict(Counter(frame.kind for frame in frames))}")
        before, begin = own_peak_bytes(), time.monotonic()
        found = fuzz_decoder(frames, num_frames, seed)
        seconds = time.monotonic() - begin
        say("decoder", f"{num_frames:,} frames in {seconds:.0f} s: {dict(found)}")
        say(
            "its memory", f"{megabytes(before)} at most before, {megabytes(own_peak_bytes())} after"
        )
        begin = time.monotonic()
        with fuzzed_door() as door:
            fuzz_door(frames, door, num_conversations, seed)
        seconds = time.monotonic() - begin
        say("door", f"{num_conversations:,} Hellos in {seconds:.0f} s: {door.answers}")
        say("its memory", f"{megabytes(own_peak_bytes())} at most")
        worker = LiveWorker(process.address, process.process.pid)
        before, begin = worker.memory_bytes(), time.monotonic()
        fuzz_worker(frames, worker, num_conversations, seed)
        seconds = time.monotonic() - begin
        say("live worker", f"{num_conversations:,} conversations in {seconds:.0f} s")
        say("last answers", str(worker.answers))
        after, peak = worker.memory_bytes(), worker.memory_bytes("VmHWM")
        say("its memory", f"{megabytes(before)} before, {megabytes(after)} after, ")
        say("", f"{megabytes(peak)} at most")
        module = TinyModule()
        strategy = HeteroPipelineStrategy([process.address], "even", micro_batches=4)
        trainer(strategy, max_steps=3).fit(module, loader(36, 12))
        say("a normal run", f"losses {', '.join(f'{loss:.4f}' for loss in module.losses)}")


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MB"


def say(what: str, text: str) -> None:
    sys.stdout.write(f"{what:14}{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
