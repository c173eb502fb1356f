"""The file of what was measured: where it is, what it is for, and whether it is to be believed."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info

from ..atomic_file import replacing
from ..errors import ProfileError
from ..planner.profile import Profile

logger = logging.getLogger(__name__)

_NUM_DIGITS = 12


def cache_folder() -> Path:
    """Where programs of this user keep what can be made again."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    # As its specification says, a relative one is invalid and ignored.
    base = Path(folder) if os.path.isabs(folder) else Path.home() / ".cache"
    return base / "lightning-hetero" / "profiles"


@dataclass(frozen=True)
class Identity:
    """What a profile is of.

    Args:
        model_name: The LightningModule's class, for people.
        fingerprint: Tells the model from others.
        settings: What else measurements hold for.
    """

    model_name: str
    fingerprint: str
    settings: Mapping[str, str]


def cache_file(identity: Identity) -> Path:
    """The file for a model and for what its measurements hold for."""
    text = repr((identity.fingerprint, sorted(identity.settings.items())))
    digest = hashlib.sha256(text.encode()).hexdigest()[:_NUM_DIGITS]
    return cache_folder() / f"{identity.model_name}-{digest}.yaml"


def read_known(path: Path, identity: Identity) -> Profile | None:
    """What the file knows of this model; None, with a line that says why, where it is of no use."""
    if not path.exists():
        return None
    try:
        profile = Profile.from_yaml(path)
    except ProfileError as error:
        rank_zero_info(f"The profile is measured anew. {error}")
        return None
    if profile.model.fingerprint != identity.fingerprint:
        rank_zero_info(f"{path} is the profile of another model, so this one is measured anew.")
        return None
    settings = identity.settings
    differing = [
        f"{key} (was {profile.settings.get(key)!r}, is {settings.get(key)!r})"
        for key in sorted({*settings, *profile.settings})
        if settings.get(key) != profile.settings.get(key)
    ]
    if differing:
        rank_zero_info(f"The profile {path} is measured anew: other {', '.join(differing)}.")
        return None
    return profile


def write_known(path: Path, profile: Profile) -> None:
    """Put the profile into the file at once; a reader sees the old one or the new one.

    What is measured holds without the file, so a folder that cannot be written to is only said.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=0o600) as file:
            file.write(profile.as_yaml().encode())
    except OSError as error:
        rank_zero_info(f"The profile cannot be kept in {path}: {error}.")
    else:
        rank_zero_info(f"what was measured is kept in {path}")
