"""The meshes of an attempt: who has to be asked to see all of it.

RAS connects processes that were initialised together. A job whose groups never were, say tensor-parallel
groups with nothing but Gloo between them, is several meshes, and each answers for itself alone.
"""

import time
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from tasks.hang.presence import Mark, Roster
from tasks.hang.run import Attempt, Node

_COMPARE_EVERY_POLLS = 20
_TRIES = 2  # the kernel picks among the processes that share a port: the first may be of a mesh we know


class Answer(Struct, frozen=True):
    """A report as received, and who gave it."""

    node: Node
    raw: bytes
    mark: Mark


Ask = Callable[[Node], Answer | None]


class Turn:
    """What one poll may still ask, besides its first question.

    Args:
        until: On the monotonic clock; no question begins after it.
        extra: So many questions.
    """

    def __init__(self, until: float, extra: int) -> None:
        self._until = until
        self._extra = extra

    @property
    def in_time(self) -> bool:
        """Whether a question may begin."""
        return time.monotonic() <= self._until

    def take(self) -> bool:
        """Use up one question; False where there is none left."""
        if not self._extra or not self.in_time:
            return False
        self._extra -= 1
        return True


class Meshes:
    """Compares what was seen with the ranks of one attempt.

    That scans the reports, so it is done at the first poll, when a mesh has changed or does not answer, and
    every 20th poll. In between a mesh is known by its mark, and asked at the node that showed it.

    Args:
        attempt: Whose meshes.
        most_extra: So many meshes are followed besides the first.
    """

    def __init__(self, attempt: Attempt, most_extra: int) -> None:
        self.roster = Roster(attempt.ranks)
        self.visible: tuple[int, int] | None = None
        self._attempt = attempt
        self._most_extra = most_extra
        self._known: dict[Mark, Node] = {}
        self._tries: Counter[Node] = Counter()
        self._polls_left = 0
        self._unfinished = False

    def are_of(self, attempt: Attempt) -> bool:
        """Whether these are the meshes of that attempt and its ranks."""
        return (self._attempt.attempt_id, self._attempt.ranks) == (attempt.attempt_id, attempt.ranks)

    def complete(self, first: Answer, ask: Ask, turn: Turn) -> list[Answer]:
        """Add the answers of the other meshes to a first one.

        Args:
            first: What the poll begins with.
            ask: Asks a node; None where there is no answer.
            turn: Bounds the questions.

        Returns:
            One answer for each mesh; only the first where no communicator exists yet.
        """
        answers = [first]
        if not self._unfinished:
            self._tries.clear()
        as_known = first.mark in self._known and self._ask_known(answers, ask, turn)
        self._polls_left -= 1
        if as_known and self._polls_left >= 0:
            return answers
        return self._compare(answers, ask, turn)

    def _ask_known(self, answers: list[Answer], ask: Ask, turn: Turn) -> bool:
        """Ask the meshes of the last comparison; says whether all answered and none has changed."""
        waiting = {mark: node for mark, node in self._known.items() if mark != answers[0].mark}
        for mark, node in list(waiting.items()):
            for _ in range(_TRIES):
                if mark not in waiting:
                    break
                if not turn.take():
                    return False
                answer = ask(node)
                if answer is None:
                    self._tries[node] += 1  # the other nodes of its mesh first
                    return False
                if any(answer.mark == other.mark for other in answers):
                    continue
                answers.append(answer)
                if waiting.pop(answer.mark, None) is None:
                    return False
        return not waiting

    def _compare(self, answers: list[Answer], ask: Ask, turn: Turn) -> list[Answer]:
        """Keep each answer that shows ranks which none before it shows; ask for the ranks still unseen."""
        seen: set[int] = set()
        kept = [answer for answer in answers if self._adds(answer, seen)]
        while seen and len(kept) <= self._most_extra:
            node = self._next_node(seen)
            if node is None or not turn.take():
                break
            self._tries[node] += 1
            answer = ask(node)
            if answer is not None and self._adds(answer, seen):
                kept.append(answer)
                self._tries[node] = 0
        kept = kept or answers[:1]
        self._known = {answer.mark: answer.node for answer in kept}
        self.visible = (len(seen), len(self._attempt.ranks)) if seen else None
        room = bool(seen) and len(kept) <= self._most_extra
        self._unfinished = room and self._next_node(seen) is not None
        self._polls_left = 0 if self._unfinished else _COMPARE_EVERY_POLLS - 1
        return kept

    def _adds(self, answer: Answer, seen: set[int]) -> bool:
        """Take what an answer shows into `seen`; says whether any of it is new."""
        before = len(seen)
        seen |= self.roster.seen(answer.raw)
        return len(seen) > before

    def _next_node(self, seen: set[int]) -> Node | None:
        """Of the nodes with ranks that nobody showed, the one asked least; None where it was enough."""
        unseen = dict.fromkeys(r.node for r in self._attempt.ranks if r.world_rank not in seen)
        worth = [node for node in unseen if self._tries[node] < _TRIES]
        return min(worth, key=self._tries.__getitem__, default=None)
