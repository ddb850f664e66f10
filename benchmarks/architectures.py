"""Tiny models of every family through a real engine: does the turn hold, are answers the same, how far is reuse off?

Prints a line a family, and writes the table of docs/architectures.md: `python -m benchmarks.architectures --markdown
docs/architectures.md`. Each family starts an engine. `--results` keeps what has been measured, so that a run can go on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from ropewalk.cluster.bench.architectures import PROMPT, Findings, engine_arguments, examine, facts_by_configuration
from ropewalk.cluster.bench.engine import Engine
from ropewalk.cluster.models.tiny import REFUSED, SERVED, Family, write, write_config

COLUMNS = (
    FAMILY := "family",
    CLASS := "vLLM class",
    KV := "KV",
    ROPE := "RoPE",
    ERROR := "turn error, worst layer",
    SAME := "same tokens re-injected",
    SERVED_TOKENS := "served from store",
    KL_PREFILL := "KL prefill",
    KL_TURNED := "KL turned",
    KL_UNTURNED := "KL not turned",
)
BEGIN, END = "<!-- generated: python -m benchmarks.architectures --markdown docs/architectures.md -->", "<!-- end -->"


Row = dict[str, str]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="write the table between its marks in this file")
    parser.add_argument("--family", action="append", help="only families whose name holds this; may be repeated")
    parser.add_argument("--results", type=Path, help="JSON file; families that it holds are not measured again")
    args = parser.parse_args(argv)
    rows: dict[str, Row] = {}
    if args.results and args.results.exists():
        rows = json.loads(args.results.read_text())
    for family in (*SERVED, *REFUSED):
        if family.name in rows or (args.family and not any(part in family.name for part in args.family)):
            continue
        rows[family.name] = measure(family)
        print(" | ".join(rows[family.name].values()), flush=True)
        if args.results:
            args.results.write_text(json.dumps(rows, indent=2))
    if args.markdown:
        order = [family.name for family in (*SERVED, *REFUSED) if family.name in rows]
        write_table(args.markdown, [rows[name] for name in order])


def measure(family: Family) -> Row:
    """Return the family's cells by column; where a family fails, with the error."""
    folder = Path(tempfile.mkdtemp(prefix="ropewalk-tiny-"))
    row = {FAMILY: family.name}
    try:
        return row | (_by_configuration if family in REFUSED else _by_engine)(family, folder)
    except Exception as error:  # the other families go on
        return row | {ERROR: f"failed: {str(error).strip().splitlines()[0]}"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _by_engine(family: Family, folder: Path) -> Row:
    write(family, folder)
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
    store = base / f"ropewalk-architectures-{uuid.uuid4().hex}"
    engine = Engine(str(folder), store_root=store, **engine_arguments(family))
    try:
        return _architecture(folder) | _cells(examine(engine, family), str(folder))
    finally:
        engine.stop()
        shutil.rmtree(store, ignore_errors=True)


def _by_configuration(family: Family, folder: Path) -> Row:
    write_config(family, folder)
    config, facts = facts_by_configuration(folder)
    refused = f"refused: {facts.refused}" if facts.refused else f"reuse refused: {facts.reuse_refused}"
    return {CLASS: str(config.model_config.architecture), ERROR: refused}


def _architecture(folder: Path) -> Row:
    config = json.loads((folder / "config.json").read_text())
    return {CLASS: config["architectures"][0], KV: "MLA" if config.get("kv_lora_rank") else "MHA or GQA"}


def _cells(findings: Findings, model: str) -> Row:
    rotary: dict[str, Any] = findings.status["rotary"] or {}
    pairing = f", {rotary['size']} {'neighbours' if rotary['interleaved'] else 'halves'}" if "size" in rotary else ""
    row = {ROPE: f"{rotary.get('rope', '')}{pairing}"}
    if findings.refused:
        row[ERROR] = f"reuse refused: {findings.refused.removeprefix(model + ': ')}"
    else:
        row[ERROR] = f"{findings.status['turn_error_of_layers']:.1e}"
        row[KL_TURNED], row[KL_UNTURNED] = f"{findings.kl_turned:.2g}", f"{findings.kl_unturned:.2g}"
    if findings.kl_prefill is not None:
        row[KL_PREFILL] = f"{findings.kl_prefill:.2g}"
    if findings.first and findings.reinjected:
        row[SAME] = "yes" if findings.first.token_ids == findings.reinjected.token_ids else "**no**"
        row[SERVED_TOKENS] = f"{findings.reinjected.num_cached} of {PROMPT}"
    return row


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Replace what stands between the marks in `path`. Raises `ValueError` when it has none."""
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path}: has no lines {BEGIN!r} and {END!r}")
    packages = {"vLLM": packages_distributions()["vllm"][0], "PyTorch": "torch", "transformers": "transformers"}
    versions = ", ".join(f"{name} {version(package)}" for name, package in packages.items())
    lines = [BEGIN, f"{datetime.date.today()}; {versions}; bfloat16, CPU.", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    lines += [f"| {' | '.join(row.get(column, '').replace('|', '/') for column in COLUMNS)} |" for row in rows]
    path.write_text(text[: text.index(BEGIN)] + "\n".join([*lines, "", text[text.index(END) :]]))


if __name__ == "__main__":
    main()
