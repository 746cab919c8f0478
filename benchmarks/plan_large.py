"""A transformer of 7 billion parameters, planned on this machine and held to what is published.

    python benchmarks/plan_large.py [--quick]

Prints how long the plan took and how much host memory, and the agreement with

- 16 bytes a parameter for Adam in mixed precision, and the stages of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054,
  section 5). shardkit's bf16-mixed keeps fp32 parameters and gradients, which autocast casts, so what is 2 + 2 bytes
  plus 12 of masters and moments there is 4 + 4 plus 8 of moments here, and ZeRO's 12 N-ths are the same. DeepSpeed's
  stage 3 keeps masters beside fp32 partitions and gradients in two places: 4 + 8 + 12 N-ths, not the paper's 16;
- 34 s b h bytes of activations a layer in 16 bits (Korthikanti et al. 2022, arXiv:2205.05198, equation 1), without the
  part of attention that flash attention does not keep (5 a s / h) and without dropout's masks (2 s b h), with what
  torch keeps beside it: the sums of attention (4 a s b) and the statistics of two LayerNorms (8 s b).

Exit code 1 where the states differ by more than 0.1 %, activations by more than 1 %, or the plan took 20 s or 4 GiB.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import yaml

from shardkit.engines import registry
from shardkit.planning.device import load_device
from shardkit.planning.model import PlannedModel
from shardkit.planning.plan import Plan, Wanted, plan
from shardkit.recipe.load import Loaded, load

WIDTH, LAYERS, HEADS, VOCABULARY, LENGTH = 4096, 34, 32, 32000, 2048
RANKS = 8
SECONDS, BYTES = 20.0, 4 * 2**30


def recipe(layers: int, precision: str) -> Loaded:
    """A decoder of shardkit's own, of so many layers, on sequences of LENGTH tokens."""
    sizes = {"width": WIDTH, "heads": HEADS, "layers": layers, "vocab_size": VOCABULARY, "context": LENGTH}
    values = {
        "model": {"_target_": "shardkit.models.gpt.GPT", **sizes},
        "data": {"train": {"_target_": "shardkit.data.topics.Topics", "split": "train", "context": LENGTH}},
        "loss": {"_target_": "shardkit.losses.CrossEntropy", "class_dim": -1},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4},
        "batch": {"global_batch_size": RANKS, "micro_batch_size": 1},
        "train": {"max_steps": 1, "precision": precision},
        "blocks": ["blocks.*"],
        "backend": "ddp",
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return load(str(path), [], options_of=registry.options_of)


def state_table(found: Plan) -> tuple[str, float]:
    """A row a backend; and the largest disagreement."""
    count = found.parameters
    # By what each rank holds of parameters, gradients at the step, and masters with moments.
    published = {
        "ddp": (4, 4, 8),
        "zero1": (4, 4 / RANKS, 12 / RANKS),
        "zero2": (4, 4 / RANKS, 12 / RANKS),
        "zero3": (4 / RANKS, 8 / RANKS, 12 / RANKS),
        "fsdp2": (4 / RANKS, 4 / RANKS, 8 / RANKS),
    }
    lines = ["| backend | published, bytes a parameter | planned | agreement |", "|---|---|---|---|"]
    worst = 0.0
    for name, parts in published.items():
        row = next(row for row in found.rows if row.choice.name == name)
        assert row.footprint is not None
        states = row.footprint
        held = states.parameters + states.gradients + states.masters + states.optimizer
        expected = sum(parts)
        worst = max(worst, abs(held / count / expected - 1))
        told = " + ".join(f"{part:g}" for part in parts)
        lines.append(f"| {name} | {told} = {expected:g} | {held / count:.4f} | {held / count / expected:.2%} |")
    return "\n".join(lines), worst


def activations(layers: int) -> int:
    """Bytes that are kept for the backward, as all layers have been forward."""
    model = PlannedModel(recipe(layers, "bf16-true"))
    trace = model.workload(1, 1).trace(model.anatomy.weights[0].dtype)
    return next(event.level for event in trace.events if event.what == "forward" and event.name == "norm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same")
    parser.parse_args()
    begun = time.perf_counter()
    found = plan(recipe(LAYERS, "bf16-mixed"), Wanted(device=load_device("h100-80gb"), world_sizes=(RANKS,)))
    seconds = time.perf_counter() - begun
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{found.parameters / 1e9:.2f} billion parameters, {len(found.rows)} choices on {RANKS} ranks")
    print(f"planned in {seconds:.1f} s, with {memory / 2**30:.2f} GiB of host memory\n")
    states, apart = state_table(found)
    print(states)
    one = activations(3) - activations(2)
    published = 34 * LENGTH * WIDTH
    expected = published - 2 * LENGTH * WIDTH + 4 * HEADS * LENGTH + 8 * LENGTH
    print("\n| activations of a layer, 16 bits | bytes | agreement |\n|---|---|---|")
    print(f"| 34 s b h | {published} | {one / published:.2%} |")
    print(f"| without dropout's masks, with sums and statistics | {expected} | {one / expected:.2%} |")
    print(f"| traced | {one} | |")
    if found.recommended is not None:
        print(f"\nrecommended on h100-80gb: {found.recommended.choice.name}")
    good = apart <= 1e-3 and abs(one / expected - 1) <= 1e-2 and seconds < SECONDS and memory < BYTES
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
