"""The launcher: results by rank, failures with their ranks, deadlines, and workers that are replaced."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import moecomm
from moecomm.errors import TransportUnavailable
from moecomm.testing import DeadlineExceeded, RankDied, RankFailure, launch, process_pool

BACKENDS = ["threads", "stepped", "processes"]


def rank_and_size(group, offset):
    return group.rank + offset, group.size


def gathered(group):
    first = group.all_gather(("from", group.rank))
    second = group.all_gather(group.rank * 10)
    return first, second


def fail_on(group, rank):
    if group.rank == rank:
        raise ValueError(f"no good on {group.rank}")
    return group.rank


def fail_while_others_wait(group):
    if group.rank == 1:
        raise TransportUnavailable("ucx", "it is not there.", "Install it.")
    return group.all_gather(group.rank)


def sleep_on(group, rank):
    if group.rank == rank:
        time.sleep(600)
    return group.rank


def die(group, how):
    if group.rank == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def pid(group):
    return os.getpid()


def sum_by_gloo(group):
    value = torch.tensor([group.rank + 1.0])
    dist.all_reduce(value, group=group.process_group)
    return value, torch.get_num_threads()


def environment(group):
    return os.environ.get("MOECOMM_TEST_LAUNCH")


def unpicklable(group):
    return lambda: None


def warn(group):
    import warnings

    warnings.warn("this must be an error", UserWarning, stacklevel=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_results_come_by_rank(backend, num_ranks):
    results = launch(rank_and_size, num_ranks, 5, backend=backend)
    assert results == [(rank + 5, num_ranks) for rank in range(num_ranks)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_can_gather(backend):
    results = launch(gathered, 3, backend=backend)
    assert results == [([("from", 0), ("from", 1), ("from", 2)], [0, 10, 20])] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failing_rank_is_named_with_its_traceback(backend):
    with pytest.raises(RankFailure, match="rank 1 failed: ValueError: no good on 1") as caught:
        launch(fail_on, 3, 1, backend=backend)
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, ValueError)
    assert caught.value.__cause__ is caught.value.error
    assert "in fail_on" in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_to_fail_is_named_first_and_the_others_after_it(backend):
    with pytest.raises(RankFailure) as caught:
        launch(fail_while_others_wait, 3, backend=backend, timeout=10)
    failure = caught.value
    assert failure.rank == 1
    assert isinstance(failure.error, TransportUnavailable)
    assert failure.error.remedy == "Install it."
    assert set(failure.failures) == {0, 1, 2}
    assert "rank 0 failed too: " in str(failure)
    assert "rank 2 failed too: " in str(failure)


@pytest.mark.parametrize("backend", BACKENDS)
def test_failures_can_be_returned(backend):
    results = launch(fail_on, 3, 2, backend=backend, return_exceptions=True)
    assert results[:2] == [0, 1]
    assert isinstance(results[2], ValueError)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_the_deadline_names_the_late_ranks_and_where_they_are(backend):
    launch(pid, 3, backend="processes")  # warm, so that only the call is timed
    before = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"ranks \[1\] did not finish within 0.5 s") as caught:
        launch(sleep_on, 3, 1, backend=backend, timeout=0.5)
    assert time.monotonic() - before < 10
    assert caught.value.ranks == (1,)
    assert "sleep_on" in caught.value.stacks[1]


def test_an_overdue_worker_is_killed_and_replaced():
    before = launch(pid, 3, backend="processes")
    results = launch(sleep_on, 3, 1, backend="processes", timeout=0.5, return_exceptions=True)
    assert isinstance(results[1], DeadlineExceeded)
    assert (results[0], results[2]) == (0, 2)
    after = launch(pid, 3, backend="processes")
    assert (before[0], before[2]) == (after[0], after[2])
    assert before[1] != after[1]
    with pytest.raises(ProcessLookupError):
        os.kill(before[1], 0)


@pytest.mark.parametrize(
    ("how", "exitcode", "text"), [("exit", 3, "ended with exit code 3"), ("kill", -signal.SIGKILL, "SIGKILL")]
)
def test_a_dying_rank_is_reported_and_its_worker_replaced(how, exitcode, text):
    before = launch(pid, 3, backend="processes")
    with pytest.raises(RankFailure, match=f"rank 1 failed: RankDied: .*{text}"):
        launch(die, 3, how, backend="processes")
    results = launch(die, 3, how, backend="processes", return_exceptions=True)
    assert isinstance(results[1], RankDied)
    assert results[1].exitcode == exitcode
    after = launch(pid, 3, backend="processes")
    assert (results[0], results[2]) == (before[0], before[2]) == (after[0], after[2])


def test_workers_stay_warm_and_their_group_is_gloo():
    first = launch(pid, 2, backend="processes")
    results = launch(sum_by_gloo, 2, backend="processes")
    assert [(value.item(), threads) for value, threads in results] == [(3.0, 1)] * 2
    assert launch(pid, 2, backend="processes") == first
    assert os.getpid() not in first


def test_workers_see_the_environment_and_the_warning_filters(monkeypatch):
    monkeypatch.setenv("MOECOMM_TEST_LAUNCH", "yes")
    assert launch(environment, 2, backend="processes") == ["yes", "yes"]
    monkeypatch.delenv("MOECOMM_TEST_LAUNCH")
    assert launch(environment, 2, backend="processes") == [None, None]
    with pytest.raises(RankFailure, match="UserWarning: this must be an error"):
        launch(warn, 1, backend="processes")


def test_a_result_that_cannot_travel_is_the_ranks_failure():
    with pytest.raises(RankFailure, match="rank 0 failed"):
        launch(unpicklable, 1, backend="processes")


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="'fibres'"):
        launch(pid, 2, backend="fibres")
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        launch(pid, 0)


def test_no_process_outlives_the_interpreter(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            from moecomm.testing import launch

            def pid(group):
                return os.getpid()

            if __name__ == "__main__":
                print(*launch(pid, 2, backend="processes"), flush=True)
                if sys.argv[1] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(moecomm.__file__).parents[1])}
    for how in ("exit", "kill"):
        done = subprocess.run(
            [sys.executable, str(script), how],
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
            env=environment,
        )
        assert done.returncode == (0 if how == "exit" else -signal.SIGKILL)
        pids = [int(word) for word in done.stdout.split()]
        assert len(pids) == 2
        deadline = time.monotonic() + 10
        while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_a_pool_recovers_from_workers_that_did_not_start(monkeypatch):
    pool = process_pool.ProcessPool()
    monkeypatch.setattr(process_pool, "worker_main", end_at_once)
    with pytest.raises(RuntimeError, match=r"a worker process did not start \(exit code 5\)"):
        pool.run(pid, 2, (), 10)
    monkeypatch.undo()
    assert len(pool.run(pid, 2, (), 10).results) == 2
    pool.close()
    pool.close()


def end_at_once(jobs, stacks):
    os._exit(5)
