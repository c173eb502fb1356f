"""Scenarios: the shape of a plan, what training uses, and what happens meanwhile. Plain data.

    shape      who holds which layers             a line, turns, replicas, an idle worker, ...
    options    what training uses besides         LoRA, clipping, windows, dropout, ...
    event      what happens in the third step     a move, a loss, a cut, Ctrl-C, ...

A run has four optimizer steps, two in each epoch. `verdict` says which combinations are refused or
do not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from lightning_hetero import Plan
from lightning_hetero.plan import ReplicaOptimizer

from ..integration import shapes

PIECES = 3
"""The micro-batches of a batch."""


@dataclass(frozen=True)
class Shape:
    """Who holds which layers.

    Args:
        stages: The processes and layers of each stage: C is the coordinator, a and b are workers.
        then: The shape to which layers move, and under which a run resumes.
        optimizer: Who steps the parameters that several processes hold.
        embedding: Whether the first worker has the input embedding.
        cuts_layers: Whether stages have halves of layers.
    """

    stages: shapes.Shape
    then: str
    optimizer: ReplicaOptimizer | None = None
    embedding: bool = False
    cuts_layers: bool = False

    def plan(self, workers: Sequence[str], pieces: int, recompute: bool = False) -> Plan:
        """The plan over these workers."""
        plan = shapes.shaped(workers, self.stages, pieces, recompute=recompute)
        first, *others = (
            replace(stage, optimizer=self.optimizer) if len(stage.workers) > 1 else stage
            for stage in plan.stages
        )
        return replace(plan, stages=[replace(first, embedding=self.embedding), *others])


SHAPES: dict[str, Shape] = {
    "line": Shape(shapes.SHAPES["line"], "both ends"),
    "both ends": Shape(shapes.SHAPES["both ends, two workers"], "turns"),
    "turns": Shape(shapes.SHAPES["turn by turn"], "replicas"),
    "embedding away": Shape([("a", 0, 2), ("b", 2, 4), ("C", 4, 5)], "line", embedding=True),
    "halves": Shape(
        [("C", 0, 1), ("a", 1, 4), ("b", 4, 7), ("a", 7, 9), ("C", 9, 10)],
        "other halves",
        cuts_layers=True,
    ),
    "idle worker": Shape([("C", 0, 2), ("a", 2, 5)], "line"),
    "replicas": Shape([("C", 0, 1), ("ab", 1, 4, [1, 2]), ("C", 4, 5)], "split replicas"),
    "split replicas": Shape([("ab", 0, 2), ("ba", 2, 5, [2, 1])], "coordinator a replica", "split"),
    "coordinator a replica": Shape(
        [("C", 0, 1), ("b", 1, 2), ("aC", 2, 5, [2, 1])], "coordinator a split replica"
    ),
    "coordinator a split replica": Shape(
        [("aC", 0, 3, [1, 2]), ("ab", 3, 5)], "idle worker", "split"
    ),
}
AIMS = SHAPES | {
    "other halves": Shape([("a", 0, 5), ("C", 5, 10)], "halves", cuts_layers=True),
}
"""All shapes, with one to which layers move only."""

OPTIONS = (
    *("LoRA", "NF4", "clipping by value", "clipping by norm", "accumulation", "16-mixed"),
    *("bf16-mixed", "dropout", "EMA", "freezing", "padding", "recompute", "tied"),
    *("manual", "two optimizers", "boundary"),
)
EVENTS = ("none", "resume", "move", "loss", "cut", "join", "leave", "Ctrl-C")

HOSTED = ("coordinator a replica", "coordinator a split replica")
"""The shapes in which the coordinator is a replica."""
WHOLE = frozenset({"manual", "two optimizers", "boundary"})
"""Under these the code sees the whole batch; hidden states alone are cut."""


@dataclass(frozen=True)
class Scenario:
    """A run.

    Args:
        shape: Who holds which layers, by its name.
        options: What the training uses.
        event: What happens in the third step.
        aim: The shape to which layers move, or under which a run resumes; empty for one that
            goes with the first one.
    """

    shape: str = "line"
    options: tuple[str, ...] = ()
    event: str = "none"
    aim: str = ""

    def __str__(self) -> str:
        to = f" to {self.aim}" if self.aim and self.has_aim else ""
        return " + ".join([self.shape, *self.options, self.event]) + to

    @property
    def values(self) -> list[str]:
        """Its shape, options and event."""
        return [self.shape, *self.options, self.event]

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """Each two of its values, in the order of the tables."""
        return {*combinations(self.values, 2)}

    @property
    def has_aim(self) -> bool:
        """Whether there is a second shape."""
        return self.event in ("move", "resume")

    @property
    def then(self) -> str:
        """The name of the second shape."""
        then = self.aim or SHAPES[self.shape].then
        return "line" if not self.aim and then in HOSTED and WHOLE & {*self.options} else then

    @property
    def pieces(self) -> int:
        """The micro-batches of a batch.

        The layers draw dropout masks for each piece of a whole batch. One device draws them for the
        batch, so there is one piece then.
        """
        return 1 if "dropout" in self.options and WHOLE & {*self.options} else PIECES

    @property
    def window(self) -> int:
        """The batches of an optimizer step."""
        return 2 if "accumulation" in self.options else 1


@dataclass(frozen=True)
class Rule:
    """Values of two axes that do not go together.

    Args:
        first: One of these,
        second: with one of these
        refused: ends with an error of this sentence, a regular expression;
        impossible: or does not exist, for this reason.
    """

    first: Iterable[str]
    second: Iterable[str]
    refused: str = ""
    impossible: str = ""


BY_HAND = ("manual", "two optimizers")

RULES = (
    Rule(HOSTED, BY_HAND, refused="under manual optimization this process runs none of them"),
    Rule(HOSTED, ["boundary"], refused="under 'boundary' this process runs none of them"),
    Rule(BY_HAND, ["move"], refused="Layers do not move under manual optimization"),
    Rule(["embedding away"], ["tied"], refused=r"embed_tokens\.weight is shared as.*lm_head"),
    Rule(["LoRA"], ["NF4"], impossible="what trains beside four bits are adapters already"),
    Rule(
        ["clipping by value"],
        ["clipping by norm"],
        impossible="a Trainer clips in one way",
    ),
    Rule(["16-mixed"], ["bf16-mixed"], impossible="a Trainer has one precision"),
    Rule(["manual"], ["two optimizers"], impossible="several optimizers are manual already"),
    Rule(BY_HAND, ["boundary"], impossible="manual optimization cuts at the boundary already"),
    Rule(BY_HAND, ["join"], impossible="layers do not move under manual optimization"),
    Rule(BY_HAND, ["leave"], impossible="layers do not move under manual optimization"),
)
_VERDICTS = {frozenset(pair): rule for rule in RULES for pair in product(rule.first, rule.second)}


_OTHER_LAYERS = Rule([], [], impossible="a run counts whole layers or halves of them")
# The first plan of a run frees the workers that it does not need.
_FREED = Rule(["idle worker"], ["move"], refused="was freed as the run began")


def verdict(scenario: Scenario) -> Rule | None:
    """The first rule against a scenario; None if it runs."""
    pairs = sorted(scenario.pairs)
    if scenario.has_aim:
        pairs += [(scenario.then, value) for value in scenario.values]
    rules = filter(None, (_VERDICTS.get(frozenset(pair)) for pair in pairs))
    cuts = {AIMS[name].cuts_layers for name in (scenario.shape, scenario.then)}
    if scenario.event == "move" and len(cuts) > 1:
        return next(rules, _OTHER_LAYERS)
    is_freed = scenario.shape in _FREED.first and scenario.event in _FREED.second
    return next(rules, _FREED if is_freed else None)
