"""One poll of a small job, from bytes to events (`pytest tests/bench/test_detect.py`).

Larger jobs, Ray's detector beside it, memory and history: `python -m tests.bench.detect_cost`.
"""

import json

import pytest

from deployments.demo.ras_report import RasSnapshot, render_json
from tasks.hang.states import Frozen, Progressing
from tests.bench.detect_cost import BEFORE_EACH, CASES, cpu_s, ours, rays, reports
from tests.bench.ras_documents import document, groups, parallel

SMALL = groups(512, 20, 64)
AFTERWARDS = {"healthy": Progressing, "frozen": Frozen, "worst": Frozen, "first": Frozen}


@pytest.mark.parametrize("case", CASES)
def test_a_poll(benchmark, tmp_path, case):
    work = ours(reports(SMALL, case, tmp_path))
    window, events = benchmark.pedantic(work, setup=BEFORE_EACH[case], rounds=100)
    assert {type(state) for state in window.communicators.values()} == {AFTERWARDS[case]}
    assert len(window.communicators) == 20
    assert events == ()


LESS = {"healthy": 5, "frozen": 5, "worst": 2, "first": 1.2}


# Far below what is measured on a quiet machine: what breaks this is no noise.
@pytest.mark.parametrize(
    ("case", "times_less"), [("healthy", 5), ("frozen", 5), ("worst", 2), ("first", 1.2)]
)
def test_a_poll_takes_less_than_with_ray(tmp_path, case, times_less):
    files = reports(SMALL, case, tmp_path)
    ours_s, rays_s = cpu_s(ours(files), rays(files), runs=10, before_each=BEFORE_EACH[case])
    assert ours_s < rays_s / times_less


@pytest.mark.parametrize("shape", [SMALL, parallel(64, 8, 8)], ids=lambda shape: shape.name)
@pytest.mark.parametrize("behind", [False, True])
def test_the_documents_are_laid_out_as_the_stand_in_does_which_is_checked_against_nccl(shape, behind):
    raw = document(shape, 61, behind=behind)
    told = json.loads(raw)
    again = render_json(RasSnapshot.from_json(told))
    assert again.replace(json.loads(again)["timestamp"].encode(), told["timestamp"].encode()) == raw
    assert raw.count(b'"rank": ') == shape.entries
    assert len(shape.communicators) == told["communicators_count"]
    launches = [
        {rank["collective_counts"]["AllReduce"] for rank in c["ranks"]} for c in told["communicators"]
    ]
    assert all(len(each) == 1 + behind for each in launches)


def test_each_rank_of_a_parallel_job_is_in_one_group_of_each_kind():
    _, *parts = parallel(1024, 8, 64).communicators
    tensors, datas = parts[: 1024 // 8], parts[1024 // 8 :]
    assert sorted(rank for group in tensors for rank in group) == list(range(1024))
    assert sorted(rank for group in datas for rank in group) == list(range(1024))
    assert {len(group) for group in datas} == {64}
