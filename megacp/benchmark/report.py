"""A benchmark's rows: a table that grows on the console, and CSV and JSON that are complete after every row.

    report = Report("layer", LAYER_COLUMNS, environment, ceilings, out="results")
    report.add({"seq_length": 131072, "method": "a2a", "seconds": 0.15, ...}, parts=[...])    # prints a line, writes the files
    report.add({"seq_length": 262144, "method": "a2a", "problem": "out of GPU memory"})

    results/layer.json         all of it: environment, ceilings, rows and parts; `tools/benchmark.py plot` draws it
    results/layer.csv          a line a row
    results/layer_parts.csv    a line a row, phase and part

A row is a flat dict; `problem` says why it has no figures. Files are replaced as a whole, so a run that is stopped at any time
leaves what it had measured.
"""

import csv
import dataclasses
import io
import json
import os
from pathlib import Path

from megacp.benchmark.ceilings import Ceilings
from megacp.benchmark.flags import short_tokens


@dataclasses.dataclass(frozen=True)
class Column:
    """`form`: a format specification, or "tokens" (128K) or "%" (share of 1). `width` without the gap before it."""

    key: str
    title: str
    form: str
    width: int

    def cell(self, row: dict) -> str:
        value = row.get(self.key)
        if value is None:
            text = "-"
        elif self.form == "tokens":
            text = short_tokens(value)
        elif self.form == "%":
            text = f"{100 * value:.1f}"
        else:
            text = format(value, self.form)
        return f"{text:>{self.width}}"


class Report:
    """Rows of one mode. `out`: the folder of the files, an earlier run's replaced; None: console only."""

    def __init__(self, name: str, columns: list[Column], environment: dict, ceilings: Ceilings | None, out: str | None):
        self.name, self.columns = name, columns
        self.environment = environment
        self.ceilings = None if ceilings is None else dataclasses.asdict(ceilings)
        self.rows: list[dict] = []
        self._folder = None if out is None else Path(out)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def header(self) -> str:
        return "  ".join(f"{column.title:>{column.width}}" for column in self.columns)

    def line(self, row: dict) -> str:
        if "problem" not in row:
            return "  ".join(column.cell(row) for column in self.columns)
        described = [column for column in self.columns if column.key in row]
        return "  ".join([*(column.cell(row) for column in described), row["problem"]])

    def add(self, row: dict, parts: list[dict] | None = None) -> None:
        """Prints the row and its parts, and writes the files."""
        if not self.rows:
            print(self.header())
            self._remove_stale()
        self.rows.append(row | ({"parts": parts} if parts else {}))
        print(self.line(row), flush=True)
        for part in parts or []:
            print(part_line(part), flush=True)
        self._write()

    def _remove_stale(self) -> None:
        """An earlier run's files that this one may not come to write: they would tell of other rows than those beside them."""
        if self._folder is not None:
            for name in (f"{self.name}_parts.csv", f"{self.name}.png"):
                (self._folder / name).unlink(missing_ok=True)

    def _write(self) -> None:
        if self._folder is None:
            return
        content = {"mode": self.name, "environment": self.environment, "ceilings": self.ceilings, "rows": self.rows}
        replace_file(self._folder / f"{self.name}.json", json.dumps(content, indent=1) + "\n")
        plain = [{key: value for key, value in row.items() if key != "parts"} for row in self.rows]
        replace_file(self._folder / f"{self.name}.csv", csv_text(plain))
        names = {column.key for column in self.columns}
        parts = [
            {key: row[key] for key in plain_row if key in names and not isinstance(row[key], float)} | part
            for row, plain_row in zip(self.rows, plain)
            for part in row.get("parts", [])
        ]
        if parts:
            replace_file(self._folder / f"{self.name}_parts.csv", csv_text(parts))


def part_line(part: dict) -> str:
    """`  backward  gemm          0.812 s   31.2%   640.1 TFLOP/s   81.2% of matmul`."""
    text = f"    {part['phase']:9}{part['part']:14}{part['exposed_s']:10.4f} s {100 * part['exposed_share']:6.1f}%"
    if part.get("rate") is not None:
        scale, unit = (1e12, "TFLOP/s") if part["unit"] == "FLOP/s" else (1e9, "GB/s")
        text += f"{part['rate'] / scale:10.4g} {unit:8}"
        if part.get("ceiling_share") is not None:
            text += f"{100 * part['ceiling_share']:6.1f}% of {part['ceiling']}"
    return text


def csv_text(rows: list[dict]) -> str:
    """Columns in the order of their first appearance; a row that lacks one leaves it empty."""
    names = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def replace_file(path: Path, text: str) -> None:
    """Complete or unchanged."""
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)
