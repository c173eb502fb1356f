"""What does not fit is named, with the amount and what would help."""

from __future__ import annotations

import re

import pytest

from lightning_hetero.errors import PlanError
from lightning_hetero.plan import COORDINATOR
from lightning_hetero.planner.candidates import Candidate, Costs, Seat
from lightning_hetero.planner.feasibility import shortages
from lightning_hetero.planner.profile import EMBEDDING, HEAD, DeviceProfile, Part, Profile
from lightning_hetero.planner.solver import Wishes, solve

from .profiles import GIB, coordinator, device, ends, profile, timing


def cluster(
    memory_gib: float, saved_gib: float = 0, own: DeviceProfile | None = None, layers: int = 4
) -> Profile:
    """One worker; a layer weighs a GiB."""
    timings = [timing("layer", 1, 1, saved_bytes=int(saved_gib * GIB))]
    memory = int(memory_gib * GIB / 0.95)
    worker = device("old-tower", 0, 0, timings=timings, memory_bytes=memory)
    parts = [Part(EMBEDDING, GIB), Part(HEAD, 0), Part("layer", GIB)]
    return profile(
        layers,
        [worker],
        own or coordinator(memory_bytes=2 * GIB),
        (),
        {"parts": parts},
        batch_size=8,
    )


def candidate(of: Profile, layers: int, in_flight: int = 2) -> Candidate:
    costs = Costs(of, {})
    own = costs.both_ends(1, embedding_left=False)
    option = costs.holder("old-tower", 1).option("float32", False)
    seats = [
        Seat(COORDINATOR, (0, 0), own.front.options[0], (EMBEDDING,)),
        Seat("old-tower", (0, layers), option),
        Seat(COORDINATOR, (layers, layers), own.behind.options[0], (HEAD,)),
    ]
    return Candidate(costs, seats, 8, in_flight)


def test_a_candidate_that_fits_has_no_shortage() -> None:
    assert shortages(candidate(cluster(4.01), 4)) == []


def test_weights_that_do_not_fit_have_to_move() -> None:
    (short,) = shortages(candidate(cluster(2.8), 4))
    assert short.text == "does not fit: `old-tower` is 1.2 GiB short; move 2 layers."


def test_activations_that_do_not_fit_may_be_recomputed() -> None:
    (short,) = shortages(candidate(cluster(6.1, saved_gib=0.5), 4))
    assert short.text == (
        "does not fit: `old-tower` is 1.9 GiB short; recompute there or move 1 layer."
    )


def test_where_neither_recomputation_nor_moving_helps_fewer_in_flight_do() -> None:
    # What is sent and received alone is more than there is.
    large = cluster(8)
    boundary = {"parts": large.model.parts, "activation_bytes_per_sample": 9 * GIB}
    large = profile(4, large.devices[1:], large.devices[0], (), boundary, batch_size=8)
    texts = {short.name: short.text for short in shortages(candidate(large, 1))}
    assert texts["coordinator"].endswith("short; use more micro-batches or fewer in flight.")


def test_unmeasured_layers_are_reported() -> None:
    unmeasured = profile(4, [device("old-tower", 0, 0, timings=[])], batch_size=8)
    (short,) = shortages(candidate(unmeasured, 4))
    assert "was not measured with these layers" in short.text


def refused(of: Profile, wishes: Wishes | None = None) -> str:
    with pytest.raises(PlanError) as error:
        solve(of, wishes)
    return str(error.value)


def test_too_many_layers() -> None:
    assert "hold 2 of 4 layers (`coordinator` 0, `old-tower` 2)" in refused(cluster(2.5))


def test_an_embedding_too_large_for_the_coordinator() -> None:
    text = refused(cluster(8, own=coordinator(memory_bytes=GIB // 2)))
    assert re.search(
        r"The embedding and the head do not fit: the coordinator is 53\d.\d MiB short", text
    )


def test_micro_batches_too_large_for_the_coordinator() -> None:
    own = coordinator(ends(), memory_bytes=4 * GIB, largest_micro_batch=3)
    text = refused(cluster(8, own=own), Wishes(micro_batches=2))
    assert "cannot run its embedding and its head on 4 samples at once: at most 3 fit" in text


def test_a_pin_too_large() -> None:
    text = refused(cluster(2.5), Wishes(pins={"old-tower": (0, 4)}))
    assert text == (
        "The pin old-tower=0:4 cannot be honoured: `old-tower` is 1.5 GiB short. "
        "At most 2 layers fit there."
    )


def test_a_pin_that_leaves_layers_without_a_device() -> None:
    assert refused(cluster(8), Wishes(pins={"old-tower": (1, 4)})) == (
        "No order of the devices takes all 4 layers: at most they hold `coordinator` 0, "
        "`old-tower` 4, and layers go to consecutive stages beside the pins old-tower=1:4. Take "
        "back a pin or an exclusion, or add a worker."
    )
