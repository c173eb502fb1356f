"""The file of a profile between runs, and the rules for its still valid part.

The cache holds one file per model and per setting with an effect on the measured times. A device is
measured again if it has changed, if it has other libraries now, or if real steps have contradicted
its times.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info
from msgspec import structs

from ..atomic_file import folder_in_cache, replacing
from ..errors import ProfileError
from ..plan import COORDINATOR
from ..planner.drift import Misjudged
from ..planner.profile import DeviceProfile, Link, Measured, Profile
from ..protocol.messages import DeviceDescribed
from .measured_model import ModelIdentity
from .trials import MEASURE_AGAIN, job_of, seconds_of

logger = logging.getLogger(__name__)

TO_MEASURE_AGAIN = "to measure again, use `PipelineProfiler(force=True)` or delete the file"

# Of the digest in the name of a file.
_NUM_DIGITS = 12
# The largest ratio of two agreeing measurements of equal work.
_MOST_TIMES = 1.5


def distrust(measured: Measured, reasons: Mapping[str, str]) -> list[str]:
    """Mark devices in the file of a profile, so that the next start measures them again.

    Args:
        measured: The profile, as this run read or measured it.
        reasons: The reasons for new measurements, by the names of the devices.

    Returns:
        The marked devices. A device is not marked if the file has other times for it, or if its
        second measurement agreed with its first.
    """
    path = measured.path
    if path is None:
        return []
    try:
        kept = Profile.from_yaml(path)
    except ProfileError as error:
        logger.warning("The measurements cannot be marked as wrong. %s", error)
        return []
    used = {device.name: device.timings for device in measured.profile.devices}
    marked = {
        device.name: structs.replace(device, stale=reasons[device.name])
        for device in kept.devices
        if device.name in reasons and not device.confirmed and used[device.name] == device.timings
    }
    if marked:
        devices = [marked.get(device.name, device) for device in kept.devices]
        _write(path, structs.replace(kept, devices=devices))
    return list(marked)


def mark_wrong(measured: Measured, found: Misjudged) -> str:
    """Mark wrong measurements in their file, and return a sentence on the consequences."""
    marked = distrust(measured, {name: found.reason(name) for name in found.names})
    said = []
    if marked:
        said.append(
            f"The next start measures {' and '.join(marked)} again and plans anew; "
            f"{measured.path} has the mark."
        )
    left = [name for name in found.names if name not in marked]
    if left:
        said.append(
            f"{' and '.join(left)} will not be measured again by itself: its file has other "
            "figures by now, or a second measurement agreed with the first; then training "
            f"itself, or another program, disturbs the device. {MEASURE_AGAIN}"
        )
    return " ".join(said)


def _write(path: Path, profile: Profile) -> bool:
    """Write the file of a profile; returns whether that was possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=0o600) as file:
            file.write(profile.as_yaml().encode())
    except OSError as error:
        rank_zero_info(f"The profile cannot be written to {path}: {error}.")
        return False
    return True


def cache_folder() -> Path | None:
    """The folder of this user's cached profiles, if the user has a home folder."""
    return folder_in_cache("profiles")


def cache_file(identity: ModelIdentity) -> Path | None:
    """The cache file of a model and its settings, if the user has a home folder."""
    folder = cache_folder()
    if folder is None:
        return None
    text = repr((identity.fingerprint, sorted(identity.settings.items())))
    digest = hashlib.sha256(text.encode()).hexdigest()[:_NUM_DIGITS]
    return folder / f"{identity.model_name}-{digest}.yaml"


