"""A state has one writer: no module sets an attribute of another module's object."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import lightning_hetero

ROOT = Path(lightning_hetero.__file__).parent

ALLOWED: Mapping[str, set[str]] = {
    "An object of PyTorch, Lightning, Transformers or Python has an attribute of a class's name.": {
        "coordinator/dry_run.py strategy.optimizers",
        "guard/first_batch.py inner.training",
        "model/four_bit.py linear.compute_dtype",
        "model/four_bit.py linear.weight",
        "model/four_bit.py linear.weight.data",
        "model/four_bit.py linear.weight.compress_statistics",
        "model/four_bit.py linear.weight.quant_type",
        "model/four_bit.py old.four_bit",
        "model/four_bit.py parametrization.four_bit",
        "model/four_bit.py state.offset",
        "model/attributes.py bits.state",
        "model/half_layers.py layer.training",
        "model/hollow_state_dicts.py alias.data",
        "model/kv_cache.py self._here.is_kept",
        "model/layer_call.py module.training",
        "model/layers.py PreTrainedModel.device",
        "model/partial_layers.py first.training",
        "model/partial_layers.py second.training",
        "pipeline/driver.py error.args",
        "pipeline/handover.py ctx.entered",
        "pipeline/handover.py ctx.returned",
        "pipeline/handover.py ctx.token",
        "pipeline/optimizer.py average.data",
        "pipeline/optimizer.py tensor.data",
        "pipeline/layer_runs.py module.training",
        "pipeline/layer_runs.py parameter.data",
        "pipeline/turns.py threading.current_thread().name",
        "strategy/loaders.py trainer._results.batch",
        "strategy/optimizers.py optimizer.state",
        "strategy/strategy.py exception.args",
        "strategy/strategy.py exception.code",
        "strategy/training_run.py plugin.backward",
    },
    "A tensor's class cannot have a constructor of its own, so its maker sets the attributes.": {
        "model/placeholders.py made._assumptions",
        "model/placeholders.py made._place",
        "model/placeholders.py made.content",
        "model/placeholders.py made.form",
        "model/placeholders.py made.number",
        "model/placeholders.py made.parameter",
        "model/placeholders.py made.position",
    },
    "A placeholder learns its content when the content is known.": {
        "model/hollow.py content.here",
        "model/hollow_forward.py made.content.name",
    },
    "Overrides of one method make a chain, and each may leave it.": {
        "model/override.py above._own_below",
    },
    "A result of profiling is filled in while its trials run.": {
        "profiler/measure.py result.timings",
        "profiler/measure.py results[name].software_seconds",
        "profiler/profiling_run.py result.software_seconds",
    },
    "The record of a run's checks is filled in by each check.": {
        "guard/first_batch.py self.checks.are_over",
        "guard/first_batch.py self.checks.needs_gradients",
        "guard/first_batch.py self.checks.takes_few",
        "guard/step_guard.py checks.kept",
    },
    "The module's weights in a checkpoint are marked by the strategy that reads them.": {
        "profiler/profiling_run.py weights.is_deployed",
        "strategy/deploy.py weights.is_deployed",
    },
    "Parameters hide their gradients while the optimizer here steps.": {
        "strategy/optimizers.py self._gradients.are_hidden",
    },
}
"""By the reason: the module and the target of each allowed assignment. The sets may only shrink."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def stored(tree: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes set in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def declared(tree: ast.Module) -> dict[str, set[str]]:
    """The names of the attributes of each class of a module."""
    found: dict[str, set[str]] = defaultdict(set)
    for each in ast.walk(tree):
        if not isinstance(each, ast.ClassDef):
            continue
        found[each.name] |= {node.attr for node in stored(each) if is_own(node)}
        for line in each.body:
            targets = line.targets if isinstance(line, ast.Assign) else []
            targets = [line.target] if isinstance(line, ast.AnnAssign) else targets
            found[each.name] |= {name.id for name in targets if isinstance(name, ast.Name)}
    return found


def set_by_name(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The objects and attributes in `setattr(object, "attribute", ...)` and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > 1:
            setters = {ast.unparse(each) for each in (node.func, node.args[0])}
            for owner, name in pairwise(node.args):
                if setters & {"setattr", "delattr", "stand_in"} and isinstance(name, ast.Constant):
                    yield ast.unparse(owner), name.value


def made(function: Function) -> set[str]:
    """The names of the objects made in a function: of calls of classes, and of `__new__`."""
    found = set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func).rpartition(".")[-1]
            if called[:1].isupper() or called in ("__new__", "_make_subclass", "_make_wrapper"):
                found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return found


def functions(tree: ast.AST, holder: str = "") -> Iterator[tuple[str, Function]]:
    """The outermost functions, each with the name of its class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield holder, node
        else:
            yield from functions(node, node.name if isinstance(node, ast.ClassDef) else holder)


def written_from_outside() -> Iterator[tuple[str, str]]:
    """The assignments to attributes of other modules' classes: the module, and the target.

    An attribute that no class of the package declares belongs to a library's object.
    """
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for path in ROOT.rglob("*.py")
    }
    classes = {module: declared(tree) for module, tree in trees.items()}
    anywhere = {name for each in classes.values() for names in each.values() for name in names}
    for module, tree in trees.items():
        for holder, function in functions(tree):
            others = [names for name, names in classes[module].items() if name != holder]
            foreign, new = anywhere.difference(*others), made(function)
            for node in stored(function):
                is_new = isinstance(node.value, ast.Name) and node.value.id in new
                if not is_own(node) and not is_new and node.attr in foreign:
                    yield module, ast.unparse(node)
            for owner, name in set_by_name(function):
                if owner != "self" and name in foreign:
                    yield module, f"{owner}.{name}"


def test_no_module_sets_an_attribute_of_another_modules_object() -> None:
    allowed = {place for places in ALLOWED.values() for place in places}
    found = {f"{module} {target}" for module, target in written_from_outside()}
    assert sorted(found - allowed) == []
    assert sorted(allowed - found) == [], "Take these out of the list."
