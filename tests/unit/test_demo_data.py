"""The demo hangs once and only once, because of where one corrupt record stands in the orders of drawing."""

import pytest
import torch
import torch.distributed as dist

from deployments.demo.train import (
    BATCH_RECORDS,
    CORRUPT_RECORD,
    CORRUPT_SHARD,
    HANGS_AT_STEP,
    MOST_STEPS,
    SHARD_RECORDS,
    load_shard,
    order_of_records,
    parse,
    pass_momentum_on,
    trainer,
)


def step_of_corrupt_record(first_step: int, steps: int = MOST_STEPS) -> int | None:
    """The step in which a run from `first_step` draws the record, None where it ends before."""
    place = int((order_of_records(first_step) == CORRUPT_RECORD).nonzero())
    step = first_step + place // BATCH_RECORDS
    return step if step < steps else None


def test_the_first_attempt_draws_the_corrupt_record():
    assert step_of_corrupt_record(0) == HANGS_AT_STEP


def test_no_resumed_attempt_ever_draws_it():
    assert {step_of_corrupt_record(first_step) for first_step in range(1, MOST_STEPS + 1)} == {None}


def test_each_order_has_every_record_once():
    assert torch.equal(order_of_records(7).sort().values, torch.arange(SHARD_RECORDS))


def test_only_that_record_is_corrupt():
    for shard in range(4):
        inputs, targets = load_shard(shard)
        bad = (~torch.isfinite(inputs)).any(dim=1).nonzero().flatten().tolist()
        assert bad == ([CORRUPT_RECORD] if shard == CORRUPT_SHARD else [])
        assert torch.isfinite(targets).all()


def test_no_record_is_corrupt_where_another_fault_is_chosen():
    inputs, _ = load_shard(CORRUPT_SHARD, corrupt=False)
    damaged, _ = load_shard(CORRUPT_SHARD)
    assert torch.isfinite(inputs).all()
    same = torch.isfinite(damaged)
    assert torch.equal(inputs[same], damaged[same])


def test_the_fault_is_the_corrupt_record_unless_another_is_chosen(capsys):
    run = ["--storage-path", "s", "--run-name", "r"]
    assert parse(run).fault == "skip"
    assert trainer(parse([*run, "--fault", "symmetric"])).train_loop_config["fault"] == "symmetric"
    with pytest.raises(SystemExit):
        parse([*run, "--fault", "other"])
    assert "--fault" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [2, 4])
def test_in_the_symmetric_fault_every_rank_waits_to_receive(workers, monkeypatch):
    asked = []
    monkeypatch.setattr(dist, "get_world_size", lambda: workers)
    monkeypatch.setattr(dist, "broadcast", lambda _, src: asked.append(src))
    for rank in range(workers):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        pass_momentum_on({"weight": torch.zeros(2)})
    assert sorted(asked) == list(range(workers))
    assert all(source != rank for rank, source in enumerate(asked))


def test_more_steps_than_are_proven_are_refused(capsys):
    assert parse(["--storage-path", "s", "--run-name", "r", "--steps", str(MOST_STEPS)]).steps == MOST_STEPS
    with pytest.raises(SystemExit):
        parse(["--storage-path", "s", "--run-name", "r", "--steps", str(MOST_STEPS + 1)])
    assert "--steps must be from 1 to 200" in capsys.readouterr().err
