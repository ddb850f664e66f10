"""The studies' figures as tables on a terminal."""

from __future__ import annotations

import functools
import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def print_report(report: Mapping[str, Any]) -> None:
    """Print what `ropewalk bench reuse` found."""
    console = Console()
    for model, found in report["models"].items():
        if found["lengths"]:
            _print_lengths(console, model, found["lengths"])
        rows = [(f"{entry['length']} tokens", entry["arms"]) for entry in found["lengths"]]
        rows += [(entry["pattern"], entry["arms"]) for entry in found["patterns"]]
        _print_arms(console, model, rows)
        if "gsm8k" in found:
            table = _table(f"{model}: GSM8K", "arm", "right", "same number as full prefill")
            for arm, entry in found["gsm8k"].items():
                table.add_row(arm, share_text(entry["right"]), share_text(entry["same_number_as_full"]))
            console.print(table)


def print_splices(report: Mapping[str, Any]) -> None:
    """Print what `ropewalk bench splice` found."""
    console = Console()
    for model, found in report["models"].items():
        for name, precision in (("faithfulness", "bfloat16"), ("faithfulness_float32", "float32")):
            if name in found:
                _print_faithfulness(console, f"{model}, {precision}", found[name])
        if (exact := found.get("exactness")) is not None:
            table = _table(f"{model}: answers that must be plain vLLM's", "what", "compared", "set aside", "different")
            for name, count in exact["different"].items():
                compared = exact["prompts"] - exact["set_aside"]
                table.add_row(name, str(compared), str(exact["set_aside"]), str(count))
            console.print(table)
        if (chained := found.get("chained")) is not None:
            table = _table(f"{model}: {chained['edits']} edits of one place against a single one", "what", "figure")
            table.add_row("KL of the first token, mean", number(chained["kl"]["mean"], ".1e"))
            table.add_row("same first token", share_text(chained["same_first_token"]))
            console.print(table)
        if (policies := found.get("policies")) is not None:
            _print_policies(console, model, policies)
        if "load" in found:
            _print_load(console, model, found["load"], found["append_only"])
        if found["edits"]:
            title = f"{model}: first token after an edit, by tokens behind it"
            table = _table(title, "tokens", "spliced", "plain prefill", "splice", "ratio")
            for entry in found["edits"]:
                times = entry["ttft"]
                spliced = f"{times['spliced_share']['median']:.1%}"
                plain, ours = milliseconds(times["prefill_s"]), milliseconds(times["splice_s"])
                table.add_row(str(entry["length"]), spliced, plain, ours, f"{entry['ttft_ratio']:.1f}x")
            console.print(table)
            _print_arms(console, model, [(f"{e['length']} tokens", e["arms"]) for e in found["edits"]])


def _print_faithfulness(console: Console, model: str, found: Mapping[str, Any]) -> None:
    table = _table(f"{model}: splices against the float32 reference", "what", "figure")
    table.add_row("prompts (near-ties set aside)", f"{found['prompts']} ({found['near_ties']})")
    table.add_row("same first token", share_text(found["same_first_token"]))
    table.add_row("KL, mean", number(found["kl"]["mean"], ".1e"))
    table.add_row("of the text behind the edit, spliced", number(found["spliced_share"]["mean"], ".0%"))
    for answer, times in found["follows"].items():
        table.add_row(f"where they differ, follows {answer}", str(times))
    console.print(table)


def _print_policies(console: Console, model: str, found: Mapping[str, Any]) -> None:
    table = _table(f"{model}: tasks with stale tool output that newer output contradicts", "policy", "tasks", "solved")
    for policy, entry in found["solved"].items():
        table.add_row(policy, str(found["tasks"]), share_text(entry))
    console.print(table)
    console.print(f"{found['spliced']} of {found['tasks']} were spliced by amortize.")
    says = ", ".join(f"as {policy} in {times}" for policy, times in found["amortize_as"].items())
    console.print(f"Where keep all and forget differ ({found['differ']} tasks), amortize does {says}.\n")


