"""The plots of a report: each is drawn from the JSON of a run, one pair of axes for each trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bench.admission.figures import gains

Document = dict[str, Any]
_MARKERS = "osD^vP*X<>"


class Plot(NamedTuple):
    """One picture, and what to read from it. One that is not ``by_trace`` is the same for all traces."""

    name: str
    title: str
    caption: str
    draw: Callable[[Document, str, Any], bool]  # of one trace into axes; False where it has no figures
    by_trace: bool = True


def policy_name(run: Document) -> str:
    """How a run is labelled: eviction, and what is written and read unless that is everything."""
    write, read = run.get("write", "write_through"), run.get("read", "always")
    name = str(run["eviction"])
    if write not in ("write_through", name):
        name += f" + {write}"
    return name if read == "always" else f"{name} + read {read}"


def saved_share(run: Document) -> float:
    """GPU time saved, of what all prompts cost in full."""
    return float(run["gpu_s_saved"] / run["gpu_s_total"]) if run["gpu_s_total"] else 0.0


def written_bytes(run: Document) -> float:
    """Into all tiers."""
    return float(sum(tier["bytes_written"] for tier in run["tiers"]))


def by_policy(document: Document, trace: str) -> Iterator[tuple[str, list[Document]]]:
    """Runs of one trace with a capacity, by policy, from the smallest capacity on."""
    runs: dict[str, list[Document]] = {}
    for run in document["runs"]:
        if run["trace"] == trace and run["capacity_tokens"]:
            runs.setdefault(policy_name(run), []).append(run)
    for name in sorted(runs):
        yield name, sorted(runs[name], key=lambda run: int(run["capacity_tokens"]))


def _styles(document: Document) -> dict[str, dict[str, Any]]:
    """Each policy looks the same in all plots: ten colours, then other markers."""
    names = sorted({policy_name(run) for run in document["runs"]})
    return {
        name: {"color": f"C{place % 10}", "marker": _MARKERS[(place // 10 + place) % len(_MARKERS)], "label": name}
        for place, name in enumerate(names)
    }


def _bounds(document: Document, trace: str) -> list[tuple[int, Document]]:
    """``(capacity of the studied tier in tokens, bound)``, from the smallest on."""
    found: dict[int, Document] = {}
    pages = {run["total_pages"]: run["capacity_tokens"] for run in document["runs"] if run["trace"] == trace}
    for bound in document["bounds"]:
        if bound["trace"] == trace and bound["capacity_pages"] in pages:
            found[pages[bound["capacity_pages"]]] = bound
    return sorted(found.items())


def _capacity_axis(axes: Any, capacities: set[int]) -> None:
    axes.set(xscale="log", xlabel="capacity, tokens")
    axes.set_xticks(sorted(capacities), [f"{capacity / 1e6:g} M" for capacity in sorted(capacities)])
    axes.minorticks_off()


def _capacities(document: Document, trace: str) -> set[int]:
    return {run["capacity_tokens"] for _, runs in by_policy(document, trace) for run in runs}


def _hits(document: Document, trace: str, axes: Any) -> bool:
    runs, styles = list(by_policy(document, trace)), _styles(document)
    for name, of in runs:
        shares = [run["usable_tokens"] / run["input_tokens"] for run in of]
        axes.plot([run["capacity_tokens"] for run in of], shares, markersize=4, linewidth=1, **styles[name])
    bounds = _bounds(document, trace)
    if bounds:
        belady = [bound["belady"]["token_share"] for _, bound in bounds]
        axes.plot([capacity for capacity, _ in bounds], belady, "k--", label="Belady's rule")
        axes.axhline(bounds[0][1]["ceiling"]["token_share"], color="k", linestyle=":", label="infinite cache")
    axes.set(ylabel="usable share of prompt tokens")
    _capacity_axis(axes, _capacities(document, trace))
    return bool(runs)


def _pareto(document: Document, trace: str, axes: Any) -> bool:
    runs, styles = list(by_policy(document, trace)), _styles(document)
    for name, of in runs:
        written = [written_bytes(run) / 1e12 for run in of]
        axes.plot(written, [saved_share(run) for run in of], markersize=5, linewidth=0.5, **styles[name])
    bounds = _bounds(document, trace)
    if bounds and runs:
        size = next(each["block_tokens"] for each in document["traces"] if each["name"] == trace)
        page_tb = size * document["setup"]["token_bytes"] / 1e12
        axes.plot(
            [bound["belady"]["written_blocks"] * page_tb for _, bound in bounds],
            [bound["belady"]["saved_share"] for _, bound in bounds],
            "k*",
            markersize=9,
            label="Belady's rule",
        )
    axes.set(xlabel="written, TB", ylabel="share of prefill GPU time saved")
    return bool(runs)


def _regret(document: Document, trace: str, axes: Any) -> bool:
    styles, has_figures = _styles(document), False
    for name, runs in by_policy(document, trace):
        points = [(run["capacity_tokens"], *run["regret"]) for run in runs if run["regret"] is not None]
        if points:
            has_figures = True
            capacities, low, high = zip(*points, strict=True)
            axes.plot(capacities, high, markersize=4, linewidth=1, **styles[name])
            axes.fill_between(capacities, low, high, color=styles[name]["color"], alpha=0.12)
    axes.set(ylabel="GPU time not saved, of the bound")
    _capacity_axis(axes, _capacities(document, trace))
    return has_figures


def _ttl(document: Document, trace: str, axes: Any) -> bool:
    points: list[Document] = next((curve["points"] for curve in document["ttl"] if curve["trace"] == trace), [])
    if not points:
        return False
    ttls = [each["ttl_s"] for each in points]
    axes.plot(ttls, [each["token_hit_share"] for each in points], "C0o-", label="usable tokens")
    right = axes.twinx()
    right.plot(ttls, [each["resident_tokens_mean"] / 1e6 for each in points], "C1s--")
    right.set_ylabel("held on average, million tokens (dashed)", color="C1")
    axes.set(xscale="log", xlabel="kept after the last use", ylabel="share of prompt tokens")
    axes.set_xticks(ttls, [f"{each['ttl_s']:g} s\nR {each['R']:.2f}\nA {each['A']:.2f}" for each in points])
    axes.minorticks_off()
    return True


def _break_even(document: Document, trace: str, axes: Any) -> bool:
    """How many times as fast loading is as computing, over reused tokens and bandwidth, without latency."""
    from matplotlib.colors import LogNorm  # type: ignore[import-not-found,unused-ignore]

    table: Document = document["break_even"]
    tokens, prefill_s = table["tokens"], table["prefill_s"]
    size_bytes = [count * table["token_bytes"] + table["state_bytes"] for count in tokens]
    speeds = [10 ** (step / 20) for step in range(-10, 46)]  # GB/s
    faster = [
        [seconds * speed * 1e9 / size for size, seconds in zip(size_bytes, prefill_s, strict=True)] for speed in speeds
    ]
    mesh = axes.pcolormesh(tokens, speeds, faster, norm=LogNorm(0.05, 20), cmap="RdYlGn", shading="gouraud")
    axes.figure.colorbar(
        mesh, ax=axes, label="loading is so many times as fast", ticks=[0.1, 0.3, 1, 3, 10], format="%g"
    )
    axes.contour(tokens, speeds, faster, levels=[1.0], colors="k")
    axes.plot([], [], "k", label="as fast as computing")
    for place, (name, tier) in enumerate(sorted(table["tiers"].items())):
        speed, first = tier["bytes_per_s"] / 1e9, tier["tokens"]
        label = f"{name}: {speed:g} GB/s, {tier['latency_s'] * 1e3:g} ms: "
        label += "never pays" if first is None else f"pays from {first:,} tokens"
        axes.axhline(speed, color=f"C{place}", linestyle="--", label=label)
        if first is not None:
            axes.plot([max(first, tokens[0])], [speed], "o", color=f"C{place}", markersize=8)
    axes.set(xscale="log", yscale="log", xlabel="tokens reused", ylabel="GB/s", title=table["rig"])
    axes.set(xlim=(tokens[0], tokens[-1]), ylim=(speeds[0], speeds[-1]))
    return True


def _speed(document: Document, trace: str, axes: Any) -> bool:
    """Both against computing everything; a ring where one gets better and the other worse."""
    computed = next((each for each in document["computed"] if each["trace"] == trace), None)
    if computed is None:
        return False
    load, styles = document["setup"]["loads"][0], _styles(document)
    drawn, disagree = list[float](), list[tuple[float, float]]()
    for name, runs in by_policy(document, trace):
        points = [(both[1], both[0]) for run in runs if (both := gains(run, computed, load)) is not None]
        drawn += [ttft for _, ttft in points]
        disagree += [(speed, ttft) for speed, ttft in points if (speed > 1) == (ttft > 1)]
        if points:
            axes.plot(*zip(*points, strict=True), markersize=5, linewidth=0.5, **styles[name])
    if disagree:
        axes.plot(*zip(*disagree, strict=True), "o", markersize=12, mfc="none", mec="r", label="they disagree")
    axes.axhline(1, color="k", linewidth=0.8)
    axes.axvline(1, color="k", linewidth=0.8)
    axes.set(
        yscale="log" if max(drawn, default=1.0) > 5 or min(drawn, default=1.0) < 0.2 else "linear",
        xlabel="throughput when saturated, of that of computing everything",
        ylabel=f"mean TTFT at {load}, of that of computing",
    )
    return bool(drawn)


def _loads(document: Document, trace: str, axes: Any) -> bool:
    """TTFT and throughput of every load, at the largest capacity."""
    rows = [(name, runs[-1]["queueing"]) for name, runs in by_policy(document, trace) if runs[-1]["queueing"]]
    computed = [each["queueing"] for each in document["computed"] if each["trace"] == trace]
    styles = _styles(document)
    for name, loads in [*rows, *(("computing everything", loads) for loads in computed)]:
        style = styles.get(name, {"color": "k", "marker": "x", "label": name})
        points = sorted(
            (each["tokens_per_s"] / 1e3, each["ttft_s"]["mean"]) for each in loads if each["load"] != "saturated"
        )
        axes.plot(*zip(*points, strict=True), markersize=5, linewidth=0.8, **style)
    axes.set(yscale="log", xlabel="prompt tokens served, thousand a second", ylabel="mean TTFT, s")
    return bool(rows)


def _orphans(document: Document, trace: str, axes: Any) -> bool:
    found: dict[str, list[tuple[int, float]]] = {}
    for each in document["orphans"]:
        if each["trace"] == trace:
            found.setdefault(each["eviction"], []).append((each["capacity_pages"], each["orphan_share"]))
    styles = _styles(document)
    for name, points in sorted(found.items()):
        axes.plot(*zip(*sorted(points), strict=True), markersize=4, linewidth=1, **styles.get(name, {"label": name}))
    axes.set(xscale="log", xlabel="capacity, blocks", ylabel="references to blocks of no use")
    axes.set_ylim(bottom=0)
    return bool(found)


PLOTS = (
    Plot("hits", "What is found", "Above: better. No policy passes Belady's rule at its capacity.", _hits),
    Plot(
        "pareto", "GPU time saved against bytes written", "Up and to the left is better. A point per capacity.", _pareto
    ),
    Plot(
        "regret",
        "Regret by capacity",
        "Below: better. Each band reaches from the shortfall from Belady's rule, which is possible, to that from the"
        " bound, which may not be: the linear program, or an infinite cache where it was not solved.",
        _regret,
    ),
    Plot(
        "speed",
        "Time to the first token and throughput",
        "Right and below is better than computing everything, left and above is worse. A point per capacity; red rings"
        " where time to the first token and throughput disagree.",
        _speed,
    ),
    Plot(
        "loads",
        "Time to the first token by load",
        "At the largest capacity, a point per load that the run was given. Below and right is better.",
        _loads,
    ),
    Plot(
        "ttl",
        "How long to keep",
        "A cache with room for everything that forgets what was idle for so long. R: seconds held idle for one of"
        " decoding. A: tokens computed, of those that no cache could have found.",
        _ttl,
    ),
    Plot(
        "break_even",
        "When loading beats computing",
        "Green: loading is faster. Dots: from where on a tier pays, with its latency, whatever the rest of the prompt.",
        _break_even,
        by_trace=False,
    ),
    Plot(
        "orphans",
        "What the leaf rule is for",
        "References that would find a block without those before it, if each block were evicted on its own.",
        _orphans,
    ),
)
