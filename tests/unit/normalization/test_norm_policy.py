"""The policy on models that people have: what each layer becomes, what stays, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from norm_nets import BatchNormAct, ResNet, SuperNormAct, convs, images, warm
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations

from shardkit.errors import NormalizationError
from shardkit.normalization import Applied, BatchNorm, apply_policy, commit
from shardkit.recipe.schema import Normalization, NormalizationRule
from shardkit.world import World

WORLD = World()
OURS = ["sync", "deferred", "exact", "frozen"]


def apply(model: nn.Module, policy: str, *rules: tuple[str, str], **more: Any) -> Applied:
    settings = {name: more.pop(name) for name in ("num_groups", "over_ranks", "pretrained") if name in more}
    chosen = [NormalizationRule(match=match, policy=name) for match, name in rules]
    return apply_policy(model, Normalization(policy=policy, rules=chosen, **settings), world=WORLD, **more)


def plain_norms(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, _BatchNorm) and not isinstance(m, BatchNorm)]


def transformers_model(name: str) -> nn.Module:
    import transformers

    if name == "resnet":
        small = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 2], "layer_type": "basic"}
        return transformers.ResNetModel(transformers.ResNetConfig(**small))
    if name == "regnet":
        small = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "groups_width": 4}
        return transformers.RegNetModel(transformers.RegNetConfig(**small))
    return transformers.MobileNetV2Model(transformers.MobileNetV2Config(depth_multiplier=0.25))


def output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return out if isinstance(out, torch.Tensor) else out.last_hidden_state


MODELS = {
    "torchvision-like": ResNet,
    "batch-norm-act": lambda: convs(BatchNormAct),
    "super-norm-act": lambda: convs(SuperNormAct),
    **{name: lambda name=name: transformers_model(name) for name in ("resnet", "regnet", "mobilenet-v2")},
}


@pytest.fixture(scope="module", params=MODELS)
def warmed(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    size = 32 if request.param == "mobilenet-v2" else 16
    model = MODELS[request.param]().double()
    model.images = images(size=size)
    return warm(model, model.images)


@pytest.mark.parametrize("policy", OURS)
def test_evaluation_is_bit_equal_and_names_stay(warmed: nn.Module, policy: str) -> None:
    model = copy.deepcopy(warmed)
    tensors = [*model.parameters(), *model.buffers()]
    applied = apply(model, policy)
    assert plain_norms(model) == [] and applied.layers and len(applied.rows) == len(applied.layers)
    assert list(model.state_dict()) == list(warmed.state_dict())
    assert all(new is old for new, old in zip([*model.parameters(), *model.buffers()], tensors, strict=True))
    x = warmed.images * 1.5
    assert torch.equal(output(model.eval(), x), output(warmed.eval(), x))
    warmed.train()


@pytest.mark.parametrize("policy", ["sync", "deferred", "exact"])
def test_training_in_one_process_equals_torch(warmed: nn.Module, policy: str) -> None:
    theirs, model = copy.deepcopy(warmed), copy.deepcopy(warmed)
    applied = apply(model, policy)
    for each in (theirs, model):
        torch.manual_seed(0)
        output(each, warmed.images * 2).square().mean().backward()
    # A step of deferred pools what a shared norm sees in its two calls.
    shared = policy == "deferred" and isinstance(model, ResNet)
    commit(applied.layers, WORLD, keep=True)
    for p, q in zip(theirs.parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-10)
    for name, value in theirs.state_dict().items():
        if not (shared and name.startswith(("bn1.", "again."))):
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-10, atol=1e-12, msg=name)


def test_keep_touches_nothing() -> None:
    model = ResNet()
    applied = apply(model, "keep")
    assert applied.layers == () and {row.new for row in applied.rows} == {"BatchNorm2d", "BatchNorm1d"}
    assert all(type(m) in (nn.BatchNorm1d, nn.BatchNorm2d) for m in model.modules() if isinstance(m, _BatchNorm))


def test_a_shared_norm_stays_one_object_with_all_its_names() -> None:
    model = ResNet()
    stem = model.bn1
    applied = apply(model, "sync")
    assert model.bn1 is stem and model.again is stem
    assert applied.rows[0].names == ("bn1", "again") and applied.rows[0].layer == "bn1, again"


@pytest.mark.parametrize("policy", [*OURS, "group", "layer", "instance"])
def test_flags_types_and_devices_stay(policy: str) -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(8, momentum=None, eps=0.25).to(torch.bfloat16),
        nn.BatchNorm2d(8, affine=False).double(),
        nn.BatchNorm2d(8, bias=False, device="meta"),
        nn.BatchNorm2d(8).eval().requires_grad_(False),
    )
    before = [(m.eps, m.affine, m.training, m.weight, m.bias) for m in model]
    apply(model, policy)
    after = [(m.eps, m.affine, m.training if policy != "frozen" else None, m.weight, m.bias) for m in model]
    for old, new in zip(before, after, strict=True):
        assert new[0] == old[0] and new[1] == old[1] and new[2] in (old[2], None)
        assert new[3] is old[3] and new[4] is old[4]
    assert not any(p.requires_grad for p in model[3].parameters())
    if policy in OURS:
        assert model[0].momentum is None and model[2].running_mean.is_meta
        assert model[1].running_mean.dtype == torch.float64


def test_a_norm_without_running_statistics_can_not_be_frozen() -> None:
    model = convs(lambda channels: nn.BatchNorm2d(channels, track_running_stats=False))
    assert len(apply(model, "exact").layers) == 2
    with pytest.raises(NormalizationError, match="no running statistics"):
        apply(model, "frozen")


@pytest.mark.parametrize("policy", [*OURS, "group", "layer", "instance"])
def test_hooks_go_on_and_can_be_removed(policy: str) -> None:
    model = convs(nn.BatchNorm2d).double()
    norm, calls = model[1], []
    handles = [
        norm.register_forward_pre_hook(lambda module, args: calls.append("pre")),
        norm.register_forward_hook(lambda module, args, kwargs, out: calls.append("post"), with_kwargs=True),
        norm.register_full_backward_hook(lambda module, grad_in, grad_out: calls.append("backward")),
        norm.register_state_dict_post_hook(lambda module, state, prefix, meta: calls.append("state")),
        norm.register_load_state_dict_pre_hook(lambda module, *rest: calls.append("load")),
    ]
    apply(model, policy)
    model(images().requires_grad_()).sum().backward()
    model.load_state_dict(model.state_dict())
    assert calls == ["pre", "post", "backward", "state", "load"]
    for handle in handles:
        handle.remove()
    model(images()).sum().backward()
    assert len(calls) == 5


@pytest.mark.parametrize("policy", [*OURS, "group", "layer", "instance"])
def test_a_second_time_changes_nothing(policy: str) -> None:
    model = ResNet()
    first = apply(model, policy, ("bn_head", "keep") if policy == "instance" else ("BatchNorm2d", policy))
    again = apply(model, policy, ("bn_head", "keep") if policy == "instance" else ("BatchNorm2d", policy))
    assert [row.new for row in again.rows] == [row.new for row in first.rows]
    assert all(row.old == row.new for row in again.rows)
    whys = {row.why for row in again.rows}
    assert whys <= {"was so before: nothing changed", "kept as it is", "left as it is: independent of the batch"}


def test_a_policy_can_follow_another() -> None:
    model = ResNet().double()
    apply(model, "sync")
    apply(model, "exact")
    assert {m.mode for m in model.modules() if isinstance(m, BatchNorm)} == {"exact"}
    apply(model, "group", ("bn_head", "layer"))
    assert plain_norms(model) == [] and model(images()).isfinite().all()


def test_the_model_itself_may_be_a_norm() -> None:
    model = nn.BatchNorm2d(3)
    applied = apply(model, "sync")
    assert isinstance(model, BatchNorm) and applied.layers == (model,) and "(the model)" in applied.table()


def test_rules_go_by_name_and_by_class_and_the_first_wins() -> None:
    model = ResNet()
    apply(model, "sync", ("layer1.0.*", "frozen"), ("layer1.*", "deferred"), ("BatchNorm1d", "keep"))
    assert model.bn1.mode == "sync" and model.layer1[0].bn1.mode == "frozen"
    assert model.layer1[1].downsample[1].mode == "deferred" and type(model.bn_head) is nn.BatchNorm1d


def test_a_rule_that_matches_nothing_is_refused() -> None:
    with pytest.raises(NormalizationError, match=r"rules\.0\.match: 'bakbone\.\*' matches no norm layer.*bn1"):
        apply(ResNet(), "keep", ("bakbone.*", "frozen"))


class Odd(nn.BatchNorm2d):
    """Normalises in a way that ours can not stand in for."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (input - input.mean()) * self.weight[:, None, None]


