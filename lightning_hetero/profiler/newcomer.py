"""Measures one worker that joins during a run, while the others wait between two steps.

What is known already is not measured: a device from the profile's file, or one that equals another
worker's. Links to other workers are not measured during a run; they count as the way over the
coordinator, which is the longest that there is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from ..coordinator.connections import Connections
from ..coordinator.member import Member
from ..plan import COORDINATOR
from ..planner.profile import DeviceProfile, Link, Profile, fit_link, in_series
from ..protocol import messages as m
from ..protocol.frames import Content
from ..transport.link_probe import measure_link, payload
from .model_view import Subject
from .trials import LayerSchedule, failure, layer_jobs, outcome_of, patience_seconds, trials

# The others wait for so long, or a little longer.
_LAYER_SECONDS = 2.0
_LINK_SECONDS = 0.3


@dataclass(frozen=True)
class NewcomerTrials:
    """What a worker has to run to be measured.

    Args:
        subject: The model, with one example of how it calls its layers.
        prepared: The message from which a worker builds the layers.
    """

    subject: Subject
    prepared: Content

    @classmethod
    def of(cls, subject: Subject) -> NewcomerTrials:
        """The trials of a model, of which all sizes of micro-batches are known."""
        return cls(subject, subject.blueprint.for_workers())

    def at_size(self, size: int) -> NewcomerTrials:
        """The trials for micro-batches of this many samples, or of the next size that is known."""
        sizes = sorted(self.subject.examples)
        kept = next((known for known in sizes if known >= size), sizes[-1])
        examples = {kept: self.subject.examples[kept]}
        return replace(self, subject=replace(self.subject, examples=examples))

    def measure(
        self, connections: Connections, worker: Member, described: m.DeviceDescribed
    ) -> DeviceProfile:
        """Measure the layers on a worker that has no stage yet.

        Raises:
            ChannelError: If it is lost.
            WorkerError: If it cannot run the layers.
        """
        message, tensors = self.prepared
        worker.channel.send(message, *tensors)
        answer = connections.await_from(worker, (m.Done, m.NotMeasured))
        if isinstance(answer, m.NotMeasured):
            raise failure(f"{worker.name} cannot build the layers that it is to measure", answer)
        subject = self.subject
        jobs = layer_jobs(subject.kinds, sorted(subject.examples), [subject.dtype])
        end_seconds = time.monotonic() + _LAYER_SECONDS
        schedule = LayerSchedule(jobs, end_seconds, described.free_bytes)
        patience = patience_seconds(_LAYER_SECONDS, len(jobs))
        running = trials(subject, schedule, patience, time.monotonic, worker.name)
        trial = next(running)
        while True:
            said, sent = trial.encode()
            worker.channel.send(said, *sent)
            found = connections.await_from(worker, (trial.answer, m.NotMeasured))
            try:
                trial = running.send(outcome_of(trial, found))
            except StopIteration as end:
                result = end.value
                break
        return DeviceProfile(
            name=worker.name,
            device=described.device,
            memory_bytes=_usable_bytes(described),
            base_bytes=described.base_bytes,
            timings=result.timings,
            optimizer_seconds={k: f.step_seconds for k, f in result.optimizers.items()},
            largest_micro_batch=result.largest_micro_batch,
            versions=described.versions,
        )


def describe(connections: Connections, worker: Member) -> m.DeviceDescribed:
    """The device of a worker that has no stage yet.

    Raises:
        ChannelError: If it is lost.
        WorkerError: If it does not answer in time.
    """
    worker.channel.send(m.DescribeDevice())
    return connections.await_from(worker, m.DeviceDescribed)


def links_with(
    connections: Connections, worker: Member, others: Sequence[str], known: Sequence[Link]
) -> list[Link]:
    """The links of a worker that has no stage yet, in both directions.

    Args:
        connections: The workers.
        worker: The new one.
        others: The other workers.
        known: The links of the others with the coordinator, and any that are known of the worker.

    Raises:
        ChannelError: If it is lost.
        WorkerError: If it does not answer in time.
    """

    def exchange(there_bytes: int, back_bytes: int) -> None:
        worker.channel.send(m.Probe(back_bytes), *payload(there_bytes))
        connections.await_from(worker, m.ProbeAnswer)

    measured = measure_link(exchange, _LINK_SECONDS)
    name = worker.name
    there = fit_link(COORDINATOR, name, [(s.num_bytes, s.seconds) for s in measured.there])
    back = fit_link(name, COORDINATOR, [(s.num_bytes, s.seconds) for s in measured.back])
    found = {(link.source, link.target): link for link in known}
    new = {(COORDINATOR, name): there, (name, COORDINATOR): back}
    for other in others:
        out, home = found.get((COORDINATOR, other)), found.get((other, COORDINATOR))
        if out is not None and home is not None:
            new[name, other] = in_series(back, out)
            new[other, name] = in_series(home, there)
    return [found.get(ends, link) for ends, link in new.items()]


def known_device(
    name: str, described: m.DeviceDescribed, known: Iterable[DeviceProfile]
) -> DeviceProfile | None:
    """What was measured on one of these devices, if it equals a worker's; None otherwise.

    Args:
        name: The worker's name in plans.
        described: Its device.
        known: Devices that were measured; the coordinator's is left out.
    """
    for device in known:
        is_equal = (device.device, device.versions) == (described.device, described.versions)
        if is_equal and device.name != COORDINATOR and not device.stale:
            return structs.replace(
                device,
                name=name,
                memory_bytes=_usable_bytes(described),
                base_bytes=described.base_bytes,
            )
    return None


def with_newcomer(profile: Profile, device: DeviceProfile, links: Sequence[Link]) -> Profile:
    """The profile with a further worker."""
    devices = [known for known in profile.devices if known.name != device.name]
    others = [link for link in profile.links if device.name not in (link.source, link.target)]
    return structs.replace(profile, devices=[*devices, device], links=[*others, *links])


def _usable_bytes(described: m.DeviceDescribed) -> int:
    return max(1, described.base_bytes + described.free_bytes)
