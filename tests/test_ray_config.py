"""`ray_config.yaml` is what Ray accepts, in each of its three variants."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
VARIANTS = ("local", "aws", "gcp")
Config = dict[str, Any]

# Keys of `provider` as Ray's own code reads them: provider["x"], provider_config.get("x"), config["provider"]["x"].
_READ = re.compile(r"""provider(?:_config)?(?:["']\])?(?:\.get\(|\[)\s*["'](\w+)["']""")


class StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses the same key twice in one mapping, which plain YAML loaders let pass."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        repeated = {key for key in keys if keys.count(key) > 1}
        if repeated:
            raise yaml.constructor.ConstructorError(None, None, f"repeated keys {repeated}", node.start_mark)
        return super().construct_mapping(node, deep)


def variant(name: str) -> Config:
    """The file as a user leaves it who has chosen `name`: the other blocks gone, this one uncommented."""
    text = (ROOT / "ray_config.yaml").read_text()
    for other in VARIANTS:
        block = re.search(rf"^# >>> {other}\b[^\n]*\n(.*?)^# <<< {other}\n", text, re.DOTALL | re.MULTILINE)
        assert block, f"no block for {other}"
        chosen = block[1] if other == "local" else re.sub(r"^# ?", "", block[1], flags=re.MULTILINE)
        text = text[: block.start()] + (chosen if other == name else "") + text[block.end() :]
    config = yaml.load(text, StrictLoader)
    assert isinstance(config, dict)
    return config


def known_provider_keys(provider: str) -> set[str]:
    """Keys that Ray's code for `provider`, or its code for every provider, reads."""
    spec = importlib.util.find_spec("ray.autoscaler._private")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    shared = [root / name for name in ("providers.py", "updater.py", "commands.py", "util.py", "command_runner.py")]
    files = [*shared, *sorted((root / provider).rglob("*.py"))]
    return {key for file in files for key in _READ.findall(file.read_text())}


def check(config: Config) -> Config:
    """Everything `ray up` would check before it touches a machine, and the provider's keys, which it does not."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(config)
    validate_config(prepared)
    provider = config["provider"]
    if unknown := set(provider) - known_provider_keys(provider["type"]):
        raise ValueError(f"provider {provider['type']} has no {', '.join(sorted(unknown))}")
    return prepared


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_passes_rays_own_checks(name: str) -> None:
    prepared = check(variant(name))
    assert prepared["provider"]["type"] == name
    assert prepared["cluster_name"] == "ropewalk"


def test_the_file_as_it_is_is_the_local_variant() -> None:
    assert yaml.load((ROOT / "ray_config.yaml").read_text(), StrictLoader) == variant("local")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *[("local", key) for key in ("head_ips", "worker_ip", "region", "project_id")],
        *[("aws", key) for key in ("availability_zones", "project_id", "zone", "head_ip")],
        *[("gcp", key) for key in ("project", "zone", "aws_credentials", "worker_ips")],
    ],
)
def test_a_wrong_provider_key_is_caught_though_ray_lets_it_pass(name: str, wrong: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = variant(name)
    config["provider"][wrong] = ["x"] if wrong == "worker_ips" else "x"
    validate_config(prepare_config(config))
    with pytest.raises(ValueError, match=f"provider {name} has no {wrong}"):
        check(config)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda config: config.update(head_start_commands=[]), id="unknown top-level key"),
        pytest.param(lambda config: config.update(head_start_ray_commands="one"), id="command list as text"),
        pytest.param(lambda config: config["auth"].update(user="me"), id="unknown auth key"),
    ],
)
def test_rays_schema_catches_other_mistakes(name: str, spoil: Callable[[Config], None]) -> None:
    import jsonschema

    config = variant(name)
    spoil(config)
    with pytest.raises(jsonschema.ValidationError):
        check(config)


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_clouds_have_a_head_and_gpu_workers(name: str) -> None:
    config = check(variant(name))
    workers = {key: kind for key, kind in config["available_node_types"].items() if key != config["head_node_type"]}
    assert list(workers) == ["gpu_worker"]
    assert 0 < workers["gpu_worker"]["min_workers"] <= workers["gpu_worker"]["max_workers"] <= config["max_workers"]


def test_ec2_knows_every_key_of_the_node_types() -> None:
    import botocore.session
    from botocore.validate import ParamValidator

    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    for kind in variant("aws")["available_node_types"].values():
        request = {**kind["node_config"], "MinCount": 1, "MaxCount": 1}
        assert not ParamValidator().validate(request, shape).generate_report()
        assert ParamValidator().validate({**request, "InstanceTyp": "x"}, shape).has_errors()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_command_that_talks_to_ray_uses_tokens_and_the_nodes_have_one(name: str) -> None:
    config = variant(name)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    talking = [command for command in commands if re.search(r"ray start|ropewalk serve", command)]
    assert len(talking) == 3
    assert all("RAY_AUTH_MODE=token" in command for command in talking)
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in talking[0]
    assert "--address=$RAY_HEAD_IP:6379" in talking[2]


@pytest.mark.parametrize("name", VARIANTS)
def test_nodes_get_the_repository_set_it_up_and_serve_from_it(name: str) -> None:
    config = variant(name)
    assert config["file_mounts"]["~/ropewalk"] == "."
    setup = config["setup_commands"][-1]
    script = re.search(r"~/ropewalk/(\S+)", setup)
    assert script is not None
    assert (ROOT / script[1]).is_file()
    assert config["head_start_ray_commands"][-1].startswith("cd ~/ropewalk && ")
    assert "serve.yaml --address auto --detach" in config["head_start_ray_commands"][-1]


@pytest.mark.parametrize("name", VARIANTS)
def test_rays_and_our_command_lines_are_understood(name: str) -> None:
    import argparse

    import click
    from ray.scripts.scripts import start

    from ropewalk.cluster.cli import serve

    config = variant(name)
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    for command in commands:
        if "ray start " in command:
            arguments = command.split("ray start ")[1].split()
            start.make_parser(click.Context(start)).parse_args(arguments)  # raises for an option that does not exist
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    ours = next(command for command in commands if "ropewalk serve" in command)
    options = parser.parse_args(ours.split("bin/ropewalk ")[1].split())
    assert (options.config, options.address, options.detach) == (Path("serve.yaml"), "auto", True)
