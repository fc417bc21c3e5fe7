"""Ray's detector and rankwatch over the same bytes, side by side: `python -m tests.bench.gap_table`.

The rows are the situations of tests/unit/test_gaps.py, which asserts both results.
"""

import sys
from collections.abc import Iterator

from ray.train.v2._internal.callbacks import nccl_ras

from tasks.adapters.node_part import parse_ras_addr
from tasks.hang.errors import RasError
from tasks.hang.report import parse_report
from tasks.hang.states import Aside
from tests.unit.test_gaps import ADDRESSES, DOCUMENTS, SITUATIONS, Situation, ask_ours, ask_ray, told


def rows() -> Iterator[tuple[str, str, str, str]]:
    """(what happens, the truth, Ray's result, ours)."""
    for situation in SITUATIONS:
        yield situation.name, "hang" if situation.hang else "healthy", _rays(situation), _ours(situation)
    for document, _, _ in DOCUMENTS:
        shown = document.decode() if len(document) <= 40 else f"{document[:37].decode()}..."
        yield f"document `{shown}`", "", _read_by_ray(document), _read_by_us(document)
    for text, _, _ in ADDRESSES:
        yield (
            f"NCCL_RAS_ADDR `{text}`",
            "",
            _address(nccl_ras.parse_ras_addr, text),
            _address(parse_ras_addr, text),
        )


def _rays(situation: Situation) -> str:
    found = ask_ray(situation.polls)
    if found.raised_s is not None:
        return f"{'found' if situation.hang else '**false alarm**'} after {found.raised_s:g} s"
    if found.unread:
        return "**missed**: no report could be read"
    return "**missed**" if situation.hang else "nothing"


def _ours(situation: Situation) -> str:
    ours = ask_ours(situation)
    for seconds, event in told(ours, situation.key):
        if event.event == "confirmed":
            ranks = f", rank {', '.join(map(str, event.lagging))}" if event.lagging else ""
            alarm = "" if situation.hang else "**false alarm**: "
            return f"{alarm}confirmed after {seconds:g} s: {event.kind}{ranks}"
    state = ours.window.communicators[situation.key]
    last = next((event for _, event in reversed(told(ours, situation.key))), None)
    if isinstance(state, Aside):
        return f"said to be {state.what}"
    return f"{last.event}: {last.reason}" if last else "nothing"


def _read_by_ray(document: bytes) -> str:
    return "no report" if nccl_ras.parse_ras_schema(document.decode()) is None else "a report"


def _read_by_us(document: bytes) -> str:
    try:
        report = parse_report(document)
    except RasError as error:
        return f"{type(error).__name__}: {error}"
    return f"a report of {len(report.records)} communicators, {report.dropped} dropped"


def _address(parse: object, text: str) -> str:
    assert callable(parse)
    try:
        host, port = parse(text)
    except ValueError as error:
        return f"ValueError: {error}"
    return f"{host}, port {port}"


def main() -> None:
    """Print the table in markdown."""
    lines = ["| what happens | truth | Ray 2.60 | rankwatch |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("\n", " ") for cell in row) + " |" for row in rows()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