def read_known(path: Path | None, identity: ModelIdentity) -> Profile | None:
    """The cached profile of this model. If it cannot be used, log the reason."""
    # False also if this user may not look.
    if path is None or not os.path.exists(path):
        return None
    try:
        profile = Profile.from_yaml(path)
    except ProfileError as error:
        rank_zero_info(f"The profile is measured again. {error}")
        return None
    if profile.model.fingerprint != identity.fingerprint:
        rank_zero_info(f"{path} is the profile of another model, so this model is measured again.")
        return None
    settings = identity.settings
    differing = [
        f"{key} (was {profile.settings.get(key)!r}, is {settings.get(key)!r})"
        for key in sorted({*settings, *profile.settings})
        if settings.get(key) != profile.settings.get(key)
    ]
    if differing:
        rank_zero_info(f"The profile {path} is measured again: other {', '.join(differing)}.")
        return None
    if unknown := [each.name for each in profile.devices if each.software_seconds is None]:
        rank_zero_info(
            f"The profile {path} has no `software_seconds` of {', '.join(unknown)}, so plans count "
            f"none there; {TO_MEASURE_AGAIN}."
        )
    return profile


def write_known(path: Path | None, profile: Profile) -> None:
    """Write the cache file; a reader sees the old one or the new one.

    The profile is valid without its file, so a write error is only logged.
    """
    if path is None:
        rank_zero_info(
            "The profile is not kept, as this user has no home folder: set XDG_CACHE_HOME or HOME."
        )
    elif _write(path, profile):
        rank_zero_info(f"the measurements are kept in {path}; {TO_MEASURE_AGAIN}")


def still_true(profile: Profile, described: Mapping[str, DeviceDescribed]) -> Profile:
    """The profile without changed devices, and without devices with other libraries now."""
    present = {name: (found.device, found.versions) for name, found in described.items()}
    names = []
    for known in profile.devices:
        if known.stale and known.name in present:
            rank_zero_info(f"{known.name} is measured again: {known.stale}")
        elif present.get(known.name) in (None, (known.device, known.versions)):
            names.append(known.name)
    return restricted(profile, names)


def compared(new: Profile, old: Profile) -> Profile:
    """The new measurements; a formerly stale device notes whether its old ones agree with them."""
    stale = {device.name: device for device in old.devices if device.stale}
    devices = [
        structs.replace(
            device,
            confirmed=_agree(device, old_one),
            price_per_hour=old_one.price_per_hour,
            watts=old_one.watts,
        )
        if (old_one := stale.get(device.name))
        else device
        for device in new.devices
    ]
    return structs.replace(new, devices=devices)


def _agree(new: DeviceProfile, old: DeviceProfile) -> bool:
    before = {job_of(timing): seconds_of(timing) for timing in old.timings}
    pairs = [
        sorted((seconds_of(timing), before[job_of(timing)]))
        for timing in new.timings
        if job_of(timing) in before
    ]
    return all(most <= _MOST_TIMES * least for least, most in pairs)


def merged(new: Profile, old: Profile | None) -> Profile:
    """A profile, completed with the devices and links of an older one.

    If the new profile lacks the coordinator, the model comes from the older one: only the
    coordinator measures the optimizer's step over the ends.
    """
    if old is None:
        return new
    names = {device.name for device in new.devices}
    model = new.model
    if COORDINATOR not in names:
        model = structs.replace(
            old.model,
            embedding_may_leave=model.embedding_may_leave,
            # Its user may have written that it must stay.
            head_may_leave=old.model.head_may_leave and model.head_may_leave,
            logits_bytes_per_sample=model.logits_bytes_per_sample,
        )
    ends = {(link.source, link.target) for link in new.links}
    return structs.replace(
        new,
        model=model,
        devices=[*new.devices, *(device for device in old.devices if device.name not in names)],
        links=[*new.links, *(link for link in old.links if _ends(link) not in ends)],
    )


def restricted(profile: Profile, names: Sequence[str]) -> Profile:
    """The part of a profile for some devices, in their order."""
    return structs.replace(
        profile,
        devices=[profile.device(name) for name in names],
        links=[link for link in profile.links if {*_ends(link)} <= {*names}],
    )


def pairs_without_link(names: Sequence[str], links: Iterable[Link]) -> list[tuple[str, str]]:
    """Pairs of processes without a measured link, each once."""
    known = {_ends(link) for link in links}
    return [pair for pair in itertools.combinations(names, 2) if not {pair, pair[::-1]} <= known]


def _ends(link: Link) -> tuple[str, str]:
    return link.source, link.target
