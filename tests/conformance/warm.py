"""Imported once in the fork server, so that a rank starts in tenths of a second."""

import contextlib
import importlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

for name in (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed._composable.replicate",
    "torch._dynamo",
    "numpy",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "accelerate",
    "accelerate.utils.deepspeed",
    "shardkit.engines.opening",
    "shardkit.window",
    "sklearn.datasets",
    "shardkit.train",
    "shardkit.loop",
    "shardkit.saving",
    "tests.conformance.cases",
    "tests.conformance.run_ranks",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
