"""What RAS answers is not always about our job, about all of it, or true: over the real protocol."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from deployments.demo.ras_report import render_json
from deployments.demo.ras_server import RasCommunicator, RasMissingRank, RasRank, RasServer, RasSnapshot
from tasks.adapters.local_node import LocalNode
from tasks.adapters.ras import NodeRas
from tasks.hang.errors import NodeError, RasError, RasWrongJob
from tasks.hang.run import Attempt, Node, Rank
from tests.ras_jobs import DATA, THEIRS, job

Process = tuple[str, int]
FIRST_PID = 5_000_001


def processes(nodes: int, on_each: int = 2) -> list[Process]:
    return [(f"10.0.0.{n + 1}", FIRST_PID + n * 100 + i) for n in range(nodes) for i in range(on_each)]


def attempt(members: Sequence[Process], attempt_id: str = "one", *, known_as: str = "{}") -> Attempt:
    """The run of these processes; `known_as` is how Ray writes the address of a host."""
    ranks = tuple(
        Rank(world_rank=i, pid=pid, node=Node(known_as.format(host))) for i, (host, pid) in enumerate(members)
    )
    return Attempt(run_name="run", run_id="r1", attempt_id=attempt_id, ranks=ranks)


def communicator(
    members: Iterable[Process], *, lost: Iterable[Process] = (), number: int = 1, count: int = 7
) -> RasCommunicator:
    everyone = [(p, True) for p in members] + [(p, False) for p in lost]
    everyone.sort()
    ranks = [
        RasRank(rank=i, host=host, pid=pid, counts={"AllReduce": count})
        for i, ((host, pid), present) in enumerate(everyone)
        if present
    ]
    missing = [
        RasMissingRank(rank=i, host=host, pid=pid, considered_dead=True)
        for i, ((host, pid), present) in enumerate(everyone)
        if not present
    ]
    return RasCommunicator(
        hash=f"0x{number:x}", secondary_hash="0xa1:0xb2", size=len(everyone), ranks=ranks, missing=missing
    )


def shown(*communicators: RasCommunicator) -> RasSnapshot:
    return RasSnapshot(communicators=list(communicators))


def pids_of(raws: Iterable[bytes]) -> list[list[int]]:
    """The pids that each report shows as present."""
    return [
        sorted({rank["pid"] for made in json.loads(raw)["communicators"] for rank in made["ranks"]})
        for raw in raws
    ]


class Cluster:
    """Nodes with a real RAS server each. What a node shows can be changed; several answers are given in turn,
    the last one for ever, as a kernel that picks among processes would.
    """

    def __init__(self, shows: Mapping[str, RasSnapshot | Sequence[RasSnapshot]]) -> None:
        self.shows: dict[str, list[RasSnapshot]] = {}
        self.asked: list[str] = []
        self.gone: set[str] = set()
        self.dies_after = 1_000
        self.addresses: dict[str, str] = {}
        for ip, what in shows.items():
            self.show(ip, *([what] if isinstance(what, RasSnapshot) else what))

    def show(self, ip: str, *answers: RasSnapshot) -> None:
        self.shows[ip] = list(answers)

    def call(self, node: Node, request: dict[str, Any], *, deadline_s: float) -> dict[str, Any]:
        self.asked.append(node.ip)
        if node.ip in self.gone or len(self.asked) > self.dies_after:
            raise NodeError(f"Node {node.ip} is gone.")
        request = {**request, "addr": self.addresses[node.ip]}
        return LocalNode().call(node, request, deadline_s=deadline_s)

    def told(self) -> list[str]:
        """Who was asked since the last time."""
        asked, self.asked = self.asked, []
        return asked

    def source(self, **options: Any) -> NodeRas:
        return NodeRas(self, **{"collect_timeout_s": 1, "deadline_s": 30.0, **options})

    def _next(self, ip: str) -> RasSnapshot:
        answers = self.shows[ip]
        return answers.pop(0) if len(answers) > 1 else answers[0]


@contextmanager
def cluster(shows: Mapping[str, RasSnapshot | Sequence[RasSnapshot]]) -> Iterator[Cluster]:
    made = Cluster(shows)
    with ExitStack() as stack:
        for ip in shows:
            server = stack.enter_context(RasServer(_of(made, ip)))
            made.addresses[ip] = server.addr
        yield made


def _of(made: Cluster, ip: str) -> Callable[[], RasSnapshot]:
    return lambda: made._next(ip)


# ---- a part of the job --------------------------------------------------------------------------------


def test_one_mesh_is_one_question():
    everyone = processes(3)
    whole = shown(communicator(everyone))
    with cluster(dict.fromkeys(("10.0.0.1", "10.0.0.2", "10.0.0.3"), whole)) as nodes:
        source = nodes.source()
        for _ in range(3):
            assert len(source.status(attempt(everyone))) == 1
        assert nodes.told() == ["10.0.0.1"] * 3
        assert source.visible(attempt(everyone)) == (6, 6)


def test_a_member_that_is_missing_is_seen():
    """Its node is dead: there is nobody to ask, and nothing that the report does not show."""
    everyone = processes(2)
    with cluster({"10.0.0.1": shown(communicator(everyone[:2], lost=everyone[2:]))}) as nodes:
        source = nodes.source()
        source.status(attempt(everyone))
        assert source.visible(attempt(everyone)) == (4, 4)
        assert set(nodes.told()) == {"10.0.0.1"}


def meshes(count: int) -> tuple[list[Process], dict[str, RasSnapshot]]:
    """A job whose nodes were never initialised together."""
    everyone = processes(count)
    parts = {
        f"10.0.0.{n + 1}": shown(communicator(everyone[2 * n : 2 * n + 2], number=n + 1))
        for n in range(count)
    }
    return everyone, parts


def test_the_other_meshes_are_asked_for_and_known_from_then_on():
    everyone, parts = meshes(3)
    with cluster(parts) as nodes:
        source = nodes.source()
        for _ in range(30):  # beyond the next comparison
            answers = source.status(attempt(everyone))
            assert pids_of(answers) == [[pid for _, pid in everyone[i : i + 2]] for i in (0, 2, 4)]
            assert nodes.told() == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
        assert source.visible(attempt(everyone)) == (6, 6)


def test_what_the_bound_leaves_out_is_told():
    everyone, parts = meshes(5)
    with cluster(parts) as nodes:
        source = nodes.source(max_nodes=2)
        for _ in range(3):
            assert len(source.status(attempt(everyone))) == 3
            assert nodes.told() == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
        assert source.visible(attempt(everyone)) == (6, 10)


def test_nodes_that_cannot_show_more_are_asked_twice_and_then_left_alone():
    """Ranks without a communicator, say: of a rollout group that uses no NCCL."""
    everyone = processes(2)
    part = shown(communicator(everyone[:2]))
    with cluster({"10.0.0.1": part, "10.0.0.2": shown()}) as nodes:
        source = nodes.source()
        for _ in range(20):
            assert len(source.status(attempt(everyone))) == 1
        assert nodes.told() == ["10.0.0.1", "10.0.0.2", "10.0.0.2"] + ["10.0.0.1"] * 19
        assert source.visible(attempt(everyone)) == (2, 4)
        source.status(attempt(everyone))
        assert nodes.told() == ["10.0.0.1", "10.0.0.2", "10.0.0.2"]


def test_a_communicator_more_is_a_reason_to_look_again():
    everyone = processes(2)
    part = communicator(everyone[:2])
    with cluster({"10.0.0.1": shown(part), "10.0.0.2": shown()}) as nodes:
        source = nodes.source()
        source.status(attempt(everyone))
        nodes.told()
        nodes.show("10.0.0.2", shown(communicator(everyone[2:], number=9)))
        source.status(attempt(everyone))
        assert nodes.told() == ["10.0.0.1"]  # nobody said that anything is new
        nodes.show("10.0.0.1", shown(part, communicator(everyone[:2], number=2)))
        assert len(source.status(attempt(everyone))) == 2
        assert source.visible(attempt(everyone)) == (4, 4)


def test_a_mesh_whose_node_dies_is_looked_for_at_its_other_nodes():
    everyone = processes(3)
    one, other = shown(communicator(everyone[:2])), shown(communicator(everyone[2:], number=2))
    with cluster({"10.0.0.1": one, "10.0.0.2": other, "10.0.0.3": other}) as nodes:
        source = nodes.source()
        source.status(attempt(everyone))
        assert nodes.told() == ["10.0.0.1", "10.0.0.2"]
        nodes.gone = {"10.0.0.2"}
        assert len(source.status(attempt(everyone))) == 2
        assert nodes.told() == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
        assert len(source.status(attempt(everyone))) == 2
        assert nodes.told() == ["10.0.0.1", "10.0.0.3"]
        nodes.gone = {"10.0.0.2", "10.0.0.3"}
        assert len(source.status(attempt(everyone))) == 1
        assert source.visible(attempt(everyone)) == (2, 6)


def test_the_first_mesh_may_be_the_one_that_is_lost():
    everyone, parts = meshes(2)
    with cluster(parts) as nodes:
        source = nodes.source()
        source.status(attempt(everyone))
        nodes.gone = {"10.0.0.1"}
        assert pids_of(source.status(attempt(everyone))) == [[pid for _, pid in everyone[2:]]]
        assert source.visible(attempt(everyone)) == (2, 4)
        nodes.gone = set()
        nodes.show("10.0.0.2", shown(*parts["10.0.0.2"].communicators, communicator(everyone[2:], number=7)))
        assert len(source.status(attempt(everyone))) == 2


def test_two_meshes_on_one_node_take_turns_at_its_port():
    everyone = processes(1, on_each=4)
    one, other = shown(communicator(everyone[:2])), shown(communicator(everyone[2:], number=2))
    with cluster({"10.0.0.1": [one, one, other]}) as nodes:
        source = nodes.source()
        assert len(source.status(attempt(everyone))) == 2
        assert nodes.told() == ["10.0.0.1"] * 3
        nodes.show("10.0.0.1", other, other, one)
        assert len(source.status(attempt(everyone))) == 2
        assert nodes.told() == ["10.0.0.1"] * 3
        assert source.visible(attempt(everyone)) == (4, 4)


def test_before_the_first_communicator_nothing_is_partial():
    everyone = processes(3)
    with cluster(dict.fromkeys(("10.0.0.1", "10.0.0.2", "10.0.0.3"), shown())) as nodes:
        source = nodes.source()
        for _ in range(2):
            assert len(source.status(attempt(everyone))) == 1
        assert nodes.told() == ["10.0.0.1", "10.0.0.1"]
        assert source.visible(attempt(everyone)) is None
        nodes.show("10.0.0.1", shown(communicator(everyone)))
        source.status(attempt(everyone))
        assert source.visible(attempt(everyone)) == (6, 6)


def test_a_new_attempt_is_compared_anew():
    everyone = processes(2)
    with cluster({"10.0.0.1": shown(communicator(everyone))}) as nodes:
        source = nodes.source()
        source.status(attempt(everyone))
        assert source.visible(attempt(everyone, "two")) is None
        source.status(attempt(everyone, "two"))
        assert source.visible(attempt(everyone, "two")) == (4, 4)


def test_no_further_question_when_the_time_is_over():
    everyone, parts = meshes(3)
    with cluster(parts) as nodes:
        source = nodes.source()
        source._deadline_s = 0.0  # of the poll; each question keeps its own
        assert len(source.status(attempt(everyone))) == 1
        assert nodes.told() == ["10.0.0.1"]
        assert source.visible(attempt(everyone)) == (2, 6)


# ---- another job --------------------------------------------------------------------------------------


def test_the_same_pids_in_containers_of_another_job():
    """Each container numbers its processes from 1; only the address tells them apart."""
    ours = [("10.0.0.1", 41), ("10.0.0.2", 42)]
    theirs = shown(communicator([("10.0.0.1", 42), ("10.0.0.2", 41)]))
    with cluster({"10.0.0.1": theirs, "10.0.0.2": [theirs, shown(communicator(ours))]}) as nodes:
        source = nodes.source()
        assert pids_of(source.status(attempt(ours))) == [[41, 42]]
        assert nodes.told() == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]
        assert source.visible(attempt(ours)) == (2, 2)


def test_a_host_that_ray_knows_by_another_address():
    """RAS prints the address of the interface that NCCL uses."""
    everyone = processes(2)
    ray_knows = attempt(everyone, known_as="192.168.{}")
    with cluster(
        dict.fromkeys((node.ip for node in ray_knows.nodes), shown(communicator(everyone)))
    ) as nodes:
        source = nodes.source()
        assert len(source.status(ray_knows)) == 1
        assert source.visible(ray_knows) == (4, 4)


def test_another_job_on_the_port_of_every_node_asked():
    everyone = processes(5)
    with cluster(dict.fromkeys((f"10.0.0.{n}" for n in range(1, 6)), job(THEIRS))) as nodes:
        source = nodes.source()
        with pytest.raises(RasWrongJob, match="none of the processes"):
            source.status(attempt(everyone))
        assert nodes.told() == [f"10.0.0.{n}" for n in (1, 1, 2, 2, 3, 3)]
        nodes.show("10.0.0.5", shown(communicator(everyone)))
        source.status(attempt(everyone))
        assert nodes.told() == [f"10.0.0.{n}" for n in (4, 4, 5)]  # the next poll goes on


def test_another_job_in_the_place_of_a_second_mesh_is_no_answer():
    everyone, parts = meshes(2)
    with cluster({**parts, "10.0.0.2": job(THEIRS)}) as nodes:
        source = nodes.source()
        assert pids_of(source.status(attempt(everyone))) == [[pid for _, pid in everyone[:2]]]
        assert source.visible(attempt(everyone)) == (2, 4)


# ---- the island ---------------------------------------------------------------------------------------


def recorded() -> tuple[Attempt, RasSnapshot, RasSnapshot]:
    """A job of which one process was stopped for over a minute: as all others see it, recorded, and as the
    process itself sees it when it is resumed: everybody else is dead.
    """
    document = json.loads((DATA / "v2.30.7" / "stopped_proc_considered_dead_n8.json").read_bytes())
    truth = RasSnapshot.from_json(document)
    members: set[Process] = set()
    islands = []
    for made in truth.communicators:
        everyone = {(place.host, place.pid) for place in (*made.ranks, *made.missing)}
        stopped = {(place.host, place.pid) for place in made.missing}
        members |= everyone
        islands.append(communicator(stopped, lost=everyone - stopped, number=int(made.hash, 16)))
    return attempt(sorted(members)), truth, shown(*islands)


def test_an_island_is_not_believed_while_another_process_answers():
    run, truth, island = recorded()
    with cluster({node.ip: truth for node in run.nodes}) as nodes:
        nodes.show(run.nodes[0].ip, island, truth)
        source = nodes.source()
        assert source.status(run) == (render(truth),)
        assert nodes.told() == [run.nodes[0].ip] * 2


def test_a_node_that_is_all_island_is_left_for_the_next():
    run, truth, island = recorded()
    first, second = run.nodes[0].ip, run.nodes[1].ip
    with cluster({**{node.ip: truth for node in run.nodes}, first: island}) as nodes:
        source = nodes.source()
        for _ in range(2):
            assert source.status(run) == (render(truth),)
        assert nodes.told() == [first, first, second, second]


def test_of_answers_that_all_miss_most_the_best_counts():
    """Most of the job is lost indeed: no question more than three, and an error is no better answer."""
    everyone = processes(4)
    worst, best = (shown(communicator(everyone[:n], lost=everyone[n:])) for n in (1, 3))
    with cluster({f"10.0.0.{n}": worst for n in range(1, 5)}) as nodes:
        nodes.show("10.0.0.1", worst, best)
        source = nodes.source()
        assert source.status(attempt(everyone)) == (render(best),)
        assert nodes.told() == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]
        nodes.gone = {"10.0.0.2"}
        assert source.status(attempt(everyone)) == (render(best),)
        assert nodes.told() == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]


def test_half_of_a_job_may_be_lost_without_a_second_question():
    everyone = processes(2)
    with cluster({"10.0.0.1": shown(communicator(everyone[:2], lost=everyone[2:]))}) as nodes:
        nodes.source().status(attempt(everyone))
        assert nodes.told() == ["10.0.0.1"]


def test_a_process_without_communicators_is_no_better_than_an_island():
    everyone = processes(2)
    lost = shown(communicator(everyone[:1], lost=everyone[1:]))
    with cluster({"10.0.0.1": [lost, shown()], "10.0.0.2": shown()}) as nodes:
        assert nodes.source().status(attempt(everyone)) == (render(lost),)


def test_an_answer_that_fails_the_second_time_is_still_an_answer():
    everyone = processes(2)
    lost = shown(communicator(everyone[:1], lost=everyone[1:]))
    with cluster({"10.0.0.1": lost, "10.0.0.2": job(THEIRS)}) as nodes:
        source = nodes.source()
        nodes.dies_after = 1
        assert source.status(attempt(everyone)) == (render(lost),)
        assert nodes.told() == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]


def render(taken: RasSnapshot) -> bytes:
    """What the server sends of a snapshot; its clock does not count."""
    return Timeless(render_json(taken))


class Timeless(bytes):
    """Equal to a report of the same content at another time."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, bytes) and _content(self) == _content(other)

    def __hash__(self) -> int:
        return hash(json.dumps(_content(self)))


def _content(raw: bytes) -> Any:
    return {key: value for key, value in json.loads(raw).items() if key != "timestamp"}


def test_the_error_of_the_first_question_is_the_error():
    everyone = processes(2)
    with cluster({}) as nodes:
        nodes.gone = {"10.0.0.1", "10.0.0.2"}
        with pytest.raises(RasError, match=r"10\.0\.0\.2 is gone"):
            nodes.source().status(attempt(everyone))
        assert nodes.source().visible(attempt(everyone)) is None