def _print_load(
    console: Console, model: str, rows: Sequence[Mapping[str, Any]], append_only: Mapping[str, Any]
) -> None:
    title = f"{model}: sessions that edit their history at every turn (TTFT: of turns after an edit)"
    table = _table(title, "at once", "arm", "hit rate", "latency p50", "p95", "TTFT p50")
    for row in rows:
        for arm in ("plain", "ropewalk"):
            entry = row[arm]
            times = (entry["latency_p50_s"], entry["latency_p95_s"], entry["ttft_after_edit_s"]["median"])
            label = str(row["concurrency"]) if arm == "plain" else ""
            table.add_row(label, arm, f"{entry['hit_rate']:.0%}", *(f"{1e3 * seconds:.0f} ms" for seconds in times))
    console.print(table)
    gains = ", ".join(f"{100 * (r['ropewalk']['hit_rate'] - r['plain']['hit_rate']):+.0f}" for r in rows)
    spliced = ", ".join(f"{row['ropewalk']['spliced']:.0%}" for row in rows)
    console.print(
        f"Points of hit rate gained: {gains}; of all tokens, spliced: {spliced}. Prompts of "
        f"{rows[0]['plain']['mean_prompt']:.0f} tokens.\n"
    )
    if not append_only["hit_rate_plain"]:
        console.print("Plain vLLM has no prefix cache for this model on this machine.\n")
    ratio = append_only["ratio_of_pairs"]
    console.print(
        f"{model}: sessions without edits, hit rate {append_only['hit_rate']:.0%} (plain vLLM "
        f"{append_only['hit_rate_plain']:.0%}): a turn takes {ratio['median']:.3f} "
        f"({ratio['q1']:.3f}-{ratio['q3']:.3f}) times as long as with plain vLLM\n"
    )


def _print_lengths(console: Console, model: str, entries: Sequence[Mapping[str, Any]]) -> None:
    table = _table(
        f"{model}: a body behind a changed header", "tokens", "recovered", "plain vLLM TTFT", "Ropewalk TTFT", "ratio"
    )
    for entry in entries:
        plain, ours = entry["ttft"]["plain_s"], entry["ttft"]["ropewalk_s"]
        ratio = f"{entry['ttft_ratio']:.1f}x"
        recovered = f"{entry['recovered_share']:.1%}"
        table.add_row(str(entry["length"]), recovered, milliseconds(plain), milliseconds(ours), ratio)
    console.print(table)


def _print_arms(console: Console, model: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    table = _table(
        f"{model}: against full prefill (KL of the first and the next tokens, shares of first tokens that are the same,"
        " of answers that are right, and that are the same; k: first tokens of a run that are computed)",
        "body",
        "arm",
        "n",
        "reused",
        "KL 1",
        "KL next",
        "tok. 1",
        "right",
        "same",
        "perpl.",
    )
    for label, arms in rows:
        for arm, entry in arms.items():
            greedy = entry["greedy"]
            num_greedy = greedy["same"] + greedy["divergence_position"]["count"]
            table.add_row(
                label if arm in ("full", "prefill") else "",
                arm.replace("boundary-", "k = "),
                str(entry["kl_first"]["count"]),
                number(entry["recovered_share"]["mean"], ".0%"),
                number(entry["kl_first"]["mean"], ".1e"),
                number(entry["kl_next"]["mean"], ".1e"),
                number(entry["argmax_match"]["share"], ".2f"),
                number(entry["recall"]["share"], ".2f"),
                number(greedy["same"] / num_greedy if num_greedy else None, ".2f"),
                number(entry["perplexity"], ".2f"),
            )
        table.add_section()
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    # Ten columns have to find room in 80 characters.
    padding = (0, 0) if len(columns) > 6 else (0, 1, 0, 0)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=padding, pad_edge=False)
    for index, column in enumerate(columns):
        is_label = index < 1 or column in ("arm", "router", "asked")
        table.add_column(column, justify="left" if is_label else "right", no_wrap=True)
    return table


def number(value: float | None, form: str) -> str:
    """A figure in a cell; a dash where there is none."""
    return "–" if value is None else format(value, form)


def share_text(entry: Mapping[str, Any]) -> str:
    """A share with its interval."""
    if entry["share"] is None:
        return "–"
    return f"{entry['share']:.2f} ({entry['low']:.2f}–{entry['high']:.2f})"


def milliseconds(entry: Mapping[str, Any]) -> str:
    """Median and quartiles."""
    return f"{1e3 * entry['median']:.0f} ms ({1e3 * entry['q1']:.0f}–{1e3 * entry['q3']:.0f})"


def print_predictions(report: Mapping[str, Any]) -> None:
    """Print what `ropewalk bench predict` found."""
    console = Console()
    for found in report["sets"]:
        title = f"{found['name']}: {found['elements']} of {found['sequences']} sessions, {found['different']} different"
        table = _table(title, "learner", "predictions", "first guess", "first three")
        for name, arm in found["arms"].items():
            count = arm["predictions"]
            table.add_row(name, str(count), f"{arm['top_1'] / count:.1%}", f"{arm['top_3'] / count:.1%}")
        console.print(table)


