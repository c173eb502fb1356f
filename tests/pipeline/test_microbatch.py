"""Batches of all common kinds are cut into micro-batches, and their losses weighed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers import BatchEncoding

from lightning_hetero.devices.copies import PlainCopies, StreamedCopies
from lightning_hetero.errors import BatchError
from lightning_hetero.pipeline.microbatch import (
    CutBatch,
    SampleFinder,
    Samples,
    batch_size,
    copied,
    counted_labels,
    find_samples,
    loss_weights,
    spans,
    split_batch,
)

from ..devices.made_up_streams import MadeUpStreams, on_device
from ..models import sequences, tiny_llama


class Sample(NamedTuple):
    image: Tensor
    label: Tensor


@dataclass(frozen=True)
class Graph:
    nodes: Tensor
    name: str
    size: int = field(init=False, default=0)


def weights_of(microbatches: Any, weighting: Any, sample_counts: list[int]) -> list[float]:
    return loss_weights(
        microbatches, weighting, sample_counts, PlainCopies(torch.device("cpu"))
    ).all


def rows(count: int = 5) -> Tensor:
    return torch.arange(count * 2).reshape(count, 2)


def padded_batch(count: int = 6) -> dict[str, Tensor]:
    samples = sequences(count, padded=True)
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


@given(st.integers(0, 40), st.integers(1, 12))
def test_spans_cover_everything_once_and_nearly_evenly(size: int, num_pieces: int) -> None:
    found = spans(size, num_pieces)
    assert [i for start, end in found for i in range(start, end)] == list(range(size))
    lengths = [end - start for start, end in found]
    assert len(found) == max(1, min(size, num_pieces))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(st.integers(1, 12), st.integers(1, 6))
def test_a_cut_tensor_joins_to_itself(size: int, num_microbatches: int) -> None:
    microbatches = split_batch(rows(size), num_microbatches)
    assert len(microbatches) == min(size, num_microbatches)
    assert torch.equal(torch.cat(microbatches), rows(size))


@pytest.mark.parametrize("container", [dict, OrderedDict, BatchEncoding])
def test_mappings_keep_their_type_and_order(container: Any) -> None:
    batch = container({"b": rows(), "a": rows() + 1})
    first, second = split_batch(batch, 2)
    assert type(first) is type(second) is container
    assert list(first) == list(batch)
    assert torch.equal(torch.cat([first["a"], second["a"]]), batch["a"])
    assert batch_size(batch) == 5


def test_named_tuples_keep_their_type() -> None:
    first, second = split_batch(Sample(rows(), torch.arange(5)), 2)
    assert isinstance(second, Sample)
    assert torch.equal(first.label, torch.arange(3))
    assert torch.equal(second.image, rows()[3:])


@pytest.mark.parametrize("container", [tuple, list])
@pytest.mark.parametrize("size", [2, 5])
def test_pairs_of_tensors_are_cut_inside_whatever_the_batch_size(container: Any, size: int) -> None:
    batch = container([rows(size), torch.arange(size)])
    first, second = split_batch(batch, 2)
    assert type(first) is container
    assert torch.equal(torch.cat([first[0], second[0]]), batch[0])
    assert torch.equal(torch.cat([first[1], second[1]]), batch[1])


def test_dataclasses_keep_their_type() -> None:
    first, second = split_batch(Graph(rows(), "molecule"), 2)
    assert isinstance(first, Graph)
    assert torch.equal(second.nodes, rows()[3:])
    assert second.name == "molecule"


def test_a_list_with_one_text_per_sample_is_cut_like_the_tensors() -> None:
    first, second = split_batch({"x": rows(), "text": list("abcde")}, 2)
    assert (first["text"], second["text"]) == (list("abc"), list("de"))


def test_a_list_with_one_tensor_per_sample_is_cut_like_the_tensors() -> None:
    boxes = [torch.zeros(count, 4) for count in (3, 1, 4, 1, 2)]
    first, second = split_batch({"x": rows(), "boxes": boxes}, 2)
    assert [len(found) for found in first["boxes"]] == [3, 1, 4]
    assert [len(found) for found in second["boxes"]] == [1, 2]


def test_what_has_no_samples_goes_into_every_microbatch() -> None:
    constants = {"scale": torch.tensor(2.0), "epoch": 3, "rate": 0.5, "name": "x", "none": None}
    for microbatch in split_batch({"x": rows(), **constants}, 3):
        assert {key: microbatch[key] for key in constants} == constants


def test_nested_containers_are_cut_at_every_depth() -> None:
    batch = {"inputs": {"ids": rows(), "pair": (rows(), [rows()])}}
    second = split_batch(batch, 2)[1]["inputs"]
    found = [second["ids"], second["pair"][0], second["pair"][1][0]]
    assert all(torch.equal(tensor, rows()[3:]) for tensor in found)


def test_fewer_samples_than_microbatches_give_one_each() -> None:
    microbatches = split_batch({"x": rows(2)}, 8)
    assert [microbatch["x"].tolist() for microbatch in microbatches] == [[[0, 1]], [[2, 3]]]


def test_the_batch_itself_is_left_as_it_was() -> None:
    batch = {"x": rows(), "text": list("abcde")}
    split_batch(batch, 2)
    assert torch.equal(batch["x"], rows())  # type: ignore[arg-type]
    assert batch["text"] == list("abcde")


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"x": rows(), "mask": torch.zeros(3, 3)}, r"5 samples,.* shape \(3, 3\)"),
        ({"x": rows(), "thing": object()}, "object"),
        ({"x": rows(), "array": rows().numpy()}, "ndarray"),
        ({"scale": torch.tensor(1.0)}, "no tensor"),
        (["a", "b"], "no tensor"),
        (object(), "object holds no tensor"),
        ({"x": rows(), "labels": {1, 2}}, "set"),
        ({"x": torch.zeros(4, 2), "sparse": torch.eye(4).to_sparse()}, "sparse or nested"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(batch: Any, reason: str) -> None:
    with pytest.raises(BatchError, match=reason):
        split_batch(batch, 2)


def counted_by_llama(batch: dict[str, Tensor]) -> int:
    """How many labels the mean inside LlamaForCausalLM runs over, from its own numbers."""
    with torch.no_grad():
        output = tiny_llama(1)(**batch)
    shifted = functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    total = functional.cross_entropy(
        output.logits.flatten(0, 1), shifted.flatten(), reduction="sum"
    )
    return round(float(total / output.loss))


def with_prompt(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The labels of the first three tokens left out, as for a prompt."""
    labels = batch["labels"].clone()
    labels[:, :3] = -100
    return {**batch, "labels": labels}


