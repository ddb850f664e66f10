"""The router in an application that somebody else has built: Ray's own servers and ingress, stock vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from ropewalk.cluster.models import resolve
from ropewalk.cluster.serve.local import free_port
from ropewalk.cluster.serve.processes import end_processes

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "own_llm_app.py"
START_S = 300.0
NUM_SESSIONS, NUM_TURNS = 4, 3


@pytest.fixture
def endpoint() -> Iterator[str]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="rw-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = os.environ | {
            "RAY_TMPDIR": folder,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # every listener on the loopback
            "RAY_USAGE_STATS_ENABLED": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        log = Path(folder) / "log"
        with log.open("w") as output:
            command = [sys.executable, str(EXAMPLE), resolve("smollm2-135m"), "2", str(port)]
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}/v1"
            deadline = time.monotonic() + START_S
            while not is_ready(url):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(1.0)  # between two looks, up to the deadline
            yield url
        finally:
            started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.send_signal(signal.SIGINT)
            end_processes([psutil.Process(process.pid), *started] if process.poll() is None else started)
            process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/models", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.engine
def test_sessions_find_their_history_on_stock_replicas(endpoint: str) -> None:
    """Two replicas that share nothing: whoever is sent to the other one finds nothing cached."""
    with httpx.Client(timeout=120) as client:
        for turn in range(NUM_TURNS):
            for session in range(NUM_SESSIONS):
                prompt = " ".join(f"{session} {number}" for number in range(100 * (turn + 1)))
                answer = client.post(
                    f"{endpoint}/completions",
                    json={"model": "model", "prompt": prompt, "max_tokens": 1},
                    headers={"x-session-id": f"s{session}"},
                )
                answer.raise_for_status()
                details = answer.json()["usage"]["prompt_tokens_details"] or {}
                cached = details.get("cached_tokens") or 0
                assert turn == 0 or cached > 100 * turn, (session, turn, cached)
