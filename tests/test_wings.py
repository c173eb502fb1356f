"""Without a wing the core trains to the same bits: each wing can be taken out of the package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .core_contract import names_in_contract
from .forked import running_script
from .pages import ROOT

# By name: the modules that are gone with it.
WINGS = {
    "adapters": ["model.adapters"],
    "callbacks": ["callbacks"],
    "cli": ["cli"],
    "discovery": ["discovery"],
    "doctor": ["doctor"],
    "four_bit": ["model.four_bit"],
    "guard": ["coordinator.batch_trials", "coordinator.twins", "guard"],
    "half_layers": ["model.half_layers"],
    "launch": ["coordinator.fleet", "launch"],
    "layer_code": ["model.layer_code", "model.outer_values"],
    "lazy_weights": ["model.lazy_weights", "model.checkpoint_reader"],
    "moves": ["coordinator.moves", "replan", "worker.moves"],
    "pairing": ["pairing"],
    "planner": ["planner", "replan"],
    "profiler": ["profiler", "worker.trials"],
    "recovery": [
        "coordinator.lost_workers",
        "coordinator.replacement",
        "coordinator.snapshots",
        "coordinator.takeover",
        "pipeline.journal",
        "worker.second_processes",
        "worker.sent_messages",
        "worker.snapshots",
        "worker.takeover",
        "written_blocks",
    ],
    "reconnection": ["transport.reconnection", "transport.resumption"],
    "replan": ["replan"],
    "replicas": ["coordinator.replicas", "worker.replicas"],
    "report": ["report"],
    "streamed_weights": ["devices.weight_file", "worker.streamed_weights"],
    "token_slices": ["coordinator.token_slices"],
    "telemetry": ["coordinator.telemetry", "telemetry", "worker.telemetry"],
    "verify": ["verify"],
    "all of them": sorted(
        name.partition(".")[2] for name in names_in_contract()["forbidden_modules"]
    ),
}

# What a run without a wing warns of, once.
WARNINGS = {
    "guard": ["Nothing checks this run for wrong numbers"],
    "layer_code": [
        "Nothing checks this run for wrong numbers",
        "Nothing compares the code of layers here with the code on their workers",
    ],
}

# The process forgets the package that it has imported, and imports the one in a folder.
TRAINING = """
import hashlib, os, sys, warnings

for name in [each for each in sys.modules if each.partition(".")[0] == "lightning_hetero"]:
    del sys.modules[name]
sys.path.insert(0, sys.argv[1])

import torch

import lightning_hetero
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.handshake import address_of, listen
from lightning_hetero.worker.worker import Worker
from tests.models import TinyModule, fit

assert lightning_hetero.__file__.startswith(sys.argv[1])
warnings.showwarning = lambda message, *_, **__: print(message)
listener = listen(Address("127.0.0.1", 0))
address = str(address_of(listener))
worker = os.fork()
if worker == 0:
    Worker(listener, torch.device("cpu")).serve_forever()
    os._exit(0)
listener.close()
try:
    plan = Plan([StagePlan(["coordinator"], (0, 2)), StagePlan([address], (2, 5))], 3)
    module = fit(TinyModule(), HeteroPipelineStrategy([address], plan))
finally:
    os.kill(worker, 9)
found = hashlib.sha256()
for tensor in module.state_dict().values():
    found.update(tensor.numpy().tobytes())
print("digest", found.hexdigest())
"""


# Prints a line for each sentence that a run without some modules ends with, or warns of.
REFUSED = (
    TRAINING[: TRAINING.index("try:")]
    + """
import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback

from tests.models import loader


class Moves(Callback):
    def on_train_batch_start(self, trainer, *_):
        trainer.strategy.move_layers(Plan([StagePlan([address], (0, 5))], 3))