def left_padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.flip(1) for key, tensor in batch.items()}


@pytest.mark.parametrize(
    "change", [dict, with_prompt, left_padded], ids=["padding", "prompt", "left padding"]
)
@pytest.mark.parametrize("container", [dict, BatchEncoding])
def test_counted_labels_are_those_that_llamas_loss_averages(change: Any, container: Any) -> None:
    batch = change(padded_batch())
    assert counted_labels(container(batch)) == counted_by_llama(batch)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 6])
def test_losses_weighed_by_labels_add_up_to_llamas_loss_of_the_batch(
    num_microbatches: int,
) -> None:
    batch, model = padded_batch(), tiny_llama(1)
    microbatches = split_batch(batch, num_microbatches)
    weights = weights_of(microbatches, "auto", [batch_size(m) for m in microbatches])
    with torch.no_grad():
        losses = [float(model(**microbatch).loss) for microbatch in microbatches]
        expected = float(model(**batch).loss)
    combined = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    assert combined == pytest.approx(expected, rel=1e-5)


def test_labels_that_the_user_shifted_are_all_counted() -> None:
    batch = padded_batch()
    shifted = functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    found = counted_labels({"input_ids": batch["input_ids"], "labels": shifted})
    assert found == int((shifted != -100).sum())


@pytest.mark.parametrize("change", [dict, with_prompt], ids=["padding", "prompt"])
def test_ids_of_another_name_show_that_llamas_loss_shifts_the_labels(change: Any) -> None:
    batch = change(padded_batch())
    expected = counted_by_llama(batch)
    renamed = {"tokens" if key == "input_ids" else key: batch[key] for key in batch}
    assert counted_labels(renamed) == expected


def test_labels_of_two_classes_that_equal_a_mask_are_all_counted() -> None:
    ones = torch.ones(3, 4, dtype=torch.long)
    assert counted_labels({"labels": ones.clone(), "mask": ones, "ids": ones * 5}) == 12


