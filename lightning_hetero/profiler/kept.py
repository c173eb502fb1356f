"""The file that keeps a profile between runs, and the devices in it that must be measured again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_info
from msgspec import structs

from ..atomic_file import replacing
from ..errors import ProfileError
from ..planner.profile import Profile

logger = logging.getLogger(__name__)


class Measured(NamedTuple):
    """A profile, and the file that keeps it; None if no file is to be changed.

    Args:
        profile: The profile.
        path: The file.
    """

    profile: Profile
    path: Path | None


def distrust(measured: Measured, reasons: Mapping[str, str]) -> list[str]:
    """Mark devices in the file of a profile, so that the next start measures them again.

    Args:
        measured: The profile, as this run read or measured it.
        reasons: Why the devices with these names are to be measured again.

    Returns:
        The marked devices. A device that the file describes by other times, or whose second
        measurement agreed with its first, is not marked.
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
        write_kept(path, structs.replace(kept, devices=devices))
    return list(marked)


def write_kept(path: Path, profile: Profile) -> bool:
    """Write the file of a profile; returns whether that was possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=0o600) as file:
            file.write(profile.as_yaml().encode())
    except OSError as error:
        rank_zero_info(f"The profile cannot be written to {path}: {error}.")
        return False
    return True
