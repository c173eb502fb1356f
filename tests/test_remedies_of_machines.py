"""What sentences on machines, commands and what is measured say to do is right.

Each case does what is refused, or warned of, with the words of its mark, and then what the words
say.
"""

from __future__ import annotations

import importlib
import logging
import pickle
import socket
import sys
from ipaddress import ip_interface
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from lightning_hetero import PipelineTimeline, StageMonitor, cli
from lightning_hetero.cli import doctor as doctor_command
from lightning_hetero.cli import worker as worker_command
from lightning_hetero.cli.options import writing
from lightning_hetero.devices import description, numerics
from lightning_hetero.devices import device as devices
from lightning_hetero.devices.copies import PlainCopies
from lightning_hetero.discovery import mdns
from lightning_hetero.errors import JoinError
from lightning_hetero.launch import join as joins
from lightning_hetero.launch.launcher import start_command
from lightning_hetero.launch.ssh import names_of
from lightning_hetero.optional import bitsandbytes, peft
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner.cards import with_card
from lightning_hetero.planner.profile import EMBEDDING, HEAD, Part, Profile
from lightning_hetero.planner.solver import Wishes, solve, solve_replicated
from lightning_hetero.profiler.measure import ProfilingOptions
from lightning_hetero.profiler.trials import change_of_speed
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.fields import ClockSample
from lightning_hetero.protocol.frames import Frame, FrameReader, encode_frame
from lightning_hetero.protocol.tensor_bytes import TensorSpec
from lightning_hetero.protocol.values import KeptConstants, Packer
from lightning_hetero.report import svg
from lightning_hetero.report.run_record import read_run
from lightning_hetero.report.topology import topology_of
from lightning_hetero.telemetry.recorded_step import align
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity, Party, obstacles
from lightning_hetero.transport.handshake import dial, listen
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token, expanded, read_token_file, write_token_file
from lightning_hetero.written_blocks import WrittenBlock

from .launch.guests import WITH_TOKEN, door, knock
from .planner.profiles import GIB, content, coordinator, device, ends, profile, timing
from .remedies import Act, come_and_follow, follows
from .transport.pairs import QUICK, closed_address, worker_thread
from .transport.parties import party


def call(act: Act, folder: Path) -> None:
    act(*[folder] * act.__code__.co_argcount)