def test_class_labels_are_counted_one_per_sample() -> None:
    labels = torch.tensor([1, -100, 0])
    assert counted_labels({"input_ids": rows(3), "labels": labels}) == 2


def test_labels_of_an_object_are_its_attribute() -> None:
    batch = Sample(rows(3), torch.zeros(3))
    assert weights_of([batch, batch], "auto", [3, 1]) == [0.75, 0.25]


@pytest.mark.parametrize("weighting", ["samples", "auto"])
def test_without_labels_samples_count(weighting: Any) -> None:
    assert weights_of([{"x": rows(3)}, {"x": rows(1)}], weighting, [3, 1]) == [0.75, 0.25]


def test_real_valued_targets_are_no_token_labels() -> None:
    microbatches = [{"labels": torch.zeros(3)}, {"labels": torch.zeros(1)}]
    assert weights_of(microbatches, "auto", [3, 1]) == [0.75, 0.25]


def test_samples_count_when_asked_for_even_with_labels() -> None:
    microbatches = split_batch(padded_batch(4), 2)
    assert weights_of(microbatches, "samples", [2, 2]) == [0.5, 0.5]


def test_a_users_own_weights_are_normalized() -> None:
    assert weights_of([1.0, 3.0], lambda microbatch: microbatch, [1, 1]) == [0.25, 0.75]


def test_a_microbatch_without_counted_labels_weighs_nothing() -> None:
    labels = torch.tensor([[-100, -100], [-100, 1]])
    microbatches = split_batch({"input_ids": rows(2) + 7, "labels": labels}, 2)
    assert weights_of(microbatches, "labels", [1, 1]) == [0.0, 1.0]


def test_samples_count_where_no_label_counts() -> None:
    microbatches = split_batch({"labels": torch.full((4, 2), -100)}, 2)
    assert weights_of(microbatches, "labels", [2, 2]) == [0.5, 0.5]


def test_asking_for_labels_that_are_not_there_is_refused() -> None:
    with pytest.raises(BatchError, match="loss_weighting='labels'"):
        weights_of([{"x": rows()}], "labels", [5])


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_a_weight_below_zero_or_not_a_number_is_refused(weight: float) -> None:
    with pytest.raises(BatchError, match="negative"):
        weights_of([1.0, weight], lambda microbatch: microbatch, [1, 1])


def test_a_list_of_several_loaders_batches_is_cut_inside() -> None:
    batch = [{"x": torch.arange(4)}, {"y": torch.arange(8).view(4, 2)}]
    pieces = split_batch(batch, 2, of_several_loaders=True)
    assert [len(piece) for piece in pieces] == [2, 2]
    assert torch.equal(pieces[1][0]["x"], torch.tensor([2, 3]))
    assert torch.equal(pieces[0][1]["y"], torch.arange(4).view(2, 2))


def test_a_loader_that_has_ended_has_nothing_in_any_micro_batch() -> None:
    pieces = split_batch([None, torch.arange(4), None], 2, of_several_loaders=True)
    assert [[part if part is None else part.tolist() for part in piece] for piece in pieces] == [
        [None, [0, 1], None],
        [None, [2, 3], None],
    ]
    with pytest.raises(BatchError):
        split_batch([None, None], 2, of_several_loaders=True)


def test_batches_of_several_loaders_must_have_as_many_samples() -> None:
    batch = [{"x": torch.arange(4)}, {"x": torch.arange(1)}]
    with pytest.raises(BatchError, match="2 data loaders differ in their samples"):
        split_batch(batch, 2, of_several_loaders=True)


def test_nobody_waits_for_labels_to_be_counted_before_a_weight_is_used() -> None:
    streams = MadeUpStreams()
    counted: list[bool] = []
    streams.compute(lambda: counted.append(True))
    batches = [{"labels": on_device(torch.tensor([1, 2, -100]))}, {"labels": torch.tensor([3])}]
    weights = loss_weights(batches, "labels", [3, 1], StreamedCopies(streams))
    second = weights.of(1, scale=3.0)
    assert counted == []
    assert second() == pytest.approx(1.0)
    assert counted == [True]


