"""``coldpage inspect`` and ``coldpage clean``: what is on disk, and getting rid of it."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coldpage.cli.instances import InstanceReport, look_at_instances, remove_instance
from coldpage.cli.machine import default_disk_directory, expand_user
from coldpage.cli.sizes import format_bytes

__all__ = ["run_clean", "run_inspect"]


def _path(path: str | None) -> Path:
    return default_disk_directory() if path is None else expand_user(path)


def run_inspect(path: str | None, console: Console, *, as_json: bool) -> None:
    """Print what the instances below the path hold. Raises ``ColdpageError``."""
    reports = look_at_instances(_path(path))
    if as_json:
        text = json.dumps([report.to_json() for report in reports], indent=2)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    elif not reports:
        console.print(f"no instances in {_path(path)}", markup=False, highlight=False)
    else:
        console.print(_table(reports))


def _table(reports: list[InstanceReport]) -> Table:
    table = Table(show_edge=False)
    table.add_column("instance, codec, model", overflow="fold")
    for name in ("blocks", "tokens", "on disk", "damaged"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("oldest page", no_wrap=True)
    for report in reports:
        damaged = "-" if report.num_damaged is None else f"{report.num_damaged:,}"
        codec = report.codec.removesuffix("/")  # of one without parameters
        what = [report.instance_id, codec, f"model {report.model or 'unknown'}"]
        if report.locked_by:
            what.append(f"open in {report.locked_by}")
        table.add_row(
            escape("\n".join(what)),
            f"{report.num_blocks:,}",
            f"{report.num_tokens:,}",
            format_bytes(report.disk_bytes),
            damaged,
            report.oldest[:16].replace("T", " "),  # to the minute
        )
    return table


def run_clean(
    path: str | None, console: Console, *, instance_id: str | None, is_real: bool
) -> None:
    """Remove the instances that nobody has open, or say which those are. Raises
    ``ColdpageError``.
    """

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    num_bytes = 0
    for report in look_at_instances(_path(path)):
        if instance_id is not None and report.instance_id != instance_id:
            continue
        size = format_bytes(report.disk_bytes)
        if report.locked_by:
            say(f"kept     {report.directory}: in use by {report.locked_by}")
        elif not is_real:
            say(f"would go {report.directory}: {size}, {report.num_tokens:,} tokens")
            num_bytes += report.disk_bytes
        elif remove_instance(Path(report.directory)):
            say(f"removed  {report.directory}: {size}, {report.num_tokens:,} tokens")
            num_bytes += report.disk_bytes
        else:
            say(f"kept     {report.directory}: somebody has just opened it")
    if is_real:
        say(f"{format_bytes(num_bytes)} are free again")
    else:
        say(f"{format_bytes(num_bytes)} would be free; nothing was removed: --yes does it")
