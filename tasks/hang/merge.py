"""Several answers of RAS about one job, as one report.

Communicators that were never initialised together are separate meshes, and a process answers for its own
mesh only: a job of many groups may need several questions to be seen whole.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from tasks.hang.report import RasReport, Record


def merge_reports(reports: Sequence[RasReport]) -> RasReport:
    """Put answers of one moment together, by communicator.

    Of a communicator in two answers the one that knows more counts: with fewer missing ranks, then with more
    ranks, then the earlier. What may spoil an answer is kept from the worst of them, so that trust in the
    whole is not greater than in its parts.

    Args:
        reports: At least one, in the order in which they were received.

    Returns:
        Version and timestamp of the first; the longest collection and the most timeouts of any; the sum of
        the records that were dropped.

    Raises:
        ValueError: there is no report.
    """
    if not reports:
        raise ValueError("There is no report to merge.")
    if len(reports) == 1:
        return reports[0]
    records: dict[str, Record] = {}
    for report in reports:
        for key, record in report.records.items():
            known = records.get(key)
            if known is None or _knowledge(record) > _knowledge(known):
                records[key] = record
    return replace(
        reports[0],
        records=records,
        timeouts_count=max(report.timeouts_count for report in reports),
        collection_time_s=max(report.collection_time_s for report in reports),
        repaired=any(report.repaired for report in reports),
        dropped=sum(report.dropped for report in reports),
    )


def _knowledge(record: Record) -> tuple[int, int]:
    return -record.missing_ranks_count, record.ranks_count