def test_labels_below_the_top_of_a_batch_are_counted() -> None:
    inside = with_prompt(padded_batch())
    expected = counted_by_llama(inside)
    assert counted_labels((inside, ["a header"])) == expected
    assert counted_labels({"text": {"inputs": inside}}) == expected


def test_several_labels_in_a_batch_are_not_counted() -> None:
    batch = {"chosen": padded_batch(), "rejected": with_prompt(padded_batch())}
    pieces = split_batch(batch, 2)
    with pytest.warns(UserWarning, match="no single entry `labels`"):
        assert weights_of(pieces, "auto", [3, 3]) == [0.5, 0.5]
    with pytest.raises(BatchError, match="one `labels` entry"):
        weights_of(pieces, "labels", [3, 3])


def test_losses_that_are_sums_are_added_up() -> None:
    assert weights_of([rows(3), rows(1)], "sum", [3, 1]) == [1.0, 1.0]


def test_labels_under_another_name_give_a_warning() -> None:
    labels = torch.tensor([[1, 2], [3, -100]])
    with pytest.warns(UserWarning, match="holds the whole number -100"):
        assert weights_of([(rows(1), labels[:1]), (rows(1), labels[1:])], "auto", [1, 1]) == [
            0.5,
            0.5,
        ]


def test_a_chosen_weighting_gives_no_warning() -> None:
    assert weights_of([torch.tensor([-100])] * 2, "samples", [1, 1]) == [0.5, 0.5]


LONG = torch.arange(7 * 4).view(7, 4)


def test_the_loaders_batch_size_shows_that_positions_come_first() -> None:
    batch = {"ids": LONG, "hidden": torch.zeros(7, 4, 3), "label": torch.arange(4)}
    samples = find_samples(batch, expected=4)
    assert samples == Samples(4, dim=1)
    first, second = split_batch(batch, 2, samples=samples)
    assert torch.equal(torch.cat([first["ids"], second["ids"]], 1), LONG)
    assert second["hidden"].shape == (7, 2, 3)
    assert second["label"].tolist() == [2, 3]


@pytest.mark.parametrize("expected", [None, 7, 3, 9])
def test_samples_come_first_unless_something_shows_that_they_do_not(expected: int | None) -> None:
    assert find_samples(LONG, expected) == Samples(7)


def test_the_dimension_that_the_user_names_is_taken() -> None:
    assert find_samples(LONG, dim=1) == Samples(4, dim=1)
    assert find_samples((torch.arange(4), LONG), dim=1) == Samples(4, dim=1)


def test_batches_with_samples_first_are_known_although_layers_take_them_second() -> None:
    assert find_samples(LONG, expected=7, dim=1) == Samples(7)


def test_a_square_batch_goes_by_what_another_one_has_shown() -> None:
    square = torch.zeros(4, 4)
    assert find_samples(square, expected=4) == Samples(4)
    finder = SampleFinder(None)
    assert finder.find(LONG, 4, False) == Samples(4, dim=1)
    assert finder.find(square, 4, False) == Samples(4, dim=1)
    assert finder.find(torch.zeros(7, 2), 4, False) == Samples(2, dim=1)


def test_a_list_with_one_tensor_per_sample_is_cut_between_them() -> None:
    batch = [torch.full((7,), number) for number in range(3)]
    samples = find_samples(batch, expected=3, may_be_listed=True)
    assert samples == Samples(3, are_listed=True)
    first, second = split_batch(batch, 2, samples=samples)
    assert [tensor[0].item() for tensor in first + second] == [0, 1, 2]
    assert [len(first), len(second)] == [2, 1]


def test_a_list_of_pairs_is_cut_between_them() -> None:
    batch = [(torch.zeros(7), torch.tensor(number)) for number in range(4)]
    samples = find_samples(batch, expected=4, may_be_listed=True)
    assert [len(piece) for piece in split_batch(batch, 2, samples=samples)] == [2, 2]


@pytest.mark.parametrize("container", [tuple, list, lambda parts: dict(enumerate(parts))])
def test_lists_inside_of_a_batch_have_one_entry_per_sample(container: Any) -> None:
    """Images and targets of unequal sizes: the first image's channels count nothing."""
    images = [torch.zeros(3, 4 + number) for number in range(8)]
    targets = [{"boxes": torch.zeros(number, 4)} for number in range(8)]
    batch = container([images, targets, torch.arange(8)])
    samples = find_samples(batch, expected=8, may_be_listed=True)
    assert samples == Samples(8)
    pieces = [
        [*piece.values()] if isinstance(piece, dict) else piece
        for piece in split_batch(batch, 3, samples=samples)
    ]
    assert [len(piece[0]) for piece in pieces] == [3, 3, 2]
    assert [each["boxes"].shape[0] for piece in pieces for each in piece[1]] == [*range(8)]
    assert torch.cat([piece[2] for piece in pieces]).tolist() == [*range(8)]


