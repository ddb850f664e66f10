"""Ends processes, and finds what they would leave behind."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

STOP_GRACE_S = 8.0
"""What a process has to end by itself, before it is asked to, and again before it is killed."""


def end_processes(processes: list[psutil.Process], grace_s: float = STOP_GRACE_S) -> None:
    """End these processes: wait, then SIGTERM, then SIGKILL. Pids that were reused meanwhile are left alone.

    Python's resource trackers come last: they delete the shared memory of workers that could not do it themselves.
    """
    _, alive = psutil.wait_procs(processes, timeout=1)
    trackers = [process for process in alive if _is_resource_tracker(process)]
    workers = [process for process in alive if process not in trackers]
    for process in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, workers = psutil.wait_procs(workers, timeout=grace_s)
    for process in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs([*workers, *trackers], timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=grace_s)


def shared_memory_of(processes: list[psutil.Process]) -> set[Path]:
    """Python's shared memory segments that these processes have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                path = line.split(maxsplit=5)[-1]
                if path.startswith("/dev/shm/psm_") and not path.endswith("(deleted)"):
                    found.add(Path(path))
    return found


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False
