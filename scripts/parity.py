"""Runs the whole matrix of `tests/parity/matrix.py`: every layout with every feature, fp64 and fp32, against plain torch.

Each finished case is a line of the results file at once; a run that is started again leaves out what is there. In the end a
Markdown table (one line per layout) is printed and written.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.parity.matrix import BASE, Case, stages, whole_matrix
from tests.parity.run import MEASURES, PRECISIONS, Deviation, run_cases


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=4, choices=(1, 2, 4, 8), help="most processes of a case (default 4)")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("runs/parity.jsonl"), help="one line per case")
    parser.add_argument("--table", type=pathlib.Path, default=pathlib.Path("runs/parity.md"), help="the table, in Markdown")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    options = parser.parse_args(argv)
    if options.fresh:
        options.results.unlink(missing_ok=True)
    cases = sorted(whole_matrix(options.ranks), key=lambda case: case.ranks)
    results = run_missing(cases, options.results)
    text = table({case.key: case for case in cases}, results)
    print(f"\n{text}")
    options.table.parent.mkdir(parents=True, exist_ok=True)
    options.table.write_text(text + "\n", encoding="utf-8")
    bad = [f"{key}: {deviation}" for key, found in results.items() for deviation in found if not deviation.good]
    print(f"\n{len(cases)} cases, everything agrees" if not bad else "\nwhat does not agree:\n" + "\n".join(bad))
    return 1 if bad else 0


def run_missing(cases: Sequence[Case], file: pathlib.Path) -> dict[str, list[Deviation]]:
    """Run what the file lacks, with the time that is left; all results of the cases by key."""
    results = read(file)
    keys = {case.key for case in cases}
    missing = [case for case in cases if case.key not in results]
    print(f"{len(cases)} cases, {len(cases) - len(missing)} known from {file}", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    begun, spent, work = time.monotonic(), 0.0, sum(cost(case) for case in missing)
    with open(file, "a", encoding="utf-8") as out:
        for number, case in enumerate(missing, start=1):
            found = tried(case)
            results[case.key] = found
            out.write(json.dumps({"case": case.key, "found": [dataclasses.asdict(deviation) for deviation in found]}) + "\n")
            out.flush()
            spent += cost(case)
            left = (time.monotonic() - begun) * (work / spent - 1)
            verdict = "good" if all(deviation.good for deviation in found) else "BAD"
            print(f"[{number}/{len(missing)}, {math.ceil(left / 60)} min left] {case.ranks} rank(s), {case.key}: {verdict}", flush=True)
    return {key: found for key, found in results.items() if key in keys}


def tried(case: Case) -> list[Deviation]:
    """The case's deviations; a case that ends with an error is a problem of its own."""
    try:
        return run_cases([case], timeout=300.0)[case.key]
    except AssertionError as error:
        return [Deviation(precision, 0.0, {}, {}, (str(error)[-2000:],)) for precision in PRECISIONS]


def cost(case: Case) -> float:
    """Of a case, in a unit of its own: for the time that is left."""
    return case.ranks * case.layers


def read(file: pathlib.Path) -> dict[str, list[Deviation]]:
    """Earlier results; a line that was cut off by a stop is left out."""
    results = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        results[entry["case"]] = [Deviation(**{**one, "problems": tuple(one["problems"])}) for one in entry["found"]]
    return results


def table(cases: Mapping[str, Case], results: Mapping[str, Sequence[Deviation]]) -> str:
    """A line per layout: cases, and the largest deviation of each measure in each precision."""
    rows: dict[str, list[tuple[Case, Sequence[Deviation]]]] = {}
    for key, found in results.items():
        rows.setdefault(layout_of(cases[key]), []).append((cases[key], found))
    header = ["layout", "ranks", "cases", "within bounds", *(f"{measure} {p}" for p in PRECISIONS for measure in MEASURES)]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for layout, members in rows.items():
        good = sum(all(deviation.good for deviation in found) for _, found in members)
        worst = [f"{largest(members, p, measure):.1e}" for p in PRECISIONS for measure in MEASURES]
        lines.append(f"| {layout} | {members[0][0].ranks} | {len(members)} | {good} | {' | '.join(worst)} |")
    return "\n".join(lines)


def largest(members: Sequence[tuple[Case, Sequence[Deviation]]], precision: str, measure: str) -> float:
    """Of all cases of a layout."""
    return max((one.largest.get(measure, 0.0) for _, found in members for one in found if one.precision == precision), default=0.0)


def layout_of(case: Case) -> str:
    """`tp2 SP, pp2 zb_h1, dp2`."""
    row: dict[str, Any] = {**BASE, **case.row}
    parts = [f"tp{row['tp']}" + " SP" * row["sequence_parallel"]] * (row["tp"] > 1)
    parts += [f"pp{stages(row)} {row['pipeline']}"] * (row["pipeline"] != "none")
    parts += [f"dp{row['dp']}"] * (row["dp"] > 1)
    return ", ".join(parts) or "one process"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
