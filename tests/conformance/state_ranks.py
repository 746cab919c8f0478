"""What a rank does to show its state, and to load another run's: see test_state.py."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardkit
from shardkit.engines.api import OptimizerState
from tests.conformance.cases import Case, TokenLoss, batch_of, build_model, logits_of
from tests.conformance.ranks import allow_accelerate_fsdp2, assemble

# Windows trained after the state was taken.
NEXT = 4

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, weight_decay=0.01),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "adamw-foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw-fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01, weight_decay=0.01),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.01, weight_decay=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.002, momentum=0.9, centered=True, weight_decay=0.01),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.5, weight_decay=0.01),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01, weight_decay=0.01),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.1, t0=1, weight_decay=0.01),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
}


@dataclass(frozen=True)
class StateCase:
    """Train `steps` windows, take the state, train NEXT more."""

    name: str
    optimizer: str = "adamw"
    steps: int = 3
    model: str = "plain"
    precision: str = "fp32"
    patch: str = ""
    # "sub groups": DeepSpeed cuts each group into several flat partitions.

    @property
    def case(self) -> Case:
        windows = (8,) * (self.steps + NEXT)
        return Case(self.name, windows=windows, model=self.model, precision=self.precision, max_grad_norm=0.5)


CASES = [
    StateCase("adamw"),
    StateCase("fresh", steps=0),
    StateCase("frozen", model="frozen"),
    StateCase("tied", model="tied", optimizer="momentum"),
]
BY_OPTIMIZER = [StateCase(f"by {name}", optimizer=name) for name in OPTIMIZERS if name not in ("adamw", "adafactor")]
SAME_BACKEND = [
    StateCase("bf16", precision="bf16-mixed"),
    StateCase("batchnorm", model="batchnorm"),
    StateCase("bf16-true", precision="bf16-true", optimizer="momentum"),
    StateCase("sub groups", patch="sub groups"),
]


def make_optimizer(case: StateCase) -> Any:
    """Two groups with another lr and weight decay, as named in `expected_groups`."""

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        plain = [p for name, p in named if "bias" not in name]
        biases = {"params": [p for name, p in named if "bias" in name], "lr": 0.02, "weight_decay": 0.0}
        return OPTIMIZERS[case.optimizer]([{"params": plain}, biases])

    return make


def expected_groups(case: StateCase) -> tuple[tuple[str, ...], ...]:
    names = [name for name, p in build_model(case.case).named_parameters() if p.requires_grad]
    return tuple(n for n in names if "bias" not in n), tuple(n for n in names if "bias" in n)


def open_case(backend: Any, case: StateCase, other_weights: bool = False) -> Any:
    allow_accelerate_fsdp2()
    model = build_model(case.case)
    if other_weights:
        disturb(model)
    with patched(case.patch):
        return shardkit.open_engine(
            backend,
            model,
            make_optimizer(case),
            max_grad_norm=case.case.max_grad_norm,
            precision=case.precision,  # type: ignore[arg-type]
            blocks=["blocks.*"],
            micro_batch_size=case.case.micro_batch_size,
        )


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """As another seed would: nothing that is not loaded goes unseen."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.mul_(-0.5 if tensor.is_floating_point() else 3).add_(1)


@contextlib.contextmanager
def patched(what: str) -> Any:
    import shardkit.engines.deepspeed as adapter

    real = adapter.zero_config

    def small(*arguments: Any) -> dict[str, Any]:
        config = real(*arguments)
        config["zero_optimization"]["sub_group_size"] = 40
        return config

    adapter.zero_config = small if what == "sub groups" else real
    try:
        yield
    finally:
        adapter.zero_config = real


def train(engine: Any, case: StateCase, first: int, last: int) -> list[float]:
    losses = []
    for window in range(first, last):
        cells = [step[engine.world.rank] for step in case.case.cells(window, engine.world.size)]
        batches = [
            shardkit.MicroBatch(
                batch=batch_of(case.case, window, cell or [0], engine.world.device),
                filler=not cell,
                indices=tuple(cell),
            )
            for cell in cells
        ]
        losses.append(shardkit.train_step(engine, batches, TokenLoss(), step=window).loss)
    return losses


