"""Runs a cluster: inside this process (`Deployment`, what `ropewalk serve` does) or as a child (`LocalCluster`)."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from ropewalk.cluster.config import ClusterConfig
from ropewalk.cluster.serve import progress
from ropewalk.cluster.serve.processes import STOP_GRACE_S, end_processes, shared_memory_of
from ropewalk.cluster.serve.tls import tls_settings

NAMESPACE = "ropewalk"
"""Ray namespace of everything that Ropewalk starts by name."""

OBJECT_STORE_BYTES = 128 * 2**20
"""Requests and answers only: KV goes through the chunk store, never through Ray's object store."""

MIN_SHARED_MEMORY_BYTES = 2**30

STORE_PREFIX = "ropewalk-store-"
"""Temporary stores are called after the process that they belong to: `ropewalk-store-<pid>-<random>`."""

WORK_PREFIX = "rw-"
"""The same for a local Ray's directory: sockets, logs, its certificate."""

_FLUSH_S = 20.0
"""Most seconds that a stop takes to copy chunks to the disk: what is missing is computed again later on."""

Report = Callable[[str], None]


class StartError(Exception):
    """The cluster could not be started; the message says why and where the logs are."""


def port_problem(host: str, port: int) -> str | None:
    """Why nothing can listen on `host:port`, or `None` if something can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def url_of(config: ClusterConfig) -> str:
    """Base URL of the OpenAI API."""
    host = config.http.host
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{config.http.port}/v1" if ":" in host else f"http://{host}:{config.http.port}/v1"


class Deployment:
    """The application on a Ray of its own (loopback only), or on a running cluster when `address` is given.

    Ray is global to a process: only one `Deployment` may be alive in it. Whatever was started is stopped by `stop`,
    and nothing else: the processes are remembered by pid.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        report: Report,
        address: str | None = None,
        orphaned: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.address = address
        self._orphaned = orphaned
        self._report = report
        self._started_at = time.monotonic()
        self._started_epoch_s = time.time()
        self._work_dir: Path | None = None
        self._store_dir: Path | None = None
        self.log_dir: Path | None = None
        self.ray_address = ""
        self.ray_environment: dict[str, str] = {}
        self._connected = False
        self._deployed = False

    def say(self, message: str) -> None:
        """Report progress with the seconds since the start."""
        self._report(f"[{time.monotonic() - self._started_at:6.1f} s] {message}")

    def start(self, sources: Mapping[str, str], *, timeout_s: float, wait: bool = True) -> None:
        """Start Ray, deploy, and return when every replica is ready (without `wait`: at once). Raises `StartError`.

        `sources`: what vLLM loads, by model name (`ropewalk.cluster.config.resolve_sources`).
        """
        self._start_ray()
        self._deploy(sources)
        if wait:
            self._wait_until_ready(timeout_s)

    def _start_ray(self) -> None:
        if self.address is None:
            # Read when Ray is imported: keeps every listener of a single-node Ray on 127.0.0.1.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
            # Ray runs workers at 15, so that on a busy machine every other process would slow down the engines.
            os.environ.setdefault("RAY_worker_niceness", "0")
            # Ray's 0.1 s costs some percent of a core all the time; nothing here changes that fast.
            os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.3")
            # On a busy machine a proxy takes longer than Ray's 5 s to come up, and would be killed for it.
            os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
            self._work_dir = _short_temp_dir()
            if self.config.scheduler.enabled and self.config.scheduler.state_path is None:
                # So that a scheduler that dies comes back with what it knew.
                state = {"state_path": self._work_dir / "scheduler.json"}
                scheduler = self.config.scheduler.model_copy(update=state)
                self.config = self.config.model_copy(update={"scheduler": scheduler})
            if "RAY_USE_TLS" not in os.environ:
                self.ray_environment = tls_settings(self._work_dir)
                os.environ.update(self.ray_environment)
            self.say(f"starting Ray on 127.0.0.1 (logs: {self._work_dir}/session_latest/logs)")
        else:
            self.say(f"connecting to Ray at {self.address}")
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # of this process; replicas get their own level
        import ray

        for name in ("ray", "ray.serve", "ray.data"):
            logging.getLogger(name).setLevel(logging.ERROR)
        if self.address is None:
            context = self._init_ray(
                address="local",
                namespace=NAMESPACE,
                num_cpus=self._num_cpus(),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(self._work_dir),
            )
            if mode := os.environ.get("RAY_AUTH_MODE"):  # a new Ray asks for the user's token, unless told otherwise
                self.ray_environment["RAY_AUTH_MODE"] = mode
        else:
            try:
                context = ray.init(
                    address=self.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
                )
            except ConnectionError as error:
                raise StartError(
                    f"{error}; a cluster with token authentication needs RAY_AUTH_MODE=token and its token"
                ) from None
        self.log_dir = Path(ray._private.worker._global_node.get_logs_dir_path())
        self.ray_address = str(context.address_info["gcs_address"])
        self._connected = True

    def _init_ray(self, **options: Any) -> Any:
        """`ray.init`, once more if its fixed 30 s did not suffice on a busy machine."""
        import ray

        for is_last in (False, True):
            try:
                return ray.init(**options)
            except Exception as error:
                ray.shutdown()
                end_processes(psutil.Process().children(recursive=True))
                if is_last or "timed out" not in str(error):
                    raise StartError(f"Ray did not start: {error}") from error
                self.say("Ray did not come up in time; trying once more")
        raise AssertionError("unreachable")

    def _num_cpus(self) -> int:
        """Logical CPUs of the local Ray: enough for all replicas, because they may share cores."""
        from ropewalk.cluster.serve.shares import cpus_per_replica

        nodes = self._cpus_of_nodes()
        wanted = sum(model.replicas * cpus_per_replica(self.config, model, nodes) for model in self.config.models)
        return max(wanted, len(os.sched_getaffinity(0)))

    def _cpus_of_nodes(self) -> list[int]:
        """CPUs of each machine that replicas may run on."""
        if self.address is None:
            return [len(os.sched_getaffinity(0))]
        import ray

        nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        return [num_cpus for num_cpus in nodes if num_cpus] or [1]

    def store_root(self) -> Path:
        """Directory of the chunk store; a temporary one in memory unless the settings name one."""
        if self.config.store.root is not None:
            return self.config.store.root
        if self.address is not None:  # every node needs the same path, and the cluster outlives this process
            from ropewalk.cluster.engine.settings import default_store_root

            return default_store_root()
        if self._store_dir is None:
            parent = _store_parent()
            remove_stale_stores(parent)
            self._store_dir = Path(tempfile.mkdtemp(prefix=f"{STORE_PREFIX}{os.getpid()}-", dir=parent))
        return self._store_dir

    def _deploy(self, sources: Mapping[str, str]) -> None:
        self.say("Ray is up; importing Ray Serve and vLLM")
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import LoggingConfig

        from ropewalk.cluster.engine.settings import default_store_budget
        from ropewalk.cluster.serve.application import (
            APP_NAME,
            build_application,
            deployment_name,
            scheduler_settings,
        )
        from ropewalk.scheduler.actor import get_or_create_scheduler, stop_scheduler

        self._names = {model.name: deployment_name(model) for model in self.config.models}
        self._app_name = APP_NAME
        quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
        serve.start(
            http_options={"host": self.config.http.host, "port": self.config.http.port},
            proxy_location="HeadOnly" if self.address is None else "EveryNode",
            logging_config=quiet,
        )
        listening = _get_global_client().http_config  # of the Serve that runs there already, if one does
        if (listening.host, listening.port) != (self.config.http.host, self.config.http.port):
            raise StartError(
                f"Ray Serve on this cluster listens on {listening.host}:{listening.port} already, "
                f"not on {self.config.http.host}:{self.config.http.port}; use its --host and --port"
            )
        if self.address is not None:
            stop_scheduler()  # one of an earlier deployment would keep its settings; it saves what it has learned
        if (settings := scheduler_settings(self.config)) is not None:
            get_or_create_scheduler(settings)
        running = serve.status().applications.get(APP_NAME) if self.address is not None else None
        if running is not None and running.status == "DEPLOY_FAILED":
            serve.delete(APP_NAME)  # it cannot be deployed over; one that serves goes on until its successor is there
        application = build_application(
            self.config, sources, self.store_root(), cpus_of_nodes=self._cpus_of_nodes(), loopback=self.address is None
        )
        replicas = ", ".join(f"{model.name} x {model.replicas}" for model in self.config.models)
        if not all(model.plain for model in self.config.models):
            budget = self.config.store.budget or default_store_budget(self.store_root())
            self.say(f"chunk store: {self.store_root()}, at most {budget / 2**30:.1f} GiB")
        self.say(f"deploying {replicas}")
        self._deployed = True
        serve.run_many(
            [serve.RunTarget(application, name=APP_NAME, route_prefix="/", logging_config=quiet)],
            wait_for_applications_running=False,
        )

    def _wait_until_ready(self, timeout_s: float) -> None:
        from ray.serve.context import _get_global_client

        deadline = time.monotonic() + timeout_s
        shown: list[str] = []
        while True:
            details = _get_global_client().get_serve_details()["applications"].get(self._app_name, {})
            if details.get("status") == "RUNNING":
                return
            if reason := progress.failure(details, self.log_dir, self._started_epoch_s):
                raise StartError(f"a replica failed to start: {reason}")
            lines = progress.describe(details.get("deployments", {}), self._names, self.log_dir)
            for line in lines:
                if line not in shown:
                    self.say(line)
            shown = lines
            if self._orphaned():
                raise StartError("the process that wanted this cluster is gone")
            if time.monotonic() > deadline:
                raise StartError(f"not ready after {timeout_s:.0f} s: {'; '.join(lines)}")
            time.sleep(1.0)  # between two looks at Ray Serve, which costs a call to its controller

    def stop(self, *, keep_logs: bool = False) -> None:
        """Stop what `start` has started; on a running cluster only the application."""
        if self.address is None:
            self._stop_ray()
            self._flush_store()
        elif self._connected:
            self._delete_application()
        if self._store_dir is not None:
            shutil.rmtree(self._store_dir, ignore_errors=True)
        if self._work_dir is not None and not keep_logs:
            shutil.rmtree(self._work_dir, ignore_errors=True)

    def _stop_ray(self) -> None:
        """End the Ray of this process, also one that was interrupted while it started."""
        started = psutil.Process().children(recursive=True)
        segments = shared_memory_of(started)
        if self._connected:
            import ray

            _shut_down_serve()
            started += [process for process in psutil.Process().children(recursive=True) if process not in started]
            ray.shutdown()
            self._connected = False
        end_processes(started)
        for segment in segments:  # vLLM's workers do not always get to delete theirs
            segment.unlink(missing_ok=True)

    def _flush_store(self) -> None:
        """Copy to the disk tier what only memory holds: the next cluster starts warm."""
        if self.config.store.disk_root is None or not self._deployed:
            return
        from ropewalk.cluster.engine.settings import flush_store
        from ropewalk.cluster.serve.application import engine_settings

        num_chunks = flush_store(engine_settings(self.config, self.config.models[0], self.store_root()), _FLUSH_S)
        self.say(f"kept {num_chunks} more chunks in {self.config.store.disk_root}")

    def _delete_application(self) -> None:
        import ray
        from ray import serve

        from ropewalk.scheduler.actor import stop_scheduler

        if self._deployed:  # else the application that runs there is somebody else's
            with contextlib.suppress(Exception):  # whatever is wrong there, this process has to end
                serve.delete(self._app_name)
            with contextlib.suppress(Exception):
                stop_scheduler()
        ray.shutdown()
        self._connected = False