def test_a_list_beside_a_tensor_without_samples_tells_nothing() -> None:
    batch = ([torch.zeros(3)] * 8, torch.zeros(5))
    assert find_samples(batch, expected=8, may_be_listed=True) == Samples(3)


def test_two_tensors_of_two_samples_are_no_list_of_samples() -> None:
    assert find_samples([rows(2), rows(2)], expected=2, may_be_listed=True) == Samples(2)


def test_what_torch_collates_is_no_list_of_samples() -> None:
    assert find_samples([LONG, LONG], expected=2) == Samples(7)


def test_a_list_of_two_dicts_that_each_hold_all_samples_is_cut_inside_of_them() -> None:
    batch = [{"x": rows(4)}, {"row": torch.arange(4)}]
    samples = find_samples(batch, expected=4)
    assert samples == Samples(4)
    _, second = split_batch(batch, 2, samples=samples)
    assert [second[0]["x"].shape[0], second[1]["row"].tolist()] == [2, [2, 3]]


ROWS = torch.arange(10).view(5, 2)
COPIES = PlainCopies(torch.device("cpu"))


def test_the_first_micro_batches_are_a_batch_of_their_own() -> None:
    batch = CutBatch.of({"x": ROWS}, 3, find_samples(ROWS))
    assert list(batch.num_samples) == [2, 2, 1]
    first = batch.first(2)
    assert torch.equal(first.whole["x"], ROWS[:4])
    assert torch.equal(torch.cat([piece["x"] for piece in first.microbatches]), ROWS[:4])
    assert first.samples == Samples(4)
    assert batch.first(3) is batch


def test_micro_batches_along_the_second_dimension() -> None:
    first = CutBatch.of(ROWS, 2, Samples(2, dim=1)).first(1)
    assert torch.equal(first.whole, ROWS[:, :1])


def test_a_batch_of_several_loaders_has_the_samples_of_one() -> None:
    batch = CutBatch.of([None, {"x": ROWS}], 2, None)
    assert list(batch.num_samples) == [3, 2]
    assert batch.weights("samples", COPIES).all == [0.6, 0.4]


def test_an_uncut_batch_is_its_own_micro_batch() -> None:
    thing = object()
    assert CutBatch.uncut(thing).microbatches == [thing]
    for weighting in ("labels", "sum", lambda _: 0.0):
        assert CutBatch.uncut(thing).weights(weighting, COPIES).all == [1.0]
    with pytest.raises(BatchError):
        CutBatch.of([None, None], 2, None)


def test_a_copy_has_tensors_and_containers_of_its_own() -> None:
    sample, graph = Sample(rows(), rows()), Graph(rows(), "a")
    batch = {"tokens": rows(), "parts": [sample, (graph, "text", None, 2)], "more": {"x": rows()}}
    found = copied(BatchEncoding(batch))
    assert isinstance(found, BatchEncoding)
    found["tokens"].zero_()
    found["more"].pop("x").zero_()
    found["parts"][0].image.zero_()
    found["parts"][1][0].nodes.zero_()
    found["parts"].pop()
    assert torch.equal(batch["tokens"], rows())
    assert torch.equal(batch["more"]["x"], rows())
    assert torch.equal(sample.image, rows())
    assert torch.equal(graph.nodes, rows())
    assert len(batch["parts"]) == 2


def test_a_tensor_with_two_names_has_them_in_a_copy_too() -> None:
    tokens = rows()
    found = copied({"input_ids": tokens, "labels": tokens})
    assert found["input_ids"] is found["labels"]


def test_micro_batches_count_their_changes_in_place_for_themselves() -> None:
    batch = rows(4)
    first, second = split_batch(batch, 2)
    second.zero_()
    assert (first._version, second._version) == (0, 1)
    assert torch.equal(batch[2:], torch.zeros_like(second))