def output(engine: Any, case: StateCase) -> torch.Tensor:
    """Of a forward before any step; buffers and weights have to be in place."""
    engine.model.eval()
    with engine.inference():
        logits = logits_of(engine.model(batch_of(case.case, 0, list(range(8)), engine.world.device)[0]))
    engine.model.train()
    return logits.detach().float().clone()


def shown(engine: Any) -> dict[str, Any]:
    return {
        "state": [
            (i.kind, i.name, i.state, i.shape, i.start, i.tensor.clone(), str(i.tensor.dtype), i.copies)
            for i in engine.state()
        ],
        "copy": {(i.kind, i.name, i.state, i.start, i.copy) for i in engine.state()},
        "scalars": engine.scalars(),
        "groups": engine.groups,
    }


def fill(engine: Any, saved: dict[str, Any]) -> None:
    """Load whole tensors as a checkpoint would: each rank copies what it holds."""
    with engine.load_state(kept_of(saved)) as intervals:
        for i in intervals:
            whole = saved["whole"].get((i.kind, i.name, i.state))
            if whole is None:
                # In a flat partition, a parameter without state has zeros where others have some.
                assert i.kind == "optimizer" and not i.tensor.any(), (i.kind, i.name, i.state)
                continue
            assert whole.dtype == i.tensor.dtype, (i.name, i.state, whole.dtype, i.tensor.dtype)
            assert tuple(whole.shape) == i.shape, (i.name, i.state, whole.shape, i.shape)
            i.tensor.copy_(whole.reshape(-1)[i.start : i.start + i.tensor.numel()])
            if i.writeback:
                i.writeback()


def fill_with_junk(engine: Any, case: StateCase) -> None:
    """Nothing of what was there before is what will be loaded; the forward gathers what a backend keeps gathered."""
    shapes = {name: tuple(p.shape) for name, p in build_model(case.case).named_parameters()}
    step = torch.tensor(1.0)
    kept = {
        name: OptimizerState(tensors={"junk": (shapes[name], torch.float32)}, scalars={"step": step})
        for group in engine.groups
        for name in group
    }
    with engine.load_state(kept) as intervals:
        for i in intervals:
            i.tensor.fill_(3)
            if i.writeback:
                i.writeback()
    output(engine, case)


def kept_of(saved: dict[str, Any]) -> dict[str, OptimizerState]:
    kept: dict[str, OptimizerState] = {}
    for (kind, name, key), whole in saved["whole"].items():
        if kind == "optimizer":
            kept.setdefault(name, OptimizerState(tensors={}, scalars={})).tensors[key] = (
                tuple(whole.shape),
                whole.dtype,
            )
    for name, scalars in saved["scalars"].items():
        kept.setdefault(name, OptimizerState(tensors={}, scalars={})).scalars.update(scalars)
    return kept


def save_cases(backend: Any, cases: list[StateCase]) -> dict[str, Any]:
    return {case.name: save_case(backend, case) for case in cases}


def save_case(backend: Any, case: StateCase) -> dict[str, Any]:
    engine = open_case(backend, case)
    train(engine, case, 0, case.steps)
    seen = output(engine, case)
    result = shown(engine)
    again = shown(engine)
    result["reading changed nothing"] = equal(result, again) and torch.equal(seen, output(engine, case))
    result["output"] = seen
    result["losses"] = train(engine, case, case.steps, case.steps + NEXT)
    engine.close()
    return result


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = zip(one["state"], other["state"], strict=True)
    same = all(a[:5] == b[:5] and torch.equal(a[5], b[5]) for a, b in pairs)
    return same and one["scalars"] == other["scalars"]


def load_cases(backend: Any, jobs: bytes) -> dict[str, dict[str, Any]]:
    """Case -> source -> what came of loading it: the first into a fresh engine, others over junk."""
    found: dict[str, dict[str, Any]] = {}
    for case, sources in pickle.loads(jobs):
        engine = open_case(backend, case, other_weights=True)
        found[case.name] = {}
        for source, saved in sources.items():
            if found[case.name]:
                fill_with_junk(engine, case)
            fill(engine, saved)
            result = shown(engine)
            result["output"] = output(engine, case)
            result["losses"] = train(engine, case, case.steps, case.steps + NEXT)
            found[case.name][source] = result
        engine.close()
    return found


