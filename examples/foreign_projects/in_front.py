"""Lets an environment use all packages of the one that runs this, behind its own.

python in_front.py ENVIRONMENT
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main() -> None:
    [environment] = sys.argv[1:]
    paths = {"base": environment, "platbase": environment}
    theirs = Path(sysconfig.get_path("purelib", vars=paths))
    ours = sysconfig.get_path("purelib")
    # The packages there may have files of this kind too, such as that of an editable install.
    (theirs / "behind.pth").write_text(f"import site; site.addsitedir({ours!r})\n", "utf-8")


if __name__ == "__main__":
    main()
