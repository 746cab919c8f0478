"""Losses as a sum and a count, against torch's own means."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardkit.errors import DataError, RequestError, WindowError
from shardkit.losses import CrossEntropy, MeanSquaredError, adapt

N, C = 6, 5


class Output(nn.Module):
    """A model that returns what it was made with."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: object, **kwargs: object) -> object:
        self.called_with = args, kwargs
        return self.output


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def classes(*shape: int, ignored: int | None = None) -> torch.Tensor:
    targets = torch.randint(C, shape, generator=torch.Generator().manual_seed(1))
    if ignored is not None:
        targets.view(-1)[::3] = ignored
    return targets


def mean(loss, output: torch.Tensor, targets: torch.Tensor) -> float:
    total, count = loss(Output(output), (torch.zeros(1), targets))
    assert float(count) == float(loss.count((torch.zeros(1), targets)))
    sums = loss.metrics(Output(output), (torch.zeros(1), targets))
    assert (float(sums["loss"][0]), float(sums["loss"][1])) == (float(total), float(count))
    return float(total) / float(count)


@pytest.mark.parametrize("ignored", [None, -100, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("shape", "class_last"),
    [((N,), True), ((N, 4), True), ((N, 4), False), ((N, 3, 4), True), ((N, 3, 4), False)],
)
def test_cross_entropy_over_its_count_is_the_mean_of_torch(shape, class_last, smoothing, ignored):
    options = {"label_smoothing": smoothing, **({} if ignored is None else {"ignore_index": ignored})}
    targets = classes(*shape, ignored=ignored)
    logits = random(*shape, C)
    want = F.cross_entropy(logits.movedim(-1, 1), targets, **options).item()
    got = mean(CrossEntropy(**options), logits if class_last else logits.movedim(-1, 1), targets)
    assert got == pytest.approx(want, rel=1e-12)


def test_accuracy_leaves_ignored_targets_out():
    logits = torch.eye(C)[[0, 1, 1, 3]]
    metrics = CrossEntropy(ignore_index=0).metrics(Output(logits), (None, torch.tensor([0, 1, 2, 3])))
    assert [float(value) for value in metrics["accuracy"]] == [2.0, 3.0]


def test_a_batch_of_ignored_targets_sums_to_zero_over_zero():
    total, count = CrossEntropy()(Output(random(N, C)), (None, torch.full((N,), -100)))
    assert (float(total), float(count)) == (0.0, 0.0)


def test_logits_that_fit_both_ways_are_refused_until_the_class_dim_is_said():
    logits, targets = random(2, C, C), classes(2, C)
    with pytest.raises(DataError, match=r"class_dim=-1.*class_dim=1"):
        mean(CrossEntropy(), logits, targets)
    for class_dim in (-1, 1):
        want = F.cross_entropy(logits.movedim(class_dim, 1), targets).item()
        assert mean(CrossEntropy(class_dim=class_dim), logits, targets) == pytest.approx(want)


@pytest.mark.parametrize("shape", [(N,), (N, C, 2), (C, N), (2, N, C)])
def test_logits_that_do_not_fit_their_targets_are_refused(shape):
    with pytest.raises(DataError, match="do not fit targets"):
        mean(CrossEntropy(), random(*shape), classes(N))


def test_sums_of_bf16_logits_are_fp32():
    total, _ = CrossEntropy()(Output(torch.zeros(1000, C, dtype=torch.bfloat16)), (None, classes(1000)))
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(1000 * torch.tensor(float(C)).log().item(), rel=1e-5)


@dataclass
class Fields:
    logits: torch.Tensor
    other: int = 0


def test_output_names_a_key_an_attribute_or_an_index():
    logits, targets = random(N, C), classes(N)
    want = mean(CrossEntropy(), logits, targets)
    for container, name in (({"logits": logits}, "logits"), (Fields(logits), "logits"), ((1, logits), 1)):
        total, count = CrossEntropy(output=name)(Output(container), (None, targets))
        assert float(total) / float(count) == want


@pytest.mark.parametrize("name", [None, "scores", 7])
def test_an_output_without_that_tensor_is_refused_with_its_fields(name):
    with pytest.raises(DataError, match=r"Fields with logits, other.*output: logits"):
        CrossEntropy(output=name)(Output(Fields(random(N, C))), (None, classes(N)))


def test_inputs_in_a_mapping_are_keywords_of_the_model():
    model = Output(random(N, C))
    CrossEntropy()(model, ({"a": 1, "b": 2}, classes(N)))
    assert model.called_with == ((), {"a": 1, "b": 2})


@pytest.mark.parametrize("batch", [{"x": 1}, (1, 2, 3), torch.zeros(2), (torch.zeros(2), [1])])
def test_a_batch_that_is_not_a_pair_is_refused_with_what_to_do(batch):
    with pytest.raises(DataError, match=r"expects \(inputs, targets\).*\(model, batch\) -> \(sum, count\)"):
        CrossEntropy().count(batch)


def test_targets_that_are_not_class_numbers_are_refused():
    with pytest.raises(DataError, match="expected class numbers"):
        CrossEntropy().count((None, torch.zeros(N)))


def test_squared_error_counts_elements():
    output, targets = random(N, 3), random(3, N).T
    assert mean(MeanSquaredError(), output, targets) == pytest.approx(F.mse_loss(output, targets).item())
    assert MeanSquaredError().count((None, targets)) == 3 * N


@pytest.mark.parametrize("loss", [MeanSquaredError(), adapt(nn.MSELoss()), adapt(nn.L1Loss())])
def test_shapes_that_would_be_broadcast_are_refused(loss):
    with pytest.raises(DataError, match="expected the same shape"):
        loss(Output(random(N, 1)), (None, random(N)))


WEIGHT = torch.tensor([0.5, 1.0, 0.0, 2.0, 3.0], dtype=torch.float64)
PROBABILITIES = random(N, C).softmax(-1)
BY_CLASS = [
    (nn.CrossEntropyLoss(), classes(N)),
    (nn.CrossEntropyLoss(ignore_index=1), classes(N, ignored=1)),
    (nn.CrossEntropyLoss(label_smoothing=0.2), classes(N, ignored=-100)),
    (nn.CrossEntropyLoss(weight=WEIGHT), classes(N)),
    (nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=4), classes(N, ignored=4)),
    (nn.CrossEntropyLoss(weight=WEIGHT), classes(N, ignored=-100)),
    (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2), classes(N, ignored=-100)),
    (nn.CrossEntropyLoss(), PROBABILITIES),
    (nn.CrossEntropyLoss(weight=WEIGHT), PROBABILITIES),
    (nn.CrossEntropyLoss(), classes(N, 3, 4)),
    (nn.CrossEntropyLoss(weight=WEIGHT), classes(N, 3)),
    (nn.NLLLoss(), classes(N)),
    (nn.NLLLoss(weight=WEIGHT, ignore_index=0), classes(N, 2, ignored=0)),
]


