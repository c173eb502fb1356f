"""`lightning-hetero pair`: give the token to a worker that shows a code."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from ..pairing.code import read_code
from ..pairing.sockets import bring_token
from ..pairing.token_file import pairing_file, token_here
from ..transport.token import find_token_file


def run(options: argparse.Namespace) -> None:
    path, code = pairing_file(options.token_file), read_code(options.code)
    try:
        is_new = bring_token(options.address, code, partial(token_here, path))
    except KeyboardInterrupt:
        print("Pairing was interrupted; the worker's terminal shows its state.", file=sys.stderr)
        raise
    is_found = find_token_file(None) == path
    given = "" if is_found else f", token_file={str(path)!r}"
    named = "" if is_found else f" --token-file {path}"
    print(
        f"The worker at {options.address} {'has' if is_new else 'had'} the token of {path}"
        f"{' now' if is_new else ' already'}, and begins to serve. Train on it with\n\n"
        f'  HeteroPipelineStrategy(workers=["{options.address}"]{given})\n\n'
        f"and check the way there with `lightning-hetero doctor{named} {options.address}`."
    )
