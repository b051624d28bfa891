# SPDX-License-Identifier: Apache-2.0
"""PNG plots of a serving benchmark. The only user of matplotlib (extra `bench`), which is imported when it draws."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mii_zmq.bench_sla import EMA_SPAN, PROMPT_TOKENS_PER_S
from mii_zmq.errors import ConfigError

if TYPE_CHECKING:
    from mii_zmq.bench_metrics import Distribution
    from mii_zmq.serving_bench import BenchResult

LATENCY_PLOT = "latency_throughput.png"
EFFECTIVE_PLOT = "effective_throughput.png"
PANELS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
DPI = 130
HEADROOM = 1.1
SECONDS_FROM_MS = 10_000
"""From here on a panel counts seconds."""


def check_can_plot(directory: Path) -> None:
    """Before a long run, not after it.

    Raises:
        ConfigError: matplotlib is not installed, or the directory cannot be made.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'mii_zmq[bench]', or leave out --plot-dir")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot-dir {directory} cannot be made: {error.strerror}; name another one") from None


def draw(result: BenchResult, directory: Path) -> list[Path]:
    """Write the plots into an existing directory; returns their paths.

    That of the effective throughput is there only if one was asked for.

    Raises:
        OSError: the directory cannot be written to.
    """
    figures = {LATENCY_PLOT: _latencies(result)}
    if any(level.effective for level in result.levels):
        figures[EFFECTIVE_PLOT] = _effective(result)
    for name, figure in figures.items():
        figure.savefig(directory / name, dpi=DPI)
    return [directory / name for name in figures]


def _latencies(result: BenchResult) -> Any:
    """Median and percentiles of each latency against output tokens per second; points bear their concurrency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.5), layout="constrained")
    prompt, output = _mean_lengths(result)
    figure.suptitle(
        f"{result.model}: latency against throughput\n"
        f"{prompt:.0f} prompt tokens and {output:.0f} output tokens on average; numbers are requests at a time"
    )
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        points = [
            (level.summary.output_throughput, found, level.concurrency)
            for level in result.levels
            if (found := level.summary.latencies[name]) is not None
        ]
        axes.set(title=title, xlabel="output tokens per second")
        axes.grid(visible=True, alpha=0.3)
        if points:
            _draw_points(axes, points)
    # One legend for all panels, outside of them: inside it would hide points somewhere.
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return figure


def _mean_lengths(result: BenchResult) -> tuple[float, float]:
    """Prompt and output tokens of a completed request."""
    num_completed = sum(level.summary.num_completed for level in result.levels) or 1
    prompt = sum(level.summary.total_input_tokens for level in result.levels)
    return prompt / num_completed, sum(level.summary.total_output_tokens for level in result.levels) / num_completed


def _draw_points(axes: Any, points: Sequence[tuple[float, Distribution, int | None]]) -> None:
    """Of one panel: throughput, latencies in milliseconds, concurrency."""
    from matplotlib.patheffects import withStroke

    highest = max(value for _, found, _ in points for value in (found.median, *found.percentiles.values()))
    unit, scale = ("seconds", 0.001) if highest >= SECONDS_FROM_MS else ("milliseconds", 1.0)
    throughputs = [throughput for throughput, _, _ in points]
    axes.plot(throughputs, [scale * found.median for _, found, _ in points], "o-", label="median")
    for percent in points[0][1].percentiles:
        if percent == 50:
            continue
        values = [scale * found.percentiles[percent] for _, found, _ in points]
        axes.plot(throughputs, values, "s--", label=f"p{percent:g}")
    for throughput, found, concurrency in points:
        label = "no limit" if concurrency is None else str(concurrency)
        place = (throughput, scale * found.median)
        text = axes.annotate(label, place, textcoords="offset points", xytext=(5, 5), fontsize=9, fontweight="bold")
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])  # legible upon lines, too
    axes.set_ylabel(unit)
    axes.set_xlim(0, HEADROOM * max(throughputs) or None)
    axes.set_ylim(0, HEADROOM * scale * highest or None)


def _effective(result: BenchResult) -> Any:
    """Requests per second that meet the service level over the number of clients, one line per token rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    levels = result.levels
    clients = [level.concurrency or level.summary.max_concurrent_requests for level in levels]
    all_requests = [level.summary.request_throughput for level in levels]
    rates = list(levels[0].effective)
    for index, rate in enumerate(rates):
        # Lines often lie on each other: the lower ones are wider.
        width = 1.5 + 2.5 * (len(rates) - 1 - index)
        values = [level.effective[rate][0] for level in levels]
        axes.plot(clients, values, marker="o", linewidth=width, label=f"at {rate:g} tokens/s", clip_on=False)
    axes.plot(clients, all_requests, "k:", label="all completed requests")
    axes.set(
        title=f"{result.model}: effective throughput\n"
        f"(first token within prompt/{PROMPT_TOKENS_PER_S} s, moving average over {EMA_SPAN} gaps)",
        xlabel="clients",
        ylabel="requests per second",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(clients)), labels=[str(count) for count in sorted(set(clients))], minor=False)
    axes.minorticks_off()
    axes.set_ylim(0, HEADROOM * max(all_requests) or None)
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    return figure
