"""Calls that never come back: what their caller sees, and that they do not pile up."""

import threading

import pytest

from tasks.adapters.deadline import Patience
from tasks.hang.errors import ClusterUnreachable


def test_an_answer_and_an_error_pass_through():
    patience = Patience()
    assert patience.within(60, lambda: 7, "sums") == 7
    with pytest.raises(ZeroDivisionError):
        patience.within(60, lambda: 1 // 0, "sums")


def test_a_timeout_of_the_call_itself_keeps_its_words():
    def call():
        raise TimeoutError("the node is slow")

    patience = Patience()
    with pytest.raises(TimeoutError, match="the node is slow"):
        patience.within(60, call, "node")
    assert patience.within(60, lambda: 7, "sums") == 7


def test_while_a_call_is_late_no_other_one_is_made():
    patience, back, calls = Patience(), threading.Event(), []

    def stuck():
        calls.append(threading.current_thread())
        back.wait(60)

    with pytest.raises(ClusterUnreachable, match=r"within 0\.05 s \(key-value store\)"):
        patience.within(0.05, stuck, "key-value store")
    for _ in range(3):
        with pytest.raises(ClusterUnreachable, match="still not answered"):
            patience.within(60, stuck, "key-value store")
    assert len(calls) == 1
    assert calls[0].daemon
    back.set()
    calls[0].join(60)
    assert patience.within(60, lambda: 7, "key-value store") == 7


def test_calls_side_by_side_do_not_hinder_each_other():
    patience, both = Patience(), threading.Barrier(2)
    answers = []

    def ask():
        answers.append(patience.within(60, lambda: both.wait(60) >= 0, "two at once"))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [True, True]
