"""Watch one training run for one shift."""

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.diagnose import diagnose_run
from flows.remediate import remediate_run
from tasks.follow import count_failure, steps
from tasks.handover import REFUSED, RUN_ENDED, WATCHED_ELSEWHERE, start_next_shift
from tasks.hang.errors import RankwatchError
from tasks.shift import begin_shift


@flow(
    name="watch_run",
    flow_run_name="watch {run}",
    on_completion=[start_next_shift],
    on_failure=[start_next_shift],
    on_crashed=[start_next_shift],
    validate_parameters=True,
)
def watch_run(run: str) -> State[None]:
    """Poll RAS until the shift is over; a confirmed hang is diagnosed, then remediated, while polling goes on
    after each.

    Args:
        run: Name of the TrainingRun block.
    """
    try:
        shift = begin_shift(run)
    except RankwatchError as error:
        return Failed(name=REFUSED, message=str(error))
    if shift is None:
        return Completed(name=WATCHED_ELSEWHERE, message=f"Another shift watches {run}.")
    with shift:
        for _ in shift.polls():
            shift.look()
            for due in steps(shift):
                step = diagnose_run if due.step == "diagnose" else remediate_run
                try:
                    with shift.busy():
                        step(run=run, incident=due.incident_id)
                except Exception as error:  # noqa: BLE001  whatever fails in a step, the watch goes on
                    count_failure(shift, due, error)
    name = RUN_ENDED if shift.over == RUN_ENDED else None
    return Completed(name=name, message=shift.over or "The shift is over; the next one takes over.")
