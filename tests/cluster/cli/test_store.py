"""`ropewalk store`: counts and repairs a store from the command line."""

import json
from pathlib import Path

import pytest
import torch

from ropewalk.cluster.cli import main
from ropewalk.cluster.store.chunk import ChunkHeader
from ropewalk.cluster.store.node_store import NodeStore
from ropewalk.kernels.keys import Domain, as_tokens, chain_key, content_key, root_key


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = NodeStore(tmp_path, "model", "t", 1 << 20)
    for first in range(3):
        tokens, parent = as_tokens(range(first, first + 40)), root_key("t")
        chain = chain_key(parent, tokens, Domain.EXACT)
        header = ChunkHeader(chain, parent, content_key("t", tokens), "t", Domain.EXACT, 0, tokens)
        assert store.put(header, torch.zeros(1, 40, 1, 4))
    return tmp_path


def damage_one(root: Path) -> None:
    path = sorted(root.glob("*/*/objects/*/*"))[0]
    path.write_bytes(path.read_bytes()[:-1])


def test_usage_counts_chunks_and_bytes(root, capsys):
    assert main(["store", "usage", "--root", str(root), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["root"], report["num_chunks"], report["num_quarantined"]) == (str(root), 3, 0)
    assert report["num_bytes"] == sum(path.stat().st_size for path in root.glob("*/*/objects/*/*"))


def test_a_scan_of_a_sound_store_returns_zero(root, capsys):
    assert main(["store", "scan", "--root", str(root)]) == 0
    assert capsys.readouterr().out == f"{root}\n  chunks: 3\n"


def test_a_scan_that_finds_damage_returns_one_and_names_it(root, capsys):
    damage_one(root)
    assert main(["store", "scan", "--root", str(root), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["chunks"], report["quarantined_truncated"], report["markers_removed"]) == (2, 1, 2)
    assert main(["store", "usage", "--root", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_quarantined"] == 1
    assert main(["store", "scan", "--root", str(root)]) == 0


@pytest.mark.parametrize("action", ["scan", "usage"])
def test_a_root_that_is_no_directory_is_reported_in_one_line(action, tmp_path, capsys):
    (tmp_path / "file").touch()
    for root, problem in ((tmp_path / "absent", "there is no such directory"), (tmp_path / "file", "is not a")):
        assert main(["store", action, "--root", str(root)]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"ropewalk store: --root {root}: {problem}")
        assert message.count("\n") == 1


def test_an_unknown_action_is_a_users_mistake(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["store", "mend"])
    assert ended.value.code == 2