def _shut_down_serve() -> None:
    """Bounded in time. In this thread, because Ray aborts a process that calls it from another after `ray.shutdown`."""
    from ray.serve.context import _get_global_client

    from ropewalk.scheduler.actor import stop_scheduler

    with contextlib.suppress(Exception):
        stop_scheduler()  # it saves what it has learned
    with contextlib.suppress(Exception):
        _get_global_client().shutdown(timeout_s=STOP_GRACE_S)


def _store_parent() -> Path:
    """Shared memory where it has room: containers often get 64 MB of it, which holds a few thousand tokens only."""
    shared_memory = Path("/dev/shm")
    if os.access(shared_memory, os.W_OK) and shutil.disk_usage(shared_memory).free >= MIN_SHARED_MEMORY_BYTES:
        return shared_memory
    return Path(tempfile.gettempdir())


def remove_stale_stores(parent: Path) -> None:
    """Delete temporary stores whose process was killed before it could: in memory they would take RAM for ever."""
    _remove_stale(parent, STORE_PREFIX)


def _remove_stale(parent: Path, prefix: str) -> None:
    for directory in parent.glob(f"{prefix}*-*"):
        pid = directory.name.removeprefix(prefix).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(directory, ignore_errors=True)  # leaves what belongs to another user


def _short_temp_dir() -> Path:
    """A directory whose path is short enough for Ray's sockets (107 bytes, of which Ray needs about 65)."""
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 24 else "/tmp"
    _remove_stale(Path(parent), WORK_PREFIX)
    return Path(tempfile.mkdtemp(prefix=f"{WORK_PREFIX}{os.getpid()}-", dir=parent))