def patched(act: Act, *changes: tuple[Any, str, Any]) -> Act:
    """What does a thing while attributes are others."""

    def changed(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, value in changes:
                patch.setattr(owner, name, value)
            call(act, folder)

    return changed


class LoggedError(Exception):
    """Something was logged as a warning."""


def logs(act: Act) -> Act:
    """What does a thing, and raises what it has logged."""

    def logged(folder: Path) -> None:
        lines: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("lightning_hetero")
        logger.addHandler(handler)
        try:
            call(act, folder)
        finally:
            logger.removeHandler(handler)
        if lines:
            raise LoggedError("\n".join(lines))

    return logged


# Workers that join, are found and listened for.


def too_few(least: int, *faults: str) -> Act:
    """What waits for so many workers where one comes, of a launcher with late faults."""

    def act() -> None:
        with door(least=least) as opened:
            knock(opened, "a")
            opened.wait(0.01, lambda is_late: [*faults] if is_late else [])

    return act


def two_guests(*names: str) -> Act:
    def act() -> None:
        with door() as opened:
            for name in names:
                knock(opened, name)

    return act


def started(*words: str) -> Act:
    return lambda: start_command("it", words).stop()


def announced(host: str, has_token: bool = True, hosts: tuple[str, ...] = ("192.168.1.7",)) -> Act:
    """What prepares the announcement of a worker on a machine with these addresses."""

    def act(folder: Path) -> None:
        token = folder / "token"
        if not token.exists():
            write_token_file(token, Token.new())
        mdns._announcement_of(Address(host, 9999), token if has_token else None)

    own = [ip_interface(f"{host}/24") for host in hosts]
    return patched(act, (mdns, "own_interfaces", lambda: own))


def of_address(host: str) -> Act:
    """What checks an address that is named instead of a search."""
    return lambda: Address.parse(f"{host}:9999")


def listened(host: str, has_token: bool = True) -> Act:
    credentials = Credentials(Token.new()) if has_token else None
    return lambda: listen(Address(host, 0), credentials).close()


def failing(*_: Any, **__: Any) -> Any:
    raise OSError(19, "No such device")


def on_network(folder: Path) -> None:
    with mdns._network(["192.168.1.7"]):
        pass


def token_of(folder: Path, name: str = "token") -> Path:
    write_token_file(folder / name, Token.new())
    return folder / name


def below_a_file(folder: Path) -> None:
    (folder / "file").touch()
    token_of(folder / "file")


WORKERS = [
    follows(
        "with the same token file; or take fewer workers with `least`, or wait longer with "
        "`wait_seconds`",
        too_few(3),
        too_few(1),
    ),
    follows(
        "Take fewer workers with `least`, or wait longer with `wait_seconds`.",
        too_few(3, "The launcher has started two."),
        too_few(1),
    ),
    follows(
        "start each worker with a `--name` of its own",
        two_guests("a", "a"),
        two_guests("a", "b"),
    ),
    follows(
        "workers wait here already, and this is the limit; start fewer",
        patched(two_guests("a", "b"), (joins, "_MOST_GUESTS", 1)),
        patched(two_guests("a"), (joins, "_MOST_GUESTS", 1)),
    ),
    follows(
        "cannot be started: …. Install it, or name its path.",
        started("no-such-program"),
        started(sys.executable, "--version"),
    ),
    follows(
        "does not give a name for a worker; name the machine otherwise",
        lambda: names_of(["me@.."]),
        lambda: names_of(["me@gpu1"]),
    ),
    follows(
        "listen on 0.0.0.0 with a token, or name the worker's address to the strategy",
        announced("127.0.0.1"),
        lambda folder: (announced("0.0.0.0")(folder), of_address("127.0.0.1")()),  # noqa: S104
    ),
    follows(
        "connect it to a network, or name the worker's address to the strategy",
        announced("0.0.0.0", hosts=("127.0.0.1",)),  # noqa: S104
        lambda folder: (announced("0.0.0.0")(folder), of_address("192.168.1.7")()),  # noqa: S104
    ),
    follows(
        "so it can neither announce nor find workers; name their addresses",
        lambda: mdns._network([]).__enter__(),
        of_address("10.88.0.2"),
    ),
    follows(
        "Multicast DNS cannot be used on …: …; name the workers' addresses",
        patched(
            on_network,
            (
                mdns,
                "_zeroconf",
                lambda: SimpleNamespace(Zeroconf=failing, IPVersion=SimpleNamespace(V4Only=4)),
            ),
        ),
        of_address("10.88.0.2"),
    ),
    follows(
        "Cannot listen on …: …. Choose an address of this machine and a port with",
        listened("192.0.2.1"),
        listened("127.0.0.1"),
    ),
    follows(
        "Make a token with `lightning-hetero token`, copy it to all machines, and name its file "
        "with `--token-file` if it is in another place; or listen on 127.0.0.1.",
        listened("0.0.0.0", has_token=False),  # noqa: S104
        lambda: (listened("0.0.0.0")(), listened("127.0.0.1", has_token=False)()),  # noqa: S104
    ),
    follows(
        "name the file by its whole path, or set HOME",
        lambda: expanded(Path("~no-such-user/token")),
        lambda: (expanded(Path("/etc/token")), expanded(Path("~/token"))),
    ),
    follows(
        "The token file … cannot be written: …; name another file.",
        below_a_file,
        lambda folder: token_of(folder),
    ),
    follows(
        "A token cannot be pickled; pass the name of its file instead.",
        lambda: pickle.dumps(Token.new()),
        lambda folder: read_token_file(
            pickle.loads(pickle.dumps(token_of(folder)))  # noqa: S301 - our own
        ),
    ),
]


# Conversations.


def dialled(has_token: bool = True, *, is_there: bool = True, is_elsewhere: bool = False) -> Act:
    """What dials a worker with a token, as if it was on another machine."""

    def act() -> None:
        credentials = Credentials(Token.new())
        ours = Identity(credentials=credentials if has_token else None)
        with worker_thread(credentials) as address, pytest.MonkeyPatch.context() as patch:
            if is_elsewhere:
                patch.setattr(Address, "is_loopback", property(lambda self: False))
            where = address if is_there else closed_address()
            channel, _ = dial(where, "coordinator", "a", QUICK, ours)
            channel.start(SimpleQueue())
            channel.close(m.Goodbye())

    return act


def elsewhere(act: Act) -> Act:
    return patched(act, (Address, "is_loopback", property(lambda self: False)))


def joined(identity: Identity) -> Act:
    def act() -> None:
        with door() as opened:
            knock(opened, "a", identity)

    return act


def unresolved(*_: Any, **__: Any) -> Any:
    raise socket.gaierror(-2, "Name or service not known")


def refused_by(there: Party) -> Act:
    """What compares the coordinator with another end."""
    here = party("the coordinator")

    def act() -> None:
        if found := obstacles(here, there):
            raise JoinError(" ".join(found))

    return act


def kept(clones: bool) -> Act:
    """What gives a layer that changes its argument the argument again."""

    def act() -> None:
        constants = KeptConstants()
        constants.keep(0, torch.ones(16))
        given = constants.get(0)
        (given.clone() if clones else given).add_(1)
        constants.get(0)

    return act


def timed(first: float, last: float) -> Act:
    """What says whether a device took another time at the end of its measuring."""

    def act() -> None:
        if told := change_of_speed("a", timing("layer", first, 0), timing("layer", last, 0)):
            raise LoggedError(told)

    return act


def read_again(content: bytes) -> Act:
    return lambda: WrittenBlock.of(b"content").check(content, "snapshot")


CONVERSATIONS = [
    follows(
        "so it takes a token: make one with `lightning-hetero token`, and copy it to all machines "
        "as that command says",
        dialled(has_token=False, is_elsewhere=True),
        dialled(is_elsewhere=True),
    ),
    follows(
        "copy the coordinator's token file to this machine, as `lightning-hetero token` says there",
        elsewhere(joined(Identity())),
        elsewhere(joined(WITH_TOKEN)),
    ),
    follows(
        "This process has no token: if the coordinator has one, copy its token file to this "
        "machine.",
        joined(Identity()),
        joined(WITH_TOKEN),
    ),
    follows(
        "See that `lightning-hetero worker` runs there, with `--listen …`, or with `--join` if it "
        "dials the coordinator.",
        dialled(is_there=False),
        lambda: (dialled()(), joined(WITH_TOKEN)()),
    ),
    follows(
        "cannot be resolved on this machine: …. Check how it is written, or write the … IP "
        "address.",
        patched(dialled(), (socket, "create_connection", unresolved)),
        dialled(),
    ),
    follows(
        "they build layers differently; install the same major version on both",
        refused_by(party("the worker", transformers="6.0.1")),
        refused_by(party("the worker", transformers="5.0.1")),
    ),
    follows(
        "(lightning-hetero …); install the same version of lightning-hetero on both",
        refused_by(party("the worker", 2, lightning_hetero="0.9.0")),
        refused_by(party("the worker")),
    ),
    follows(
        "which on one device the next layer would see; clone it in the layer's forward",
        kept(clones=False),
        kept(clones=True),
    ),
    follows(
        "took … ms for … when its measuring began, and … ms at its end: its speed changed "
        "meanwhile, because of another program, a quota or heat, so a plan by these figures "
        "may be far from "
        "the best. Measure again on idle machines, by `PipelineProfiler(force=True)` or "
        "`lightning-hetero profile CONFIG --force`.",
        timed(0.01, 0.02),
        timed(0.01, 0.01),
    ),
    follows(
        "or keep such files on another one (`recovery=Recovery(folder=...)`, and the environment "
        "variable TMPDIR), and go on from the last checkpoint of the run",
        read_again(b"contents"),
        read_again(b"content"),
    ),
]


# Commands.


def command(*words: str) -> Act:
    """What runs the command in a folder with a profile of two workers."""

    def act(folder: Path) -> None:
        pair(batch_size=16).to_yaml(folder / "profile.yaml")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr("sys.argv", ["lightning-hetero", *words])
            cli.main()

    return act


def in_order(*acts: Act) -> Act:
    """What does one thing after the other."""

    def act(folder: Path) -> None:
        for each in acts:
            call(each, folder)

    return act


def file_at(*parts: str) -> Act:
    def act(folder: Path) -> None:
        path = folder.joinpath(*parts)
        with writing("plan", path):
            path.write_text("")

    return act


def pasted(text: str) -> Act:
    def act(folder: Path) -> None:
        stdin = SimpleNamespace(isatty=lambda: False, readline=lambda: text)
        path = folder / "pasted"
        patched(command("token", "--paste", str(path)), (sys, "stdin", stdin))(folder)

    return act


def warned_of_loopback(wanted: str, bound: str) -> Act:
    return logs(
        lambda: worker_command._warn_of_loopback(Address(wanted, 9998), Address(bound, 9998))
    )


PLAN_FILE = Plan([StagePlan(["a"], (0, 2)), StagePlan(["b"], (2, 4))], micro_batches=4)


def with_plan(folder: Path) -> None:
    PLAN_FILE.to_yaml(folder / "plan.yaml")


def wanted_by_doctor(folder: Path) -> None:
    pair(batch_size=16).to_yaml(folder / "profile.yaml")
    wanted = doctor_command._wanted(str(folder / "profile.yaml"), str(folder / "plan.yaml"))
    assert wanted is not None
    assert wanted.plan == PLAN_FILE


class Idle:
    """In the place of a worker's supervisor."""

    def __init__(self, listener: socket.socket, *_given: Any, **_options: Any) -> None:
        listener.close()

    def serve_forever(self, *_told: Any) -> None:
        pass


def worker_of(*words: str) -> Act:
    """What starts a worker that serves nobody."""
    words = ("worker", *words, "--listen", "127.0.0.1:0")
    stand_ins = [("Supervisor", Idle), ("prepare_process", lambda: None)]
    stand_ins += [("address_of", lambda _listener: Address("127.0.0.1", 1))]
    return patched(command(*words), *((worker_command, *each) for each in stand_ins))


def allowed_in_its_folder(folder: Path) -> None:
    (folder / "own_blocks_here.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.chdir(folder)
        worker_command._warn_of_absent(("own_blocks_here",))


COMMANDS = [
    follows(
        "there is no folder …; make it, or name another file",
        file_at("none", "plan.yaml"),
        in_order(lambda folder: (folder / "none").mkdir(), file_at("none", "plan.yaml")),
    ),
    follows(
        "The … cannot be written to …: …; name another file.",
        file_at("."),
        file_at("plan.yaml"),
    ),
    follows(
        "--what-if write no plan. Leave it out.",
        in_order(
            with_plan, command("plan", "profile.yaml", "--given", "plan.yaml", "-o", "x.yaml")
        ),
        in_order(with_plan, command("plan", "profile.yaml", "--given", "plan.yaml")),
    ),
    follows(
        "has its own layers and micro-batches; leave out --pin and --micro-batches",
        in_order(
            with_plan,
            command("plan", "profile.yaml", "--given", "plan.yaml", "--micro-batches", "4"),
        ),
        in_order(with_plan, command("plan", "profile.yaml", "--given", "plan.yaml")),
    ),
    follows(
        "is given twice, as … and …; keep one",
        command("plan", "profile.yaml", "--pin", "a=0:2", "--pin", "a=0:3"),
        command("plan", "profile.yaml", "--pin", "a=0:2"),
    ),
    follows(
        "Leave `--name` out, or let the worker join.",
        worker_of("--name", "a"),
        in_order(worker_of(), worker_of("--name", "a", "--join", "127.0.0.1:1")),
        "needs `--join HOST:PORT`",
    ),
    follows(
        "so other machines cannot reach this worker; start it with `--listen 0.0.0.0:…`",
        warned_of_loopback("tower", "127.0.1.1"),
        warned_of_loopback("0.0.0.0", "0.0.0.0"),  # noqa: S104
    ),
    follows(
        "name the profile of its model with --profile",
        in_order(with_plan, command("doctor", "localhost:1", "--plan", "plan.yaml")),
        in_order(with_plan, wanted_by_doctor),
    ),
    follows(
        "its layers will be refused: install it, or start the worker in its folder",
        logs(lambda: worker_command._warn_of_absent(("own_blocks_here",))),
        logs(allowed_in_its_folder),
    ),
    follows(
        "No token was written: …; copy its whole line.",
        pasted("lightning-hetero-token:1:AAAA"),
        pasted(Token.new().to_text() + "\n"),
    ),
]


# Devices.


def without_module(name: str) -> Any:
    raise ImportError(name)


def chosen(name: str) -> Act:
    return lambda: description.named_device(name)


def without_kernel(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no kernel image is available")


class HasNoFloat64:
    """A tensor whose device has no dtype of this width, as torch says of Apple's GPUs."""

    dtype = torch.float64

    def to(self, _device: Any) -> Any:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")


def taken_over(setting: str) -> Act:
    """What computes with the coordinator's settings."""
    wanted = numerics.numerics_here()
    changed = replace(wanted, **{setting: not getattr(wanted, setting)})
    return patched(lambda: numerics._check(changed))


def first_flag() -> str:
    here = numerics.numerics_here()
    return next(f for f in here.__struct_fields__ if isinstance(getattr(here, f), bool))


DEVICES = [
    follows(
        "Install a build of torch for this device, or use another one, such as `--device cpu`.",
        patched(chosen("cpu"), (torch, "ones", without_kernel)),
        chosen("cpu"),
    ),
    follows(
        "Convert it to torch.float32 before it goes to the decoder layers.",
        lambda: PlainCopies(torch.device("cpu"))._here(HasNoFloat64()),  # type: ignore[arg-type]
        lambda: PlainCopies(torch.device("cpu"))._here(torch.ones(1)),
    ),
    follows(
        "use one of …, or add a backend as `lightning_hetero/devices/device.py` describes",
        lambda: devices.check_has_backend(torch.device("meta")),
        lambda: devices.check_has_backend(torch.device("cpu")),
    ),
    follows(
        "Use another device, or a version of the device's package that has these functions.",
        patched(
            lambda: devices.check_has_backend(torch.device("cpu")),
            (devices.backends()["cpu"], "lacking", lambda: ["get_rng_state"]),
        ),
        lambda: devices.check_has_backend(torch.device("cpu")),
    ),
    follows(
        "use the same version of torch here and there, or the default of this setting there",
        taken_over(first_flag()),
        lambda: numerics._check(numerics.numerics_here()),
    ),
    follows(
        "bitsandbytes is not installed here, and … (…); pip install 'lightning-hetero[…]'",
        patched(bitsandbytes, (importlib, "import_module", without_module)),
        lambda: pytest.importorskip("bitsandbytes") and bitsandbytes(),
    ),
    follows(
        "peft is not installed here, and … (…); pip install 'lightning-hetero[…]'",
        patched(peft, (importlib, "import_module", without_module)),
        lambda: pytest.importorskip("peft") and peft(),
    ),
]


# What is planned, measured and drawn.


def pair(**options: Any) -> Profile:
    return profile(4, [device("a", 1, 2), device("b", 1, 2)], **options)


def tight(bytes_of: int = 8 * GIB, largest: int = 64, part: int = 0, batch: int = 8) -> Act:
    """What plans for a coordinator with so much memory, and ends of the model of this size."""
    parts = [Part(EMBEDDING, part), Part(HEAD, part), Part("layer", GIB)]
    timings = [timing(name, 0, 0, size=size) for name in (EMBEDDING, HEAD) for size in {1, largest}]
    own = coordinator([*timings, timing("layer", 1, 1)], memory_bytes=bytes_of)
    workers = [device("tower", 1, 1, memory_bytes=8 * GIB)]
    given = profile(4, workers, own, (), {"parts": parts}, batch_size=batch)
    return lambda: solve(given)


def pinned(*names: str, **wishes: Any) -> Act:
    """What plans over workers with room for all layers; the coordinator has room for none."""
    workers = [device(name, 1, 1) for name in names]
    return lambda: solve(profile(4, workers, batch_size=4), Wishes(**wishes))


def at_most_three(batch_size: int, **wishes: Any) -> Act:
    """What plans for a coordinator that runs at most three samples at once."""
    own = coordinator(ends(), largest_micro_batch=3)
    given = profile(4, [device("a", 1, 1)], own, batch_size=batch_size)
    return lambda: solve(given, Wishes(**wishes))


def card(name: str, *, dtype: str = "float32", wish: str) -> Act:
    timings = [timing("layer", 1.0, 2.0, dtype=dtype)]
    workers = [device("w:1", 1, 2, device=name, timings=timings)]
    given = profile(4, workers, batch_size=4)
    return lambda: with_card(given, wish)


def of_version(version: int) -> Act:
    return lambda: Profile.from_dict({**content(pair()), "version": version})


def small_for_all(*exclude: str) -> Act:
    """What plans replicas where one worker is too small for all layers."""
    parts = [Part(EMBEDDING, 0), Part(HEAD, 0), Part("layer", GIB)]
    own = coordinator(
        [*ends(), timing("layer", 1, 1), timing("layer", 1, 1, size=64)], memory_bytes=80 * GIB
    )
    workers = [device("a", 1, 1, memory_bytes=80 * GIB), device("b", 1, 1, memory_bytes=2 * GIB)]
    given = profile(4, workers, own, (), {"parts": parts}, batch_size=8)
    return lambda: solve_replicated(given, Wishes(exclude=[*exclude]))


def frame_of(version: int) -> Act:
    """What reads a frame of this version of the protocol."""

    def act() -> None:
        reader, found = FrameReader(), None
        left = bytearray(b"".join(bytes(b) for b in encode_frame(Frame(m.Ping()))))
        left[FRAME_VERSION_AT] = version
        while left:
            buffer = reader.buffer()
            part = bytes(left[: len(buffer)])
            buffer[: len(part)] = part
            del left[: len(part)]
            found = reader.advance(len(part))
        assert found is not None

    return act


FRAME_VERSION_AT = next(
    at
    for at, byte in enumerate(b"".join(bytes(b) for b in encode_frame(Frame(m.Ping()))))
    if byte == m.PROTOCOL_VERSION
)
UNUSUAL = torch.zeros(2, dtype=torch.complex32)
SPARSE = torch.eye(2).to_sparse()


def without_library(name: str, *_: Any) -> Any:
    return None if name == "resvg_py" else object()


def bare_png(folder: Path) -> None:
    del folder
    svg.png('<svg xmlns="http://www.w3.org/2000/svg" width="3" height="3"></svg>')


def with_logs(folder: Path) -> None:
    (folder / "metrics.csv").write_text("step,loss\n0,2.5\n")
    read_run(folder)


class NoFont:
    """A library that omits all text."""

    def svg_to_bytes(self, *_: Any, **__: Any) -> bytes:
        return b""


MEASURED = [
    follows(
        "Free memory there, or use more micro-batches, a smaller batch or a quantised model.",
        tight(GIB, part=2 * GIB),
        tight(part=GIB // 8),
    ),
    follows(
        "Use more micro-batches or a smaller batch.",
        at_most_three(8, micro_batches=2),
        lambda: (at_most_three(8, micro_batches=4)(), at_most_three(4, micro_batches=2)()),
    ),
    follows(
        "Take back a pin or an exclusion, or add a worker.",
        pinned("a", pins={"a": (1, 4)}),
        lambda: (pinned("a")(), pinned("a", "b", pins={"a": (1, 4)})()),
    ),
    follows(
        "Exclude those that cannot, or take another plan.",
        small_for_all(),
        small_for_all("b"),
    ),
    follows(
        "If one of them is such a card, write its name under `device`.",
        card("Intel Xeon", wish="RTX 4090"),
        card("NVIDIA L4", wish="RTX 4090"),
    ),
    follows(
        "Measure it in another dtype too, by `PipelineProfiler(dtypes=['float32'])`.",
        card("NVIDIA L4", dtype="bfloat16", wish="P40"),
        card("NVIDIA L4", dtype="float32", wish="P40"),
    ),
    follows(
        "this planner reads version …; measure again",
        of_version(2),
        of_version(1),
    ),
    follows(
        "The micro-batch sizes are …; give one or more, each 1 or more.",
        lambda: ProfilingOptions(micro_batch_sizes=(0,)),
        lambda: ProfilingOptions(micro_batch_sizes=(1, 2)),
    ),
    follows(
        "give the seconds for measuring, such as 60",
        lambda: ProfilingOptions(budget_seconds=0),
        lambda: ProfilingOptions(budget_seconds=60),
    ),
    follows(
        "The peer speaks protocol version …, we speak …; install the same version of",
        frame_of(m.PROTOCOL_VERSION + 1),
        frame_of(m.PROTOCOL_VERSION),
    ),
    follows(
        "A tensor of dtype … cannot be sent; convert it to one of ….",
        lambda: TensorSpec.of(UNUSUAL),
        lambda: TensorSpec.of(UNUSUAL.to(torch.complex64)),
    ),
    follows(
        "use `sparse=False`, or give its layer to one process instead of replicas",
        lambda: TensorSpec.of(SPARSE),
        lambda: TensorSpec.of(SPARSE.to_dense()),
    ),
    follows(
        "convert it to one of … before the layer, or keep the layer with the coordinator",
        lambda: Packer().pack([UNUSUAL]),
        lambda: Packer().pack([UNUSUAL.to(torch.complex64)]),
    ),
    follows(
        "There is no folder …; name a folder with a run's logs.",
        lambda folder: read_run(folder / "none"),
        with_logs,
    ),
    follows(
        "PNGs need a library: pip install 'lightning-hetero[pictures]'.",
        patched(bare_png, (importlib.util, "find_spec", without_library)),
        lambda folder: pytest.importorskip("resvg_py") and bare_png(folder),
    ),
    follows(
        "and this machine has none; install one such as DejaVu Sans",
        patched(
            bare_png,
            (importlib.util, "find_spec", lambda *_: object()),
            (importlib, "import_module", lambda *_: NoFont()),
        ),
        lambda folder: pytest.importorskip("resvg_py") and bare_png(folder),
    ),
    follows(
        "The plan has no layers to draw; give it stages.",
        lambda: topology_of(Plan([])),
        lambda: topology_of(PLAN_FILE),
    ),
    follows(
        "check whether its connection is alive",
        lambda: align([]),
        lambda: align([ClockSample(0.0, 1.0, 2.0)]),
    ),
    follows(
        "The steps to record are …; give numbers from 0 on.",
        lambda: PipelineTimeline(steps=[3, -1]),
        lambda: PipelineTimeline(steps=[3, 0]),
    ),
    follows(
        "The argument peak_flops is …; give FLOPs a second, such as 989e12.",
        lambda: StageMonitor(peak_flops={"coordinator": -1.0}),
        lambda: StageMonitor(peak_flops={"coordinator": 989e12}),
    ),
]


@pytest.mark.parametrize(
    ("wrong", "right"), [*WORKERS, *CONVERSATIONS, *COMMANDS, *DEVICES, *MEASURED]
)
def test_the_words_are_said_and_what_they_say_is_right(
    wrong: Act, right: Act, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    come_and_follow(request, wrong, right, tmp_path)