def print_scheduler(report: Mapping[str, Any]) -> None:
    """Print what `ropewalk bench scheduler` found."""
    console = Console()
    console.width = max(console.width, 120)  # four columns of medians with quartiles
    scaling = report["scaling"]
    heads = [f"{found['num_agents']:,} agents" for found in scaling]
    title = f"{report['num_replicas']} replicas, {report['num_sessions']} sessions; processor µs a call (quartiles)"
    costs = _table(title, "call", *heads)
    for row in zip(*(found["costs"] for found in scaling), strict=True):
        costs.add_row(row[0]["name"], *(microseconds(entry) for entry in row))
    console.print(costs)
    sizes = _table("state: bytes as JSON, and what it knows", "part", *heads)
    for part in scaling[0]["bytes"]:
        sizes.add_row(part, *(f"{found['bytes'][part]:,}" for found in scaling))
    sizes.add_section()
    for label, key in (("agents recognised", "agents_recognised"), ("contexts learned", "contexts")):
        sizes.add_row(label, *(f"{found[key]:,}" for found in scaling))
    console.print(sizes)
    if report["recognition"]:
        title = "six unnamed agents behind headers that never repeat; sentences, and the last third of the turns"
        table = _table(title, "shared", "own", "header", "right", "after a restart", "agents known")
        for mix in report["recognition"]:
            shares = (f"{mix['right']:.1%}", f"{mix['right_restarted']:.1%}")
            table.add_row(str(mix["preamble"]), str(mix["own"]), str(mix["header"]), *shares, str(mix["agents_known"]))
        console.print(table)


def microseconds(entry: Mapping[str, Any]) -> str:
    """Median and quartiles, to a tenth below a hundred."""
    form = ".1f" if entry["median_us"] < 100 else ",.0f"
    return f"{entry['median_us']:{form}} ({entry['lower_us']:{form}}–{entry['upper_us']:{form}})"


def print_retention(report: Mapping[str, Any]) -> None:
    """Print what `ropewalk bench retention` found: hit rates, and shares of the gap to the optimum that are closed."""
    console = Console()
    for workload, about in report["workloads"].items():
        cells = [entry for entry in report["cells"] if entry["workload"] == workload]
        title = (
            f"{workload}: {about['turns']} turns of {about['sessions']} sessions, {about['agents']} agents, "
            f"prompts of {about['prompt_tokens']:.0f} tokens; hit rate in %, by blocks (of lru's gap to the optimum)"
        )
        table = _table(title, "rule", *(str(entry["blocks"]) for entry in cells))
        for arm in cells[0].get("engine") or cells[0]["model"]:
            table.add_row(arm, *(_rate_and_share(entry, arm) for entry in cells))
        table.add_row("ttl, best other", *(_percent(max(entry["model_other_ttls"].values())) for entry in cells))
        table.add_row("speakers told", *(_percent_and_share(entry, entry["speakers_told"]) for entry in cells))
        table.add_row("optimum", *(_percent(entry["optimum"]) for entry in cells))
        table.add_row("unlimited", *(_percent(entry["unlimited"]) for entry in cells))
        if "prediction_adds" in cells[0]:
            table.add_row("prediction adds", *(f"{100 * entry['prediction_adds']:+.1f}" for entry in cells))
        console.print(table)
    measured = [entry for entry in report["cells"] if "engine" in entry]
    if measured:
        most = max(abs(rate - entry["model"][arm]) for entry in measured for arm, rate in entry["engine"].items())
        console.print(f"The model of the cache differs from the engine by {100 * most:.2f} points at most.")