def said(plan, *callbacks, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            strategy = HeteroPipelineStrategy([address], plan, **options)
            fit(TinyModule(), strategy, callbacks=[*callbacks])
        except Exception as error:
            print("said", " ".join(str(error).split()))
    for each in caught:
        print("said", each.message)


given = Plan([StagePlan([address], (0, 5))], 3)
half = Plan([StagePlan(["coordinator"], (0, 2)), StagePlan([address], (2, 5))], 3)
try:
    for plan in ("even", given):
        said(plan, replan=plan is given)
    said(given)
    said(half, Moves(), check_first_batch="off")
    said(Plan([StagePlan(["coordinator", address], (0, 5))], 3), check_first_batch="off")
    said(given, check_first_batch="off", micro_batching="tokens")
    print("trained")
    said(given, check_first_batch="off", micro_batching="boundary")
    print("validates")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = lightning.Trainer(
            strategy=HeteroPipelineStrategy([address], given), accelerator="cpu", logger=False
        )
        trainer.validate(TinyModule(), loader(6, 3), verbose=False)
    for each in caught:
        print("said", each.message)
finally:
    os.kill(worker, 9)
"""
)


def words_without(folder: Path, script: str, *modules: str) -> str:
    """What a script prints and warns of where these modules are missing."""
    package = folder / "lightning_hetero"
    shutil.copytree(ROOT / package.name, package, ignore=shutil.ignore_patterns("__pycache__"))
    for module in modules:
        place = package.joinpath(*module.split("."))
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.with_suffix(".py").unlink()
    with running_script(script, str(folder)) as process:
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors[-3000:]
    return output


def digest_in(output: str) -> str:
    """What the weights are after the three steps of `TRAINING` over a worker."""
    words = output.split()
    return words[words.index("digest") + 1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest with all modules."""
    output = words_without(tmp_path_factory.mktemp("whole"), TRAINING)
    assert "install" not in output
    return digest_in(output)


@pytest.mark.follows("lacks `model.layer_code`; install the whole package.")
@pytest.mark.parametrize("wing", WINGS)
def test_the_core_trains_without_a_wing(wing: str, whole: str, tmp_path: Path) -> None:
    output = words_without(tmp_path, TRAINING, *WINGS[wing])
    assert digest_in(output) == whole
    assert [text for text in WARNINGS.get(wing, ()) if output.count(text) != 1] == []


def test_whole_batches_are_cut_without_their_trials(tmp_path: Path) -> None:
    script = TRAINING.replace("[address], plan)", "[address], plan, micro_batching='boundary')")
    assert script != TRAINING
    without = words_without(tmp_path / "without", script, *WINGS["guard"])
    assert digest_in(without) == digest_in(words_without(tmp_path / "whole", script))


@pytest.mark.follows("this installation lacks them: install the whole package, or give a Plan.")
@pytest.mark.follows("install the whole package, or leave `replan` out.")
@pytest.mark.follows("install the whole package, or set `check_first_batch='off'`.")
@pytest.mark.follows("install the whole package, or leave layers where they are.")
@pytest.mark.follows("install the whole package, or take 'coordinator' out of the stage.")
@pytest.mark.follows("install the whole package, or use `micro_batching='boundary'`.")
@pytest.mark.follows("install the whole package there.")
def test_what_is_missing_is_named(whole: str, tmp_path: Path) -> None:
    """With the whole package all of it trains, as other tests show."""
    missing = ["planner", "replan", "guard", "coordinator.moves"]
    missing += ["coordinator.batch_trials", "coordinator.token_slices"]
    of_worker = words_without(tmp_path / "worker", REFUSED, *missing, "worker.replicas")
    of_coordinator = words_without(tmp_path / "here", REFUSED, *missing, "coordinator.replicas")
    for output, last in (
        (of_worker, "no part for a stage with replicas; install the whole package there."),
        (of_coordinator, "the coordinator cannot be a replica, since `coordinator.replicas`"),
    ):
        before, rest = output.split("trained")
        after, validation = rest.split("validates")
        assert "Nothing checks this run for wrong numbers" in validation
        wanted = (
            "plan='even' needs `lightning_hetero.replan`",
            "`replan=True` needs `lightning_hetero.replan`",
            "Nothing checks this run for wrong numbers",
            "cannot move layers, since `coordinator.moves` is missing",
            "cannot cut sequences along their tokens, since `coordinator.token_slices` is missing",
            last,
        )
        assert [text for text in wanted if text not in before] == []
        assert "install" not in after
    assert whole
