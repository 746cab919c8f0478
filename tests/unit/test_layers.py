"""A module imports only from what stands before it, and names of backends stay where they belong."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "shardkit"

# Data flows one way: recipe -> model -> normalization -> engine -> window -> loop -> what a rank runs -> launcher.
ORDER = [
    ["errors", "shipped", "parent", "memory", "pages"],
    ["recipe"],
    ["world", "communication"],
    ["data", "models", "losses"],
    ["normalization"],
    ["engines"],
    ["window"],
    ["optimizer", "seeds", "run_folder", "environment", "evaluation", "metrics", "progress", "jobs"],
    ["checkpoint"],
    ["loop", "saving", "profile", "speed"],
    ["ledger"],
    ["subject"],
    ["planning"],
    ["launch"],
    ["train"],
    ["doctor"],
    ["explain"],
    ["compare"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
# The words of a backend may stand in its adapter, the registry, options and presets.
BACKEND = re.compile(r"['\"](single|ddp|fsdp2|hsdp|zero[123]|accelerate[\w-]*|deepspeed)['\"]")


def unit(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_modules_import_only_from_what_stands_before_them() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        if unit(path) == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardkit."):
                target = (node.module or "").split(".")[1]
                if LEVEL[target] > LEVEL[unit(path)]:
                    wrong.append(f"{path.relative_to(PACKAGE)} imports {node.module}")
    assert not wrong


def test_every_module_has_its_place_in_the_order() -> None:
    assert {unit(path) for path in PACKAGE.rglob("*.py")} - {"__init__"} == set(LEVEL)


def test_no_branch_on_a_backend_name_outside_the_engines() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        # Formats of other libraries are named after them.
        if unit(path) == "engines" or path.parent.name == "foreign":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("#")[0]
            if BACKEND.search(code) and '"""' not in code:
                wrong.append(f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}")
    assert not wrong


def test_importing_shardkit_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import shardkit, shardkit.recipe.load, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0