def print_routing(report: Mapping[str, Any]) -> None:
    """Print what `ropewalk bench routing` found: a row for each arm and load, medians over its runs."""
    console = Console()
    console.width = max(console.width, 100)  # ten columns
    for load, title in (("saturated", "saturated"), ("open", f"open loop, {report['rate']:.2f} turns/s arriving")):
        headings = [
            "arm",
            "turns/s",
            "TTFT,\nmean",
            "TTFT,\np50",
            "TTFT,\np95",
            "turn,\np95",
            "cached,\n%",
            "queue",
            "apart",
            "uneven,\ns",
        ]
        table = _table(f"{report['model']}, two replicas, {title}; times in ms", *headings)
        for arm in report["arms"].values():
            runs = [run[load] for run in arm["runs"]]

            def median(*path: str, runs: list[Any] = runs) -> float:
                return float(statistics.median(functools.reduce(operator.getitem, path, run) for run in runs))

            table.add_row(
                arm["title"],
                f"{median('turns_per_s'):.2f}",
                *(f"{median('ttft_ms', figure):.0f}" for figure in ("mean", "p50", "p95")),
                f"{median('turn_ms', 'p95'):.0f}",
                _percent(median("cached_token_share")),
                f"{median('mean_queue'):.1f}",
                f"{median('mean_difference'):.1f}",
                f"{median('uneven_s'):.1f}",
            )
        console.print(table)
    console.print(
        "Queue: requests on a replica in the mean; difference: between the longer and the shorter; uneven: the longest "
        "time that one was above 1.5 times the mean, differences of a single request apart."
    )


def print_outage(report: Mapping[str, Any]) -> None:
    """Print what `ropewalk bench outage` found."""
    console = Console()
    title = f"scheduler killed, stopped and back, {report['rate']:g} turns/s arriving"
    table = _table(title, "period", "turns", "failed", "p50, ms", "p95, ms", "p95 / undisturbed (95 %)")
    for name, period in report["periods"].items():
        ratio = period["p95_ratio"]
        table.add_row(
            name,
            str(period["requests"]),
            str(period["errors"]),
            number(period["turn_ms"]["p50"], ".0f"),
            number(period["turn_ms"]["p95"], ".0f"),
            "–" if ratio is None else f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
        )
    console.print(table)


def print_simulation(report: Mapping[str, Any]) -> None:
    """Print what `ropewalk simulate` found: a table for each budget, a row for each rule and router."""
    console = Console()
    console.width = max(console.width, 120)  # eleven columns
    for budget in dict.fromkeys(arm["blocks"] for arm in report["arms"]):
        arms = [arm for arm in report["arms"] if arm["blocks"] == budget]
        title = (
            f"{report['workload']}: {arms[0]['requests']:,} requests, {report['replicas']} replicas with {budget:,} "
            f"blocks of {report['block_size']} tokens; TTFT and turns in seconds"
        )
        heads = ("hit", "TTFT", "p50", "p95", "p99", "turn", "p95", "turns/s", "computed", "imbalance", "req/s")
        table = _table(title, "rule", "router", *heads)
        for arm in arms:
            table.add_row(arm["retention"], arm["router"], *_simulated(arm))
        console.print(table)
    console.print(
        "computed: millions of prompt tokens; imbalance: longest time that a queue was above 1.5 times the mean, in\n"
        "seconds; req/s: requests simulated in a second of this machine."
    )


def _simulated(arm: Mapping[str, Any]) -> list[str]:
    if arm["overloaded"]:
        return [_percent(arm["hit_rate"]), "over-", "load", f"at {arm['requests']:,}"]
    times = [arm["ttft_s"][name] for name in ("mean", "p50", "p95", "p99")]
    times += [arm["turn_s"][name] for name in ("mean", "p95")]
    return [
        _percent(arm["hit_rate"]),
        *(f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}" for seconds in times),
        f"{arm['turns_per_s']:.1f}",
        f"{arm['computed_tokens'] / 1e6:,.1f}",
        f"{arm['longest_imbalance_s']:.0f}",
        f"{arm['simulated_per_s']:,.0f}",
    ]


def print_validation(report: Mapping[str, Any]) -> None:
    """Print hit rates of an engine and of the simulator beside each other."""
    title = f"{report['workload']}: {report['turns']} turns on {report['blocks']} blocks; hit rate in %"
    table = _table(title, "rule", "asked", "engine", "simulator", "points")
    for entry in report["rules"]:
        engine, simulated = entry["engine"], entry["simulator"]
        table.add_row(
            entry["rule"], entry["asked"], _percent(engine), _percent(simulated), f"{100 * (simulated - engine):+.2f}"
        )
    Console().print(table)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _percent_and_share(entry: Mapping[str, Any], rate: float) -> str:
    gap = entry.get("gap", 0)
    lru = entry["optimum"] - gap
    return _percent(rate) if gap <= 0 else f"{_percent(rate)} ({(rate - lru) / gap:.0%})"


def _rate_and_share(entry: Mapping[str, Any], arm: str) -> str:
    rate = (entry.get("engine") or entry["model"])[arm]
    return _percent(rate) if arm == "lru" else _percent_and_share(entry, rate)
