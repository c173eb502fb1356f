"""Blocks of bytes written to a disk by this process, with digests to find changed bytes.

A disk, its memory or another program may change a file after it was written. A run would then read
its own files again and go on with wrong weights. The digests stay in the memory of the process, so
they also find an exchange of the whole file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from .errors import CheckpointError

# A longer content is several blocks, so a reader needs little memory.
_MOST_BYTES = 2**24


@dataclass(frozen=True)
class WrittenBlock:
    """The size and digest of some bytes in a file.

    Args:
        num_bytes: How many bytes there are.
        digest: Their digest.
    """

    num_bytes: int
    digest: bytes

    @classmethod
    def of(cls, content: bytes | memoryview) -> WrittenBlock:
        """The block of a content."""
        return cls(len(content), hashlib.sha256(content).digest())

    def check(self, content: bytes | memoryview, file: str) -> None:
        """Refuse other bytes than the written ones.

        Args:
            content: The read bytes.
            file: The name of the file, or words for it.

        Raises:
            CheckpointError: With the name and the remedy.
        """
        if WrittenBlock.of(content) != self:
            raise CheckpointError(
                f"{file} has other bytes than this run has written to it, in a block of "
                f"{self.num_bytes} bytes of which {len(content)} were read. The disk or its memory "
                "fails, or another program has changed the file. Check the disk (`dmesg`, "
                "`smartctl -a`), or keep such files on another one (`recovery="
                "Recovery(folder=...)`, and the environment variable TMPDIR), and go on from the "
                "last checkpoint of the run."
            )


def write_blocks(file: BinaryIO, content: memoryview) -> Iterator[WrittenBlock]:
    """Write a content at the end of the file.

    Raises:
        OSError: If the file cannot be written.
    """
    for start in range(0, len(content), _MOST_BYTES):
        part = content[start : start + _MOST_BYTES]
        file.write(part)
        yield WrittenBlock.of(part)


def read_blocks(file: BinaryIO, blocks: list[WrittenBlock], name: str) -> Iterator[memoryview]:
    """Read all of a file, as it was written.

    Raises:
        CheckpointError: If it has other bytes.
        OSError: If it cannot be read.
    """
    for block in (*blocks, WrittenBlock.of(b"")):
        content = file.read(block.num_bytes or 1)  # the file ends after the last block
        block.check(content, name)
        yield memoryview(content)
