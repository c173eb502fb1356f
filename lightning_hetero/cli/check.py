"""`lightning-hetero check`: whether training is right on the devices of this machine."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings

import torch
from rich.console import Console

from ..devices.description import accelerators_here, equipment_here, named_device
from ..verify.device_check import CheckFinding, check_device
from .options import check_folder, writing

_MARKS = {True: "ok", False: "**FAILS**", None: ""}


def run(options: argparse.Namespace) -> None:
    check_folder("report", options.output)
    devices = [named_device(name) for name in options.device or accelerators_here() or ["cpu"]]
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    console, lines, is_good = Console(stderr=True), [], True
    for device in devices:
        lines += _heading(device)
        for finding in check_device(device):
            console.print(f"{device}  {finding.what}: {finding.found}", markup=False)
            lines.append(_row(finding))
            is_good = is_good and finding.is_good is not False
    report = "\n".join(lines) + "\n"
    if options.output is None:
        print(report, end="")
    else:
        with writing("report", options.output):
            options.output.write_text(report, encoding="utf-8")
    sys.exit(0 if is_good else 1)


def _heading(device: torch.device) -> list[str]:
    """The device, the versions, and the head of the table, as Markdown."""
    equipment = equipment_here(device)
    versions = ", ".join(f"{name} {version}" for name, version in equipment.versions.items())
    names = f"{device}: {equipment.device_name}"
    return [f"## {names}", "", versions, "", "| what | found | |", "|---|---|---|"]


def _row(finding: CheckFinding) -> str:
    found = " ".join(finding.found.replace("|", "/").split())
    return f"| {finding.what} | {found} | {_MARKS[finding.is_good]} |"