class Trivial(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, momentum=0.3)


class Twice(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(Twice, self).forward(part) for part in input.chunk(2)])


class Stubborn(nn.BatchNorm2d):
    """A BatchNorm that never trains."""

    def train(self, mode: bool = True) -> Stubborn:
        return super().train(False)


def test_everything_refused_is_named_at_once_and_nothing_changed() -> None:
    replaced = nn.BatchNorm2d(4)
    replaced.forward = lambda x: x
    parametrized = parametrizations.orthogonal(nn.Linear(4, 4))
    nn.utils.parametrize.register_parametrization(norm := nn.BatchNorm2d(4), "weight", nn.Softplus())
    model = nn.Sequential(nn.BatchNorm2d(4), Odd(4), replaced, parametrized, norm)
    with pytest.raises(NormalizationError) as refused:
        apply(model, "exact")
    lines = str(refused.value).splitlines()
    assert len(lines) == 3 and all("policy: keep}" in line for line in lines)
    assert "'1' (Odd)" in lines[0] and "forward" in lines[1] and "parametrize" in lines[2]
    assert type(model[0]) is nn.BatchNorm2d
    assert len(apply(model, "exact", *[(name, "keep") for name in "124"]).layers) == 1


def test_a_subclass_keeps_its_behaviour() -> None:
    model = nn.Sequential(Trivial(3), Stubborn(3)).double()
    apply(model, "sync")
    assert isinstance(model[0], Trivial) and model[0].momentum == 0.3
    assert not model.train()[1].training and isinstance(model[1], Stubborn)
    with pytest.raises(NormalizationError, match=r"behaviour of its own \(train\)"):
        apply(nn.Sequential(Trivial(3), Stubborn(3)), "group")
    with pytest.raises(NormalizationError, match="forward of its own"):
        apply(convs(BatchNormAct), "layer")


