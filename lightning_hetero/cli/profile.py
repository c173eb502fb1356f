"""`lightning-hetero profile`: measure a model on its devices, without training."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ..coordinator.dry_run import NoSample
from ..errors import ProfileError
from ..model.layers import DecoderLayer
from ..planner.profile import Profile
from ..profiler.measure import ProfilingOptions
from ..replan.planning import chosen_profiling, measure
from ..strategy.deploy import Site
from ..strategy.strategy import HeteroPipelineStrategy
from .options import check_folder, new_file, writing
from .project import project_of


def run(options: argparse.Namespace) -> None:
    path = options.output or new_file("profile.yaml")
    check_folder("profile", path)
    project = project_of(options)
    strategy = HeteroPipelineStrategy.of(project.trainer)

    def measured(site: Site, layers: list[DecoderLayer]) -> Profile:
        chosen = chosen_profiling(project.trainer) or ProfilingOptions()
        try:
            return measure(site, layers, replace(chosen, force=chosen.force or options.force))
        except NoSample as reason:
            raise ProfileError(f"The devices cannot be measured. {reason}") from reason

    profile = project.instead_of_training(
        strategy.instead_of_training, measured, "nothing was measured"
    )
    with writing("profile", path):
        profile.to_yaml(path)
    print(f"The profile is in {path}.")
