"""Plans: what they say, what files they make, and which ones are refused with which numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import PlanError
from lightning_hetero.plan import Narrowing, Plan, StagePlan

WORKERS = ["strix.local:9999", "old-tower:9999"]

FILE_OF_THE_DESIGN = """
micro_batches: 8
in_flight: 4
stages:
  - workers: [coordinator]
    layers: [0, 12]
  - workers: ["strix.local:9999"]
    layers: [12, 32]
    recompute: true
"""

any_stage = st.builds(
    StagePlan,
    workers=st.lists(st.text(), max_size=3),
    layers=st.tuples(st.integers(-(2**63), 2**63), st.integers()),
    recompute=st.sampled_from([False, True, "layers"]),
    compile=st.booleans(),
    embedding=st.booleans(),
    head=st.booleans(),
)
any_plan = st.builds(
    Plan,
    stages=st.lists(any_stage, max_size=4),
    micro_batches=st.integers(),
    in_flight=st.none() | st.integers(),
)


def stage(worker: str, first: int, end: int, **options: Any) -> StagePlan:
    return StagePlan([worker], (first, end), **options)


HERE = stage("coordinator", 0, 2)
THERE = stage("strix.local:9999", 2, 6)


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "plan.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_the_file_that_the_design_shows_is_read_as_meant(tmp_path: Path) -> None:
    stages = [
        StagePlan(["coordinator"], (0, 12)),
        StagePlan(["strix.local:9999"], (12, 32), recompute=True),
    ]
    expected = Plan(stages, micro_batches=8, in_flight=4)
    assert Plan.from_yaml(written(tmp_path, FILE_OF_THE_DESIGN)) == expected


@given(plan=any_plan)
def test_a_written_plan_is_read_back_equal(plan: Plan) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        plan.to_yaml(path)
        assert Plan.from_yaml(path) == plan


def test_a_written_plan_is_plain_yaml(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    Plan([HERE, THERE]).to_yaml(path)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert list(content) == ["stages", "micro_batches", "in_flight"]
    expected = {
        "workers": ["strix.local:9999"],
        "layers": [2, 6],
        "recompute": False,
        "compile": False,
        "embedding": False,
        "head": False,
    }
    assert content["stages"][1] == expected


@pytest.mark.parametrize(
    ("stages", "counts"),
    [
        ([HERE, THERE], (2, 0)),
        ([stage("coordinator", 0, 6)], (6, 0)),
        ([stage("coordinator", 0, 0), stage(WORKERS[0], 0, 6)], (0, 0)),
        ([stage(WORKERS[0], 0, 2), stage("coordinator", 2, 6)], (0, 4)),
        ([HERE, stage(WORKERS[0], 2, 5), stage("coordinator", 5, 6)], (2, 1)),
        ([], (0, 0)),
    ],
)
def test_a_plan_says_how_many_layers_the_coordinator_has_at_its_ends(
    stages: list[StagePlan], counts: tuple[int, int]
) -> None:
    assert Plan(stages).own_counts == counts


def test_only_stages_are_required() -> None:
    plan = Plan.from_dict({"stages": [{"workers": ["a:1"], "layers": [0, 3]}]})
    assert plan == Plan([StagePlan(["a:1"], (0, 3), recompute=False)], 8, None)


def test_a_stage_knows_its_layers_its_worker_and_its_place() -> None:
    assert list(THERE.layer_indices) == [2, 3, 4, 5]
    assert THERE.worker == "strix.local:9999"
    assert (HERE.is_local, THERE.is_local) == (True, False)
    assert Plan([HERE, THERE]).remote_stages == [THERE]


@pytest.mark.parametrize(
    ("stages", "in_flight", "expected"),
    [
        ([HERE], None, 1),
        ([HERE, THERE], None, 4),
        ([THERE], None, 4),
        ([HERE, THERE, stage("old-tower:9999", 6, 8)], None, 6),
        ([HERE, THERE], 3, 3),
        ([StagePlan(["a", "b"], (0, 8), shares=[9, 7])], None, 6),
        ([StagePlan(["a", "b"], (0, 8), shares=[5, 1])], None, 9),
        ([StagePlan(["a", "b", "c"], (0, 8), shares=[5, 3, 1])], None, 14),
        ([StagePlan(["a", "b"], (0, 8), shares=[5, 0])], None, 6),
        ([StagePlan(["a", "b"], (0, 8), shares=[5, 1])], 4, 4),
    ],
)
def test_by_default_processes_and_unlike_shares_bound_the_micro_batches_in_flight(
    stages: list[StagePlan], in_flight: int | None, expected: int
) -> None:
    assert Plan(stages, in_flight=in_flight).max_in_flight == expected


@pytest.mark.parametrize(("embedding", "expected"), [(False, 3), (True, 5)])
def test_half_more_may_have_begun_where_only_token_ids_go_out(
    embedding: bool, expected: int
) -> None:
    stages = [stage("old-tower:9999", 0, 6, embedding=embedding), stage("coordinator", 6, 8)]
    assert Plan(stages, in_flight=3).max_started == expected


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("stages: [", ["is not YAML", "plan.yaml", "after line 1, 'stages: ['"]),
        (b"stages: \xff\xfe", ["plan.yaml"]),
        ("micro_batches: 2024-13-45", ["plan.yaml"]),
        ("", ["is not a plan", "plan.yaml", "None"]),
        ("- 1\n- 2", ["is not a plan", "mapping", "[1, 2]"]),
        ("micro_batches: 8", ["is not a plan", "stages"]),
        ("stages: []\nlayers: 3", ["'layers'", "stages, micro_batches, in_flight"]),
        (
            "stages: [{workers: [a], layers: [0, 1], wokers: 1}]",
            ["'wokers' in stages[0]", "workers, layers, recompute", "Did you mean 'workers'?"],
        ),
        (
            "micro_batches: 4\nstages: []\nmicro_batches: 8",
            ["Line 3, column 1, 'micro_batches: 8'", "twice, also in line 1"],
        ),
    ],
)
def test_a_file_without_a_plan_is_refused_with_its_name_and_the_reason(
    tmp_path: Path, text: str | bytes, fragments: list[str]
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(path)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == []


def test_keys_that_a_mapping_takes_in_from_another_may_be_given_anew(tmp_path: Path) -> None:
    """YAML's own way of leaving repetition out is no repetition."""
    text = """stages:
    - &first {workers: [coordinator], layers: [0, 2], recompute: true}
    - {<<: *first, workers: [a], layers: [2, 3]}
    """
    plan = Plan.from_yaml(written(tmp_path, text))
    assert plan.stages[1] == StagePlan(["a"], (2, 3), recompute=True)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"There is no file .*absent\.yaml"):
        Plan.from_yaml(tmp_path / "absent.yaml")


