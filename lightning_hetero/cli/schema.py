"""`lightning-hetero schema`: write the JSON schema of a plan or a profile, for editors."""

from __future__ import annotations

import argparse
import json

from ..planner.schema import schema
from .options import writing


def run(options: argparse.Namespace) -> None:
    text = json.dumps(schema(options.kind), indent=2) + "\n"
    if options.output is None:
        print(text, end="")
        return
    with writing("schema", options.output):
        options.output.write_text(text, encoding="utf-8")
    print(
        f"The schema is in {options.output}. Editors that know the YAML language server use it for "
        f"a file that begins with `# yaml-language-server: $schema={options.output}`."
    )
