"""`ropewalk serve`: run a cluster until Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ropewalk.cluster.cli import UserError
from ropewalk.cluster.config import ClusterConfig, ConfigError, load_config, parse_config, resolve_sources

DEFAULT_CONFIG = Path("serve.yaml")

PARENT_CHECK_S = 1.0


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        help="run a cluster and its OpenAI endpoint",
        description="Serve the models of serve.yaml on this machine (or, with --address, on a running Ray cluster).",
    )
    parser.add_argument("config", nargs="?", type=Path, help="settings (default: ./serve.yaml if there is one)")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8000)")
    parser.add_argument("--model", help="serve this one model: an embedded name, a directory or a Hugging Face id")
    parser.add_argument("--replicas", type=int, help="replicas of --model, or of the only model in the settings")
    parser.add_argument("--address", help="connect to a running Ray cluster ('auto') instead of starting one")
    parser.add_argument(
        "--detach",
        action="store_true",
        help="with --address: do not wait, leave it running",
    )
    parser.add_argument("--start-timeout", type=float, default=900.0, metavar="SECONDS", help="give up after this long")
    parser.add_argument("--parent", type=int, metavar="PID", help="stop when this process, the parent, is gone")
    parser.add_argument("--ready-file", type=Path, help="write the endpoint here as JSON once everything is ready")
    return parser


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Returns 1 when a replica cannot be started."""
    config = _config(args)
    if args.detach and args.address is None:
        raise UserError("--detach needs --address: a cluster of this process ends with it")
    from ropewalk.cluster.serve.local import Deployment, StartError, port_problem

    if args.address is not None and not _listens(args.address):
        raise UserError(
            f"--address {args.address}: no Ray cluster listens there; give HOST:PORT of its head, or 'auto'"
        )
    if args.address is None and (problem := port_problem(config.http.host, config.http.port)):
        raise UserError(
            f"cannot listen on {config.http.host}:{config.http.port}: {problem}; choose another with --port"
        )
    try:
        sources = resolve_sources(config)
    except ConfigError as error:
        raise UserError(str(error)) from None

    # Ray and vLLM write to stderr from many places, also from C++: all of it goes to a file.
    noise = tempfile.NamedTemporaryFile(prefix="ropewalk-serve-", suffix=".log", delete=False)  # noqa: SIM115
    stopping = threading.Event()
    deployment = Deployment(config, report=_say, address=args.address, orphaned=lambda: _orphaned(args.parent))
    code = 0
    with _stderr_to(noise.fileno()) as errors, contextlib.redirect_stdout(sys.stderr):
        try:
            _interrupt_on(signal.SIGTERM)
            deployment.start(sources, timeout_s=args.start_timeout, wait=not args.detach)
            for number in (signal.SIGINT, signal.SIGTERM):  # Ray has installed a handler of its own
                signal.signal(number, lambda *_: stopping.set())
            if args.detach:
                deployment.say("deployed; replicas start as machines have room for them (see `ropewalk status`)")
                return 0
            _announce(config, deployment, args.ready_file)
            while not stopping.wait(PARENT_CHECK_S) and not _orphaned(args.parent):
                pass
        except (KeyboardInterrupt, SystemExit):  # Ray answers SIGTERM with the latter
            code = 130
        except StartError as error:
            code = 1
            _explain_failure(str(error), deployment.log_dir, noise.name, errors)
        except Exception as error:
            code = 1
            traceback.print_exc()
            _explain_failure(f"{type(error).__name__}: {error}", deployment.log_dir, noise.name, errors)
        finally:
            if not (args.detach and code == 0):
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                deployment.say("stopping")
                deployment.stop(keep_logs=code == 1)
                deployment.say("stopped")
            if code != 1:
                os.unlink(noise.name)
    return code


def _config(args: argparse.Namespace) -> ClusterConfig:
    """The settings file with the command line's changes. Raises `UserError`."""
    try:
        path = args.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
        if args.model is not None:
            values: dict[str, Any] = {"models": [{"source": args.model, "reuse": "reuse"}]}
            if args.config is not None:
                values = {**load_config(args.config).model_dump(mode="json"), **values}
        elif path is not None:
            values = load_config(path).model_dump(mode="json")
        else:
            raise UserError("nothing to serve: give a settings file, or --model such as --model smollm2-135m")
        http = {name: value for name, value in (("host", args.host), ("port", args.port)) if value is not None}
        values["http"] = {**values.get("http", {}), **http}
        if args.replicas is not None:
            if len(values["models"]) != 1:
                raise UserError(
                    f"--replicas {args.replicas}: the settings name {len(values['models'])} models; set it there"
                )
            values["models"][0]["replicas"] = args.replicas
        return parse_config(values, str(path) if path and args.model is None else "command line")
    except ConfigError as error:
        raise UserError(str(error)) from None


def _announce(config: ClusterConfig, deployment: Any, ready_file: Path | None) -> None:
    from ropewalk.cluster.serve.local import url_of

    url = url_of(config)
    model = config.models[0].name
    deployment.say(f"ready: {url}")
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    print(
        f"\n  curl {url}/chat/completions -H 'content-type: application/json' \\\n    -d '{body}'\n",
        file=sys.__stdout__,
        flush=True,
    )
    if ready_file is not None:
        facts = {
            "endpoint": url,
            "models": [entry.name for entry in config.models],
            "pid": os.getpid(),
            "ray_address": deployment.ray_address,
            "ray_environment": deployment.ray_environment,
            "store_root": str(deployment.store_root()),
            "log_dir": str(deployment.log_dir) if deployment.log_dir else None,
        }
        partial = ready_file.with_suffix(".partial")
        partial.write_text(json.dumps(facts, indent=1))
        partial.rename(ready_file)


def _explain_failure(reason: str, log_dir: Path | None, noise: str, errors: TextIO) -> None:
    logs = ", ".join([*([str(log_dir)] if log_dir else []), noise])
    print(f"ropewalk serve: {reason}\nlogs: {logs}", file=errors, flush=True)


def _say(line: str) -> None:
    print(line, file=sys.__stdout__, flush=True)


def _listens(address: str) -> bool:
    """Whether something does at `HOST:PORT`: Ray itself would go on trying for minutes. `auto` is left to Ray."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return True
    try:
        with socket.create_connection((host, int(port)), timeout=5):
            return True
    except (OSError, OverflowError):
        return False


def _orphaned(parent: int | None) -> bool:
    return parent is not None and os.getppid() != parent


def _interrupt_on(number: signal.Signals) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(number, interrupt)


@contextlib.contextmanager
def _stderr_to(file_descriptor: int) -> Any:
    """Send this process's stderr, and that of processes it starts, to a file; yields the real one."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(file_descriptor, 2)
    errors: TextIO = os.fdopen(os.dup(kept), "w")
    try:
        yield errors
    finally:
        errors.close()
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
