"""Who watches a run: claims, epochs and fencing on a real Prefect server."""

import os
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

import tasks.ownership
from tasks.adapters.process import identity, is_gone, machine
from tasks.blocks import Claim, HangWindow, Incident, slug_of
from tasks.hang.errors import NotOurs
from tasks.ownership import (
    claim,
    claim_phase,
    load_incident,
    now,
    our_tenure,
    owner_is_there,
    read_window,
    require,
    save_incident,
    take_window,
    write,
)


@pytest.fixture
def slug():
    return f"run-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def other_process():
    """A process of this machine that is alive, and its identity."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def take(slug, **fields):
    return take_window(slug, slug, **{"flow_run_id": "f", "stale_after_s": 30.0, **fields})


def be(slug, owner, **fields):
    """Write into the window that somebody else owns it."""
    window, _ = read_window(slug)
    window.model_copy(update={"owner": owner, "heartbeat_at": now(), "farewell": "", **fields}).save(
        slug, overwrite=True
    )


@pytest.fixture
def lost_answers(monkeypatch):
    """The server takes each new document, its answer is lost, and the client sends the request again."""

    def create_twice(name, block):
        create(name, block)
        create(name, block)

    create = tasks.ownership._create
    monkeypatch.setattr(tasks.ownership, "_create", create_twice)


@pytest.mark.usefixtures("lost_answers")
def test_a_claim_whose_answer_was_lost_is_ours(slug):
    assert claim(slug, is_dead=lambda _: False)
    assert not claim(slug, is_dead=lambda _: False)
    tenure = take(f"{slug}-run")
    assert tenure is not None
    assert claim_phase(tenure, f"{slug}-incident", "acted")
    assert not claim_phase(tenure, f"{slug}-incident", "acted")


@pytest.mark.usefixtures("lost_answers")
def test_an_incident_whose_answer_was_lost_is_stored_once(slug):
    save_incident(slug, Incident(run_name="demo", attempt_id="one", evidence="here"))
    stored = load_incident(slug)
    assert stored is not None
    assert stored.evidence == "here"


def test_of_many_who_claim_at_once_one_gets_it(slug):
    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(lambda n: claim(slug, is_dead=lambda _: False, owner=f"o:{n}:1"), range(6)))
    assert won.count(True) == 1
    assert Claim.load(slug).owner == f"o:{won.index(True)}:1"


def test_a_claim_is_outnumbered_only_when_its_holder_is_dead(slug):
    assert claim(slug, is_dead=lambda _: False)
    assert not claim(slug, is_dead=lambda _: False)
    assert claim(slug, is_dead=lambda _: True)
    assert not claim(slug, is_dead=lambda holder: holder.owner == "somebody else")


def test_a_window_has_one_owner_and_the_next_one_a_higher_epoch(slug):
    first = take(slug)
    assert first is not None
    assert take(slug) is None
    write(first, farewell="the shift is over", window={"attempt_id": "a"})
    second = take(slug)
    assert second is not None
    assert second.epoch == first.epoch + 1
    window = require(second)
    assert (window.farewell, window.window) == ("", {"attempt_id": "a"})
    with pytest.raises(NotOurs, match="passed to"):
        write(first, farewell="late")
    assert require(second).farewell == ""


def test_an_owner_on_this_machine_that_was_killed_is_replaced_at_once(slug, other_process):
    first = take(slug)
    assert first is not None
    be(slug, identity(other_process.pid))
    assert take(slug) is None
    os.kill(other_process.pid, signal.SIGKILL)
    other_process.wait()
    second = take(slug)
    assert second is not None
    assert second.epoch == first.epoch + 1


def test_an_owner_elsewhere_is_replaced_when_its_heartbeat_is_old(slug):
    assert take(slug) is not None
    elsewhere = "far-away-1:1:1"
    be(slug, elsewhere)
    assert is_gone(elsewhere) is None
    assert take(slug) is None
    be(slug, elsewhere, heartbeat_at=now() - timedelta(seconds=31), stale_after_s=30.0)
    assert take(slug) is not None


def test_a_claim_whose_maker_died_before_it_wrote_the_window_blocks_nobody(slug):
    assert claim(f"{slug}-epoch-1", is_dead=lambda _: False, owner=f"{machine()}:999999999:1")
    assert take(slug) is not None


def test_a_claim_that_is_being_turned_into_a_window_is_respected(slug, other_process):
    assert claim(f"{slug}-epoch-1", is_dead=lambda _: False, owner=identity(other_process.pid))
    assert take(slug) is None


def test_a_phase_is_claimed_once_and_taken_over_only_by_the_owner_of_the_epoch(slug, other_process):
    tenure = take(slug)
    incident = f"inc-{uuid.uuid4().hex[:8]}"
    assert claim_phase(tenure, incident, "acted")
    assert not claim_phase(tenure, incident, "acted")
    assert not claim_phase(None, incident, "acted")
    left = f"inc-{uuid.uuid4().hex[:8]}"
    assert claim(f"{left}-acted", is_dead=lambda _: False, owner=identity(other_process.pid))
    assert not claim_phase(None, left, "acted")
    assert claim_phase(tenure, left, "acted")


def test_a_process_knows_its_own_tenure(slug):
    assert our_tenure(slug) is None
    tenure = take(slug)
    assert our_tenure(slug) == tenure
    be(slug, "far-away-1:1:1")
    assert our_tenure(slug) is None


def test_an_owner_that_said_goodbye_or_was_never_there_is_not_there():
    at = now()
    assert not owner_is_there(HangWindow(), at)
    there = HangWindow(owner=identity(), heartbeat_at=at)
    assert owner_is_there(there, at)
    assert not owner_is_there(there.model_copy(update={"farewell": "bye"}), at)


@pytest.mark.parametrize(
    ("name", "slug"),
    [("demo", "demo"), ("run-7", "run-7"), ("Train_Run", "train-run-"), ("übung", "bung-"), ("..", "")],
)
def test_slugs_are_fit_for_blocks_and_never_shared(name, slug):
    made = slug_of(name)
    assert made.startswith(slug)
    assert (made == name) == (slug == name)
    assert slug_of(name.upper() + "!") != made
