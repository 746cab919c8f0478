"""The diagnosis on a terminal: two tables, the verdict, and the block to paste; plain text when it is piped."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table

from shardkit.doctor.delta import MEAN_BADLY, MEAN_OK, VARIANCE_BADLY, VARIANCE_OK, LayerDelta
from shardkit.doctor.diagnosis import Diagnosis
from shardkit.doctor.flatness import ACCUMULATIONS, FLAT, Flatness

PIPED_WIDTH = 120
_STYLES = {"ok": "green", "flat": "green", "drifts": "yellow", "grows": "yellow", "badly": "red", "fails": "red"}


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print it."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    say(
        f"policy {diagnosis.policy}: a logical batch of {diagnosis.items} items, "
        f"{diagnosis.accumulation} micro-batches of {diagnosis.micro_batch_size} x {diagnosis.world_size} ranks"
    )
    if diagnosis.layers:
        say("")
        console.print(_layers(diagnosis.layers, console))
        say(
            f"mean in standard deviations of the large batch, variance as ratio - 1, rms over channels. ok up to "
            f"{MEAN_OK:g} and {VARIANCE_OK:g}, badly above {MEAN_BADLY:g} and {VARIANCE_BADLY:g}. becomes: after one "
            "cycle, from the model's own statistics; settles: the same batch for ever; output: of training, no verdict."
        )
    say("")
    console.print(_memory(diagnosis.memory, console))
    say(
        f"peak MiB of one window on one rank (forward and backward, no sharding, without model and batches); flat: 8 "
        f"takes up to {FLAT:g} times what 2 takes."
    )
    for flat in diagnosis.memory:
        if flat.failure:
            say(f"{flat.policy}: {flat.failure}")
    say("")
    say(diagnosis.verdict)
    say("")
    say(f"Recommended: {diagnosis.recommended.policy}. {diagnosis.recommended.why}")
    if diagnosis.recommended.remaining is not None and diagnosis.layers:
        say(f"Measured under it: the worst layer is at {diagnosis.recommended.remaining:.2f} of what is still ok.")
    say("")
    say(diagnosis.recommended.block)


def open_console() -> Console:
    """Of standard output: as wide as the terminal, or as a log."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def as_text(diagnosis: Diagnosis) -> str:
    """What a piped report says."""
    console = Console(width=PIPED_WIDTH, file=io.StringIO(), force_terminal=False, color_system=None)
    with console.capture() as captured:
        show(diagnosis, console)
    return captured.get()


def _table(console: Console) -> Table:
    return Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, padding=(0, 2, 0, 0))


def _layers(layers: tuple[LayerDelta, ...], console: Console) -> Table:
    table = _table(console)
    table.add_column("layer", overflow="fold")
    table.add_column("mode")
    for name in ("values", "updates", "mean becomes", "settles", "variance becomes", "settles", "output"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for delta in layers:
        table.add_row(
            delta.name,
            delta.mode,
            str(delta.values),
            str(delta.updates),
            _number(delta.mean_delta),
            _number(delta.settled_mean_delta),
            _number(delta.variance_delta),
            _number(delta.settled_variance_delta),
            _number(delta.output_delta),
            _colored(delta.verdict),
        )
    return table


def _memory(memory: tuple[Flatness, ...], console: Console) -> Table:
    table = _table(console)
    table.add_column("memory at accumulation")
    for count in ACCUMULATIONS:
        table.add_column(str(count), justify="right")
    table.add_column("verdict")
    for flat in memory:
        peaks = flat.peak_bytes
        cells = [f"{peaks[count] / 2**20:.2f}" if count in peaks else "-" for count in ACCUMULATIONS]
        table.add_row(flat.policy, *cells, _colored(flat.verdict))
    return table


def _colored(word: str) -> str:
    return f"[{_STYLES[word]}]{word}[/]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