class LocalCluster:
    """`ropewalk serve` as a child process, for programs that need an endpoint for a while.

        with LocalCluster(config) as cluster:
            OpenAI(base_url=cluster.endpoint, api_key="none")

    `__exit__` ends the child and whatever it has left behind, also when it has died by itself.
    """

    def __init__(self, config: ClusterConfig, *, report: Report | None = None, start_timeout_s: float = 600.0) -> None:
        self.config = config
        self._report = report
        self._start_timeout_s = start_timeout_s
        self._directory = Path(tempfile.mkdtemp(prefix="rw-cluster-"))
        self._process: subprocess.Popen[str] | None = None
        self._descendants: list[psutil.Process] = []
        self._ready: dict[str, Any] = {}
        self.output: list[str] = []

    @property
    def endpoint(self) -> str:
        """Base URL of the OpenAI API, such as `http://127.0.0.1:8000/v1`."""
        return str(self._ready["endpoint"])

    @property
    def ray_address(self) -> str:
        """Address of the cluster's Ray, for `ray.init(address=...)` in a process with `ray_environment`."""
        return str(self._ready["ray_address"])

    @property
    def ray_environment(self) -> dict[str, str]:
        """What the environment of a process must hold before it imports Ray, to be let in."""
        return dict(self._ready["ray_environment"])

    @property
    def store_root(self) -> Path:
        """Directory of the chunk store."""
        return Path(self._ready["store_root"])

    @property
    def pid(self) -> int:
        """The process that runs the cluster; all others are its descendants."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> LocalCluster:
        """Start and wait until every replica is ready. Raises `StartError` with the child's last words."""
        settings = self._directory / "serve.yaml"
        settings.write_text(yaml.safe_dump(self.config.model_dump(mode="json")))
        ready_file = self._directory / "ready.json"
        command = [sys.executable, "-m", "ropewalk.cluster.cli", "serve", str(settings)]
        command += ["--ready-file", str(ready_file), "--start-timeout", str(self._start_timeout_s)]
        command += ["--parent", str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._relay_thread = threading.Thread(target=self._relay, args=(self._process,), daemon=True)
        self._relay_thread.start()
        try:
            for _ in _poll(self._start_timeout_s + 60):
                if ready_file.exists():
                    self._ready = json.loads(ready_file.read_text())
                    self._descendants = psutil.Process(self._process.pid).children(recursive=True)
                    return self
                if self._process.poll() is not None:
                    break
        except BaseException:
            self.stop()
            raise
        self.stop()
        self._relay_thread.join(timeout=5)
        raise StartError(self._last_words())

    def _last_words(self) -> str:
        """What the child printed as the reason, and where its logs are; else its last line."""
        words = [line for line in self.output if line.startswith(("ropewalk serve: ", "logs: "))]
        return "; ".join(words).removeprefix("ropewalk serve: ") or (self.output or ["it did not start"])[-1]

    def _relay(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.output.append(line.rstrip("\n"))
            if self._report is not None:
                self._report(self.output[-1])

    def stop(self) -> None:
        """Stop the cluster as Ctrl-C would, and see to it that no process of it is left."""
        if self._process is not None:
            if self._process.poll() is None:
                self._descendants = psutil.Process(self._process.pid).children(recursive=True)
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=60)
                if self._process.poll() is None:
                    self._process.kill()
                    self._process.wait()
            end_processes(self._descendants)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _poll(timeout_s: float, pause_s: float = 0.1) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        yield
        time.sleep(pause_s)  # between two looks, up to the deadline
