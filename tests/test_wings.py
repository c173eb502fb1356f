"""Without a wing the core trains to the same bits: each wing can be taken out of the package."""

from __future__ import annotations

import pytest

from .forked import running_script

# By name: the modules that are gone with it. Wings that the core still needs are in
# `core_contract.toml` and not here.
WINGS = {"cli": ["cli"], "doctor": ["doctor"], "verify": ["verify"]}

# The modules of this process are forgotten, so that the package is imported once more.
TRAINING = """
import hashlib, os, sys

PACKAGE, gone = "lightning_hetero", sys.argv[1:]
for name in [each for each in sys.modules if each.partition(".")[0] == PACKAGE]:
    del sys.modules[name]


class Gone:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if any(f"{name}.".startswith(f"{PACKAGE}.{each}.") for each in gone):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Gone)

import torch

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.handshake import address_of, listen
from lightning_hetero.worker.worker import Worker
from tests.models import TinyModule, fit

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


def digest_without(*modules: str) -> str:
    """What the weights are after three steps over a worker, without these modules."""
    with running_script(TRAINING, *modules) as script:
        output, errors = script.communicate(timeout=100)
    words = output.split()
    assert "digest" in words, errors[-3000:]
    return words[words.index("digest") + 1]


@pytest.fixture(scope="module")
def whole() -> str:
    """The digest with all modules."""
    return digest_without()


@pytest.mark.parametrize("wing", WINGS)
def test_the_core_trains_without_a_wing(wing: str, whole: str) -> None:
    assert digest_without(*WINGS[wing]) == whole
