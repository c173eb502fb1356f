"""Made-up ends of a conversation, with their versions."""

from __future__ import annotations

from lightning_hetero.protocol.messages import Equipment
from lightning_hetero.transport.compatibility import Party

VERSIONS = {
    "lightning-hetero": "0.1.0",
    "Python": "3.11.7",
    "torch": "2.13.0",
    "CUDA": "12.8",
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
}


def party(name: str, protocol: int = 1, **versions: str | None) -> Party:
    """An end with some versions replaced; None means that the library is not installed."""
    merged = VERSIONS | {key.replace("_", "-"): value for key, value in versions.items()}
    kept = {key: value for key, value in merged.items() if value is not None}
    return Party(name, protocol, Equipment(versions=kept))