def test_a_subclass_that_normalises_twice_is_refused_when_it_does() -> None:
    model = nn.Sequential(Twice(3)).double()
    apply(model, "sync")
    with pytest.raises(NormalizationError, match="2 times"):
        model(images())


@pytest.mark.parametrize("kind", [BatchNormAct, SuperNormAct])
def test_a_converted_subclass_can_be_copied_and_pickled(kind: type[nn.BatchNorm2d]) -> None:
    model = kind(3).double()
    apply(model, "deferred")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other, kind) and isinstance(other, BatchNorm)
        assert torch.equal(other(images()), model(images()))
    for _ in range(3):
        model(images())
    commit([model], WORLD, keep=True)
    assert int(model.num_batches_tracked) == 1


def test_sync_batch_norm_of_torch_is_converted() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(convs(nn.BatchNorm2d))
    assert len(apply(model, "sync").layers) == 2 and model(images().float()).isfinite().all()
    with pytest.raises(NormalizationError, match="process group of its own"):
        apply(nn.SyncBatchNorm(3, process_group="theirs"), "exact")


def test_what_can_not_be_converted_or_need_not_is_named(caplog: pytest.LogCaptureFixture) -> None:
    frozen = type("FrozenBatchNorm2d", (nn.Module,), {})()
    for name in ("weight", "bias", "running_mean", "running_var"):
        frozen.register_buffer(name, torch.ones(4))
    scripted = torch.jit.script(nn.BatchNorm2d(4))
    model = nn.Sequential(nn.LazyBatchNorm2d(), scripted, frozen, nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.RMSNorm(4))
    applied = apply(model, "exact")
    assert [row.why.split(":")[0] for row in applied.rows] == ["not convertible"] * 3 + ["left as it is"] * 3
    assert "lazy" in applied.rows[0].why and "scripted" in applied.rows[1].why and len(caplog.records) == 3
    assert applied.layers == ()


@pytest.mark.parametrize("case", ["optimizer", "ddp", "sharded", "dtensor"])
def test_too_late_is_refused(case: str) -> None:
    model = ResNet()
    if case == "ddp":
        model = type("DistributedDataParallel", (nn.Sequential,), {})(model)
    if case == "sharded":
        model.fc.weight.ds_id = 3
    if case == "dtensor":
        model.fc.weight = nn.Parameter(torch.zeros(5, 8).as_subclass(type("DTensor", (torch.Tensor,), {})))
    with pytest.raises(NormalizationError, match="before it is wrapped and before its optimizer"):
        apply(model, "sync", optimizer_built=case == "optimizer")
    assert apply(model, "keep", optimizer_built=case == "optimizer").layers == ()


def test_the_report_fits_a_terminal_and_is_json() -> None:
    model = nn.ModuleDict({"backbone_with_a_long_name": nn.ModuleDict({"stage_with_a_long_name": ResNet()})})
    applied = apply(model, "auto", accumulation=4, micro_batch_size=2)
    lines = applied.table().splitlines()
    assert max(map(len, lines)) <= 100 and lines[0] == "normalization: exact"
    assert any("BatchNorm(exact)" in line for line in lines)
    assert json.loads(json.dumps(applied.to_json()))["rows"][0]["old"] == "BatchNorm2d"
    assert "no norm layer" in apply(nn.Linear(2, 2), "sync").table()