@pytest.mark.parametrize(("module", "targets"), BY_CLASS)
def test_class_losses_of_torch_count_valid_targets_or_their_weights(module, targets):
    logits = random(N, C) if targets is PROBABILITIES else random(N, C, *targets.shape[1:])
    assert mean(adapt(module), logits, targets) == pytest.approx(module(logits, targets).item(), rel=1e-12)


SIGNS = random(N, 3).sign()
BY_ELEMENT = [
    (nn.MSELoss(), random(N, 3), random(N, 3) + 1),
    (nn.L1Loss(), random(N, 3), random(N, 3) + 1),
    (nn.SmoothL1Loss(beta=0.5), random(N, 3), random(N, 3) * 2),
    (nn.HuberLoss(delta=0.7), random(N, 3), random(N, 3) * 2),
    (nn.BCELoss(), random(N, 3).sigmoid(), random(N, 3).sigmoid() ** 2),
    (nn.BCELoss(weight=WEIGHT[:3]), random(N, 3).sigmoid(), random(N, 3).sigmoid() ** 2),
    (nn.BCEWithLogitsLoss(), random(N), random(N).sigmoid()),
    (nn.BCEWithLogitsLoss(pos_weight=WEIGHT[:3], weight=WEIGHT[1:4]), random(N, 3), random(N, 3).sigmoid()),
    (nn.SoftMarginLoss(), random(N, 3), SIGNS),
    (nn.HingeEmbeddingLoss(), random(N, 3), SIGNS),
    (nn.PoissonNLLLoss(), random(N, 3), random(N, 3).exp()),
    (nn.KLDivLoss(), random(N, C).log_softmax(-1), PROBABILITIES),
    (nn.KLDivLoss(reduction="batchmean"), random(N, C).log_softmax(-1), PROBABILITIES),
    (nn.MultiLabelSoftMarginLoss(), random(N, 3), random(N, 3).sign().clamp(0)),
    (nn.MultiMarginLoss(), random(N, C), classes(N)),
    (nn.MultiMarginLoss(weight=WEIGHT), random(N, C), classes(N)),
    (nn.MultiLabelMarginLoss(), random(N, C), torch.tensor([[3, 0, -1, 1, 2]] * N)),
]