RANGES = [(0, 3), (3, 6)]


def with_stage(**changes: Any) -> dict[str, Any]:
    return {"stages": [{"workers": ["a:1"], "layers": [0, 3], **changes}]}


def test_a_wrong_word_is_refused_with_the_right_ones() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_dict(with_stage(optimizer="splitt"))
    expected = "stages[0].optimizer is 'splitt'; it must be 'each' or 'split'."
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ({"stages": 5}, "stages"),
        ({"stages": True}, "stages"),
        ({"stages": "abc"}, "stage"),
        ({"stages": {"workers": ["a:1"]}}, "stage"),
        ({"stages": [7]}, "stages[0]"),
        ({"stages": [], "micro_batches": "many"}, "micro_batches"),
        ({"stages": [], "micro_batches": True}, "micro_batches"),
        ({"stages": [], "in_flight": [1]}, "in_flight"),
        (with_stage(workers="a:1"), "stages[0].workers"),
        (with_stage(workers=[1]), "stages[0].workers[0]"),
        (with_stage(layers=[0]), "stages[0].layers"),
        (with_stage(layers=[0, 1, 2]), "stages[0].layers"),
        (with_stage(layers="0, 3"), "stages[0].layers"),
        (with_stage(layers=[0, "end"]), "stages[0].layers[1]"),
        (with_stage(recompute="maybe"), "stages[0].recompute is 'maybe'; it must be one of true"),
        (with_stage(recompute=["layers"]), "stages[0].recompute"),
        (with_stage(recompute=1), "stages[0].recompute is 1; it must be one of true"),
        (with_stage(shares=3), "stages[0].shares"),
        (with_stage(shares=[1.5]), "stages[0].shares[0]"),
        (with_stage(optimizer="all"), "optimizer"),
        ({"stages": [], 1: 2}, "Unknown key 1"),
    ],
)
def test_a_wrong_type_is_refused_by_its_place(content: Any, fragment: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_dict(content)
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    "plan",
    [
        Plan([HERE, THERE]),
        Plan([stage("strix.local:9999", 0, 6)], micro_batches=1, in_flight=1),
        Plan([stage("coordinator", 0, 0), stage("strix.local:9999", 0, 6)]),
        Plan([stage("old-tower:9999", 0, 1), stage("strix.local:9999", 1, 6)]),
        Plan([stage("coordinator", 0, 6)]),
        Plan([stage("old-tower:9999", 0, 1), stage("coordinator", 1, 6)]),
        Plan([StagePlan(["old-tower:9999"], (0, 1), embedding=True), stage("coordinator", 1, 6)]),
        Plan([stage("coordinator", 0, 0), StagePlan(["old-tower:9999"], (0, 6), embedding=True)]),
        Plan([HERE, StagePlan(["old-tower:9999"], (2, 6), head=True)]),
        Plan([StagePlan(WORKERS, (0, 6), embedding=True, head=True)]),
        Plan([StagePlan([WORKERS[0], "coordinator"], (0, 2)), replace(THERE, head=True)]),
        Plan([HERE, stage("old-tower:9999", 2, 4), stage("coordinator", 4, 6)]),
        Plan([stage(WORKERS[0], 0, 2), stage(WORKERS[1], 2, 4), stage(WORKERS[0], 4, 6)]),
        Plan([stage(WORKERS[0], 0, 2), THERE]),
        Plan([StagePlan(WORKERS, (0, 6), shares=[2, 1], optimizer="split")]),
        Plan([StagePlan([*WORKERS, "coordinator"], (0, 6), shares=[0, 3, 1])]),
        Plan([HERE, StagePlan([WORKERS[0], "coordinator"], (2, 4)), stage(WORKERS[1], 4, 6)]),
        Plan([stage(WORKERS[0], 0, 2), StagePlan(["coordinator", WORKERS[0]], (2, 6))]),
    ],
)
def test_a_plan_that_fits_passes(plan: Plan) -> None:
    plan.check(6, WORKERS)