def gathered_here(engine: Any) -> dict[str, Any]:
    """The engine's own state in whole tensors, on every rank."""
    ranks = engine.world.gather({key: value for key, value in shown(engine).items() if key in ("state", "scalars")})
    scalars = {name: values for rank in ranks for name, values in rank["scalars"].items()}
    return {"whole": assemble(ranks), "scalars": scalars}


def error_of(action: Any) -> str:
    try:
        action()
    except shardkit.ShardkitError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def state_traps(backend: Any) -> dict[str, Any]:
    """What is refused while it would be wrong, and that a refusal changes nothing."""
    case = StateCase("traps")
    engine = open_case(backend, case)
    batch = batch_of(case.case, 0, [0, 1], engine.world.device)
    found: dict[str, Any] = {}

    def enter(kept: Any = None) -> None:
        with engine.load_state(kept) as intervals:
            list(intervals)

    def backward(last: bool, scale: float = 0.01) -> None:
        with engine.micro_step(last=last):
            engine.backward(TokenLoss()(engine.model, batch)[0] * scale)

    found["at start"] = error_of(lambda: list(engine.state()))
    train(engine, case, 0, 2)
    found["after a step"] = error_of(lambda: list(engine.state()))
    backward(last=False)
    found["state while pending"] = error_of(lambda: list(engine.state()))
    found["load while pending"] = error_of(enter)
    backward(last=True)
    engine.step()
    found["after the window"] = error_of(lambda: list(engine.state()))
    backward(last=True, scale=float("nan"))
    assert engine.step().skipped
    found["after a skipped step"] = error_of(enter)

    before = shown(engine)
    saved = gathered_here(engine)
    kept = kept_of(saved)
    name, other = "blocks.0.up.weight", "blocks.1.down.weight"
    found["unknown name"] = error_of(lambda: enter({**kept, "nobody.weight": kept[name]}))
    later = OptimizerState(tensors=kept[other].tensors, scalars={"step": torch.tensor(77.0)})
    found["different numbers"] = error_of(lambda: enter({**kept, other: later}))
    if found["different numbers"] == "no error":
        found["numbers"] = [engine.scalars().get(n, {}).get("step") for n in (name, other)]
        fill(engine, saved)
    odd = OptimizerState(tensors={"exp_avg": ((3,), torch.float32)}, scalars={})
    if engine.traits.shards:
        found["other shape"] = error_of(lambda: enter({**kept, other: odd}))
    found["refusals changed nothing"] = equal(before, shown(engine))
    enter()
    found["nothing loaded, nothing changed"] = equal(before, shown(engine))
    # A forward that nothing follows leaves units gathered.
    with torch.no_grad():
        engine.model(batch[0])
    fill(engine, saved)
    found["loaded while gathered"] = equal(before, shown(engine))
    if hasattr(engine, "partitions"):
        found["DeepSpeed's own view"] = own_view(engine, saved)
    train(engine, case, 2, 3)
    if hasattr(engine, "partitions"):
        plant(engine, found)
    engine.close()
    return found


def own_view(engine: Any, saved: dict[str, Any]) -> bool:
    """Whether DeepSpeed's calls give what was loaded."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    same = True
    for name, parameter in engine.partitions.model.named_parameters():
        weight: Any
        moment: Any
        weight, moment = safe_get_full_fp32_param(parameter), safe_get_full_optimizer_state(parameter, "exp_avg")
        same &= torch.equal(weight.view(-1), saved["whole"]["parameter", name, None].view(-1))
        same &= torch.equal(moment.view(-1), saved["whole"]["optimizer", name, "exp_avg"].view(-1))
    return same


def plant(engine: Any, found: dict[str, Any]) -> None:
    """Change a live weight by hand, each way a rank holds one."""
    errors, names = [], []
    piece = list(engine.partitions._pieces())[-1]
    for live in list(engine.partitions._live(piece)):
        kept = live.clone()
        live[-1] += 1e-3
        errors.append(error_of(lambda: list(engine.state())))
        names.append(piece.name)
        live.copy_(kept)
    found["planted"], found["planted in"] = errors, names
    found["not planted"] = error_of(lambda: list(engine.state()))


class Switched(nn.Module):
    """Uses `extra` when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.layer, self.extra = nn.Linear(3, 2), nn.Linear(3, 2)
        self.uses = True

    def forward(self, x: Any) -> Any:
        return self.layer(x) + self.extra(x) if self.uses else self.layer(x)