@pytest.mark.parametrize(("module", "output", "targets"), BY_ELEMENT)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
def test_other_losses_of_torch_count_elements_or_rows_as_their_mean_does(module, output, targets):
    assert mean(adapt(module), output, targets) == pytest.approx(module(output, targets).item(), rel=1e-12)


def test_micro_batches_of_weighted_classes_add_up_to_the_mean_of_the_whole_batch():
    module, logits, targets = nn.CrossEntropyLoss(weight=WEIGHT), random(N, C), classes(N)
    loss = adapt(module)
    parts = [loss(Output(logits[part]), (None, targets[part])) for part in (slice(0, 1), slice(1, N))]
    got = sum(float(total) for total, _ in parts) / sum(float(count) for _, count in parts)
    assert got == pytest.approx(module(logits, targets).item(), rel=1e-12)


def test_adapting_leaves_the_module_as_it_was_and_takes_a_sum_for_a_mean():
    module, output, targets = nn.MSELoss(), random(N), random(N) + 1
    assert mean(adapt(nn.MSELoss(reduction="sum")), output, targets) == mean(adapt(module), output, targets)
    assert module.reduction == "mean"


def test_class_losses_of_torch_report_accuracy():
    metrics = adapt(nn.CrossEntropyLoss(weight=WEIGHT)).metrics(
        Output(torch.eye(C, dtype=torch.float64)[[0, 1, 1]]), (None, torch.tensor([0, 1, 2]))
    )
    assert [float(value) for value in metrics["accuracy"]] == [2.0, 3.0]


class Unknown(nn.CrossEntropyLoss):
    pass


@pytest.mark.parametrize("module", [nn.CTCLoss(), nn.TripletMarginLoss(), nn.GaussianNLLLoss(), Unknown()])
def test_modules_whose_mean_is_over_something_unknown_are_refused(module):
    with pytest.raises(RequestError, match=rf"{type(module).__name__} is over is not known.*\(sum, count\)"):
        adapt(module)


def test_reduction_none_is_refused():
    with pytest.raises(RequestError, match=r"reduction='none'.*expected reduction='mean'"):
        adapt(nn.MSELoss(reduction="none"))


@pytest.mark.parametrize("loss", [3, "mse", nn.MSELoss, None])
def test_what_is_not_a_loss_is_refused(loss):
    with pytest.raises(RequestError, match="expected a loss object or a function"):
        adapt(loss)


def test_a_loss_comes_back_as_it_is():
    loss = CrossEntropy()
    assert adapt(loss) is loss
    adapted = adapt(nn.MSELoss())
    assert adapt(adapted) is adapted


def test_a_function_counts_the_rows_of_the_first_tensor():
    loss = adapt(lambda model, batch: (batch["x"].sum(), len(batch["x"])))
    batch = {"name": "a", "x": torch.ones(3, 2)}
    assert loss.count(batch) == 3
    assert loss.count([Fields(torch.ones(4))]) == 4
    assert [float(value) for value in loss(Output(None), batch)] == [6.0, 3.0]
    assert [float(value) for value in loss.metrics(Output(None), batch)["loss"]] == [6.0, 3.0]


@pytest.mark.parametrize("count", [2, 2.0, torch.tensor(2)])
def test_a_function_with_another_count_than_rows_is_told_to_say_it_beforehand(count):
    loss = adapt(lambda model, batch: (batch.sum(), count))
    with pytest.raises(WindowError, match=r"count 2 for a batch of 3 rows.*a method count\(batch\)"):
        loss(Output(None), torch.ones(3))


def test_a_function_object_with_a_count_of_its_own_needs_no_metrics():
    class Masked:
        def __call__(self, model, batch):
            return batch.sum(), self.count(batch)

        def count(self, batch):
            return (batch > 0).sum()

    loss, batch = adapt(Masked()), torch.tensor([1.0, 0.0, 3.0])
    assert float(loss.count(batch)) == 2.0
    assert [float(value) for value in loss(Output(None), batch)] == [4.0, 2.0]
    assert [float(value) for value in loss.metrics(Output(None), batch)["loss"]] == [4.0, 2.0]


@pytest.mark.parametrize("result", [torch.tensor(1.0), (1.0, 2), (torch.ones(3), 3)])
def test_a_function_that_does_not_return_a_sum_and_a_count_is_refused(result):
    with pytest.raises(WindowError, match=r"sum"):
        adapt(lambda model, batch: result)(Output(None), torch.ones(3))


@pytest.mark.parametrize("batch", ["text", {"n": 3}, [torch.tensor(1.0)]])
def test_a_batch_whose_rows_cannot_be_counted_is_refused(batch):
    with pytest.raises(DataError, match="rows cannot be counted"):
        adapt(lambda model, batch: (torch.tensor(1.0), 1)).count(batch)