@pytest.mark.parametrize(
    ("plan", "fragments"),
    [
        (Plan([HERE, THERE], micro_batches=0), ["micro_batches is 0", "1 to 65536"]),
        (Plan([HERE, THERE], micro_batches=10**9), ["micro_batches is 1000000000", "65536"]),
        (Plan([HERE, THERE], micro_batches=-3), ["micro_batches is -3"]),
        (Plan([HERE, THERE], in_flight=0), ["in_flight is 0", "1 or more"]),
        (Plan([]), ["covers 0 layers", "has 6", "end at 6"]),
        (Plan([HERE]), ["covers 2 layers", "has 6", "end at 6"]),
        (Plan([HERE, stage(WORKERS[0], 2, 8)]), ["covers 8 layers", "has 6"]),
        (Plan([HERE, stage(WORKERS[0], 3, 6)]), ["[3, 6]", "stages[1]", "gap", "at layer 2"]),
        (Plan([HERE, stage(WORKERS[0], 1, 6)]), ["[1, 6]", "stages[1]", "overlap", "at layer 2"]),
        (Plan([stage(WORKERS[0], 1, 6)]), ["[1, 6]", "stages[0]", "gap", "at layer 0"]),
        (Plan([stage(WORKERS[0], -1, 6)]), ["[-1, 6]", "stages[0]", "at layer 0"]),
        (Plan([HERE, stage(WORKERS[0], 2, 2)]), ["stages[1]", "[2, 2]", "empty"]),
        (Plan([HERE, stage(WORKERS[0], 5, 2)]), ["stages[1]", "[5, 2]", "empty"]),
        (Plan([stage("coordinator", 0, -1)]), ["stages[0]", "[0, -1]", "empty"]),
        (Plan([stage("gone:1", 0, 6)]), ["stages[0]", "'gone:1'", *WORKERS]),
        (Plan([StagePlan([], (0, 6))]), ["stages[0]", "workers []", "at least one"]),
        (
            Plan([StagePlan([WORKERS[0], WORKERS[0]], (0, 6))]),
            ["stages[0]", WORKERS[0], "each only once"],
        ),
        (Plan([StagePlan([WORKERS[0], "gone:1"], (0, 6))]), ["stages[0]", "'gone:1'", *WORKERS]),
        *[
            (Plan([StagePlan(WORKERS, (0, 6), shares=shares)]), ["stages[0]", str(shares), "4096"])
            for shares in ([1], [2, -1], [0, 0], [1, 2, 3], [4000, 97])
        ],
        *[
            (Plan([StagePlan([WORKERS[0], "coordinator"], (0, 6), **keys)]), ["stages[0]", said])
            for keys, said in [
                ({"optimizer": "each"}, "`optimizer: each`"),
                ({"embedding": True}, "`embedding: true`"),
                ({"head": True}, "`head: true`"),
                ({"dtype": "float16"}, "`dtype: float16`"),
            ]
        ],
        (
            Plan(
                [
                    stage(WORKERS[0], 0, 2),
                    StagePlan([WORKERS[0], "coordinator"], (2, 4)),
                    stage(WORKERS[1], 4, 6),
                ]
            ),
            ["replica of the stages [1] of 3", "first or of the last"],
        ),
        (
            Plan(
                [
                    StagePlan([name, "coordinator"], r)
                    for name, r in zip(WORKERS, RANGES, strict=False)
                ]
            ),
            ["replica of the stages [0, 1] of 2"],
        ),
        (
            Plan([stage(WORKERS[0], 0, 2), stage("coordinator", 2, 4), stage(WORKERS[1], 4, 6)]),
            ["stages[1]", "coordinator", "first layers, the last ones, or both"],
        ),
        (
            Plan([HERE, StagePlan(WORKERS[:1], (2, 6), embedding=True)]),
            ["stages[1]", "`embedding: true`", "layer 0", "leave the key out"],
        ),
        (
            Plan([StagePlan(["coordinator"], (0, 6), embedding=True)]),
            ["stages[0]", "`embedding: true`", "worker"],
        ),
        (
            Plan([StagePlan(WORKERS[:1], (0, 6), dtype="float16", embedding=True)]),
            ["stages[0]", "`embedding: true`", "'float16'", "Leave one of them out"],
        ),
        (
            Plan([StagePlan(WORKERS[:1], (0, 4), head=True), stage("coordinator", 4, 6)]),
            ["stages[0]", "`head: true`", "the last layer", "leave the key out"],
        ),
        (
            Plan([StagePlan(["coordinator"], (0, 6), head=True)]),
            ["stages[0]", "`head: true`", "worker"],
        ),
        (
            Plan([StagePlan(WORKERS[:1], (0, 6), dtype="float16", head=True)]),
            ["stages[0]", "`head: true`", "'float16'", "Leave one of them out"],
        ),
        (
            Plan([stage("coordinator", 0, 2), stage("coordinator", 2, 6)]),
            ["all layers in two stages", "one stage, [0, 6]"],
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_its_numbers(
    plan: Plan, fragments: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        plan.check(6, WORKERS)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == []


def test_a_stages_dtype_is_read_from_a_file(tmp_path: Path) -> None:
    text = FILE_OF_THE_DESIGN.replace("recompute: true", "dtype: float16")
    assert Plan.from_yaml(written(tmp_path, text)).stages[1].dtype == "float16"


@pytest.mark.parametrize("dtype", ["float8", "fp16", "torch.float16", 16, "", []])
def test_an_unknown_dtype_is_refused_with_those_there_are(dtype: Any, tmp_path: Path) -> None:
    text = FILE_OF_THE_DESIGN.replace("recompute: true", f"dtype: {dtype!r}")
    with pytest.raises(PlanError, match=r"stages\[1\]; it is one of float32, bfloat16, float16"):
        Plan.from_yaml(written(tmp_path, text))
    there = StagePlan(["strix.local:9999"], (2, 6), dtype=dtype)
    with pytest.raises(PlanError, match=re.escape(f"Unknown dtype {dtype!r} in stages[1]")):
        Plan([HERE, there]).check(6, WORKERS)


def test_a_dtype_of_the_coordinators_stage_is_refused() -> None:
    here = StagePlan(["coordinator"], (0, 2), dtype="float16")
    with pytest.raises(PlanError, match="'float16'.*Lightning's `precision`"):
        Plan([here, THERE]).check(6, WORKERS)


def test_the_narrower_wish_of_two_neighbors_holds_at_their_boundary() -> None:
    plan = Plan(
        [
            StagePlan(["coordinator"], (0, 1), activation_dtype="float32"),
            StagePlan(["a"], (1, 2), activation_dtype="bfloat16", gradient_dtype="int8"),
            StagePlan(["b"], (2, 3), activation_dtype="int8"),
        ]
    )
    assert plan.narrowings == [
        Narrowing("bfloat16", "int8"),
        Narrowing("int8", "int8"),
        Narrowing("int8", None),
    ]
    assert plan.stage_narrowings == [Narrowing("int8", "int8"), Narrowing("int8", "int8")]


def test_a_coordinator_at_both_ends_narrows_each_by_its_own_stage() -> None:
    plan = Plan(
        [
            StagePlan(["coordinator"], (0, 1), activation_dtype="int8"),
            StagePlan(["a"], (1, 2)),
            StagePlan(["coordinator"], (2, 3), gradient_dtype="bfloat16"),
        ]
    )
    assert plan.narrowings == [Narrowing("int8", None), Narrowing(None, "bfloat16")]


def test_a_worker_of_several_stages_is_one_process() -> None:
    halves = [stage(WORKERS[n % 2], n, n + 1) for n in range(6)]
    assert Plan(halves).workers == WORKERS
    assert Plan(halves).max_in_flight == 6


def test_by_default_no_boundary_is_narrowed() -> None:
    plan = Plan([StagePlan(["a"], (0, 2)), StagePlan(["b"], (2, 3))])
    assert plan.narrowings == [Narrowing()] * 3


def test_an_unknown_dtype_on_the_wire_is_refused() -> None:
    plan = Plan([StagePlan(["a"], (0, 2), gradient_dtype="int4")])  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"Unknown gradient_dtype 'int4' in stages\[0\]"):
        plan.check(2, ["a"])


@pytest.mark.follows("compiled layers cannot change their memory. Leave one of them out.")
@pytest.mark.follows("write `recompute: layers` into the same stage.")
@pytest.mark.follows("Start a worker on the coordinator's machine and give it the layers")
@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"weights": "tape"}, "Unknown weights 'tape' in stages\\[0\\]; it is one of disk, host"),
        ({"weights": "disk"}, "write `recompute: layers` into the same stage"),
        ({"weights": "disk", "recompute": True}, "write `recompute: layers` into the same stage"),
        ({"weights": "disk", "recompute": "layers", "compile": True}, "Leave one of them out"),
        (
            {"weights": "host", "recompute": "layers", "workers": ["coordinator"]},
            "only a worker reads weights layer by layer",
        ),
        (
            {"weights": "disk", "recompute": "layers", "workers": ["a", "coordinator"]},
            "only a worker reads weights layer by layer",
        ),
    ],
)
def test_weights_that_are_read_by_layers_have_their_conditions(stage: Any, message: str) -> None:
    plan = Plan([StagePlan(**{"workers": ["a"], "layers": (0, 4), **stage})])
    with pytest.raises(PlanError, match=message):
        plan.check(4, ["a"])
    mended = {"weights": "disk", "recompute": "layers", "compile": False, "workers": ["a"]}
    Plan([StagePlan(**{"layers": (0, 4), **stage, **mended})]).check(4, ["a"])


def test_where_weights_are_kept_is_written_and_read(tmp_path: Path) -> None:
    plan = Plan([StagePlan(["a"], (0, 4), recompute="layers", weights="disk")])
    plan.check(4, ["a"])
    plan.to_yaml(tmp_path / "plan.yaml")
    assert Plan.from_yaml(tmp_path / "plan.yaml") == plan