def unused_after_load(backend: Any) -> dict[str, str]:
    """A parameter that got a gradient before the save and gets none after the load, and one that never got any."""

    def opened(uses: bool) -> tuple[Any, Switched]:
        model = Switched()
        model.uses = uses
        make = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)  # noqa: E731
        return shardkit.open_engine(backend, model, make), model

    def step(engine: Any) -> None:
        shardkit.train_step(engine, [torch.ones(2, 3)], lambda net, batch: (net(batch).sum(), len(batch)))

    found = {}
    for used in (True, False):
        engine, _ = opened(used)
        step(engine)
        saved = gathered_here(engine)
        engine.close()
        engine, model = opened(True)
        step(engine)
        fill(engine, saved)
        model.uses = False
        found["used before" if used else "never used"] = error_of(lambda: step(engine))  # noqa: B023
        engine.close()
    return found


class Odd(nn.Module):
    """A parameter without a dimension, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(4, 6, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.never = nn.Parameter(torch.ones(3))
        self.register_buffer("dropped", torch.ones(2), persistent=False)
        self.register_buffer("kept", torch.arange(3))
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, x: Any) -> Any:
        return self.conv(x) * self.gain


def odd_tensors(backend: Any, optimizer: str) -> dict[str, Any]:
    """Round trip of what only replicas hold."""

    def opened() -> Any:
        return shardkit.open_engine(backend, Odd(), lambda named: OPTIMIZERS[optimizer]([p for _, p in named]))

    def step(engine: Any) -> float:
        images = torch.arange(2 * 4 * 5 * 5.0).reshape(2, 4, 5, 5).sin()

        def loss(net: Any, batch: Any) -> Any:
            return net(batch).square().mean() * len(batch), len(batch)

        return shardkit.train_step(engine, [images], loss).loss  # type: ignore[return-value]

    first = opened()
    for _ in range(2):
        step(first)
    saved, before = gathered_here(first), shown(first)
    after = [step(first) for _ in range(NEXT)]
    first.close()
    second = opened()
    disturb(getattr(second, "bare", second.model))
    step(second)
    fill(second, saved)
    conv = [i for i in second.state() if i.name == "conv.weight"]
    result = {
        "copied": [i.state for i in conv if i.writeback],
        "shapes": {(i.name, i.state): i.shape for i in second.state()},
        "scalars": {name: sorted(values) for name, values in second.scalars().items()},
        "equal": equal(before, shown(second)),
        "next": (after, [step(second) for _ in range(NEXT)]),
    }
    second.close()
    return result


def along_any_dim() -> list[tuple[int, int, bool]]:
    """(dim, intervals of a rank, equal) of DTensors that are sharded along each dim, with uneven sizes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from shardkit.engines.whole import load_whole, whole_state

    world = shardkit.World.current()
    mesh = init_device_mesh("cpu", (world.size,))

    def opened(dim: int, factor: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(torch.randn(3, 5, 4) * factor, mesh, [Shard(dim)]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        model.weight.grad = distribute_tensor(torch.randn(3, 5, 4), mesh, [Shard(dim)])
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        return [
            (i.kind, i.name, i.state, i.shape, i.start, i.tensor.clone(), "", i.copies)
            for i in whole_state(model, optimizer, world)
        ]

    found = []
    for dim in range(3):
        model, optimizer = opened(dim, 1.0)
        own = states(model, optimizer)
        whole = assemble(world.gather({"state": own}).copy())
        same = torch.equal(whole["parameter", "weight", None], model.weight.full_tensor())  # type: ignore[union-attr]
        other, its = opened(dim, 2.0)
        kept = {
            "weight": OptimizerState(
                tensors=dict.fromkeys(("exp_avg", "exp_avg_sq"), ((3, 5, 4), torch.float32)),
                scalars={"step": torch.tensor(9.0)},
            )
        }
        with load_whole(other, its, world, kept) as intervals:
            for i in intervals:
                i.tensor.copy_(whole[i.kind, i.name, i.state].view(-1)[i.start : i.start + i.tensor.numel()])
                if i.writeback:
                    i.writeback()
        same &= all(torch.equal(a[5], b[5]) for a, b in zip(own, states(other, its), strict=True))
        same &= its.state[its.param_groups[0]["params"][0]]["step"].item() == 9
        found.append((dim, sum(entry[0] == "parameter" for entry in own), bool(same)))
    return found
