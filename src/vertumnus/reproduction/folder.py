"""The folder of a reproduction: one JSON and one CSV per finished experiment, and the report."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vertumnus.errors import ConfigError
from vertumnus.reproduction.rows import Outcome, Row
from vertumnus.workload.output import replacing

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Record:
    """A finished experiment: its outcome and under what it was obtained."""

    outcome: Outcome
    conditions: dict[str, Any]
    """Scale, seed and traffic: what must agree for the record to stand for a run."""
    environment: dict[str, Any]
    wall_s: float


@dataclass(frozen=True, slots=True)
class Folder:
    """Where results lie. A record is whole or not there."""

    path: Path

    def create(self) -> None:
        """Raises ConfigError where the path cannot be a folder."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output folder is {str(self.path)!r} ({error.strerror}); accepted: a folder, or a new path"
            ) from None

    def record(self, name: str) -> Record | None:
        """What is there of an experiment; ConfigError where the file is none of ours."""
        path = self.path / f"{name}.json"
        if not path.exists():
            return None
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise ValueError
            return Record(
                Outcome.from_json(document["outcome"]),
                document["conditions"],
                document["environment"],
                document["wall_s"],
            )
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} is no record of this version; accepted: one, or --force to replace it") from None

    def write(self, name: str, record: Record) -> None:
        """The record as JSON; its rows, the published figures beside ours and time series as a CSV each."""
        document = {
            "format": FORMAT,
            "conditions": record.conditions,
            "environment": record.environment,
            "wall_s": round(record.wall_s, 1),
            "outcome": record.outcome.to_json(),
        }
        outcome = record.outcome
        tables = {
            "": outcome.rows,
            "-published": [asdict(each) for each in outcome.comparisons],
            "-series": _series(outcome.rows),
        }
        for suffix, rows in tables.items():
            path = self.path / f"{name}{suffix}.csv"
            if rows:
                write_rows(path, rows)
            else:
                path.unlink(missing_ok=True)
        with replacing(self.path / f"{name}.json", force=True) as temporary:
            temporary.write_text(_text(_rounded(document)), encoding="utf-8")

    def write_report(self, text: str) -> Path:
        """The report; returns its path."""
        path = self.path / "report.html"
        with replacing(path, force=True) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return path


def _series(rows: Sequence[Row]) -> list[Row]:
    """One row a window of every time series, with the names and the load that tell the rows apart."""
    return [
        {name: value for name, value in row.items() if isinstance(value, str) or name == "load"} | window
        for row in rows
        for window in row.get("series", ())
    ]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Rows as CSV: all columns in order of appearance; nested ones are left out."""
    columns = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if not any(isinstance(row.get(name), list | dict) for row in rows)
    ]
    with replacing(path, force=True) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows([_rounded(row) for row in rows])


def _text(document: dict[str, Any]) -> str:
    """JSON with one row a line: small, and a difference shows which rows changed."""
    outcome = document["outcome"]
    rows = ",\n".join(json.dumps(row) for row in outcome["rows"])
    rest = json.dumps(document | {"outcome": outcome | {"rows": []}}, indent=1)
    return rest.replace('"rows": []', f'"rows": [\n{rows}\n]', 1) + "\n"


def _rounded(value: Any) -> Any:
    """Six significant digits: nobody can tell more, and records stay small."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
