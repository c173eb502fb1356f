"""RunFiles: a training's picture, plan and notes beside its logs."""

from __future__ import annotations

import logging
import os

from msgspec import json

from ..errors import HeteroError, PictureError, PlanError
from ..events import Deployed, Event, Noted, Progressed, keep_beside_logs, write_beside_logs
from ..plan import Plan
from .diagram import picture_for
from .run_record import FACTS, PICTURE_NAME, PLAN_NAME, facts_of
from .topology import topology_of_run

logger = logging.getLogger(__name__)


class RunFiles:
    """Observer: keeps the files of a run up to date, and logs write errors.

    Args:
        folder: The folder of the run's logs.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._events: list[Event] = []

    def on_event(self, event: Event) -> None:
        """Write the files changed by an event."""
        if isinstance(event, (Progressed, Noted)):
            return
        if isinstance(event, Deployed):
            try:
                self._draw(event)
            except (HeteroError, OSError, ValueError) as error:
                logger.warning("The topology of this run is not drawn: %s", error)
            return
        self._events.append(event)
        keep_beside_logs(self._folder, FACTS, json.encode(facts_of(self._events)))

    def _draw(self, event: Deployed) -> None:
        """Write all pictures possible on this machine, and the plan."""
        topology = topology_of_run(event)
        for name in (f"{PICTURE_NAME}{suffix}" for suffix in (".svg", ".mmd", ".png")):
            try:
                write_beside_logs(self._folder, name, picture_for(name, topology))
            except PictureError as error:
                logger.info("%s is skipped: %s", name, error)
        if not self._has(event.plan):
            write_beside_logs(self._folder, PLAN_NAME, event.plan.as_yaml().encode())

    def _has(self, plan: Plan) -> bool:
        """Whether the file has the plan already; it may have a person's comments."""
        try:
            return Plan.from_yaml(os.path.join(self._folder, PLAN_NAME)) == plan
        except PlanError:
            return False
