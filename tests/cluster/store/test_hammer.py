"""No wrong KV, whatever happens to the files: a chunk comes back exactly as it was stored, or not at all."""

import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from ropewalk.cluster.store.chunk import ChunkCorrupt, ChunkHeader, read_chunk, read_header, write_chunk
from ropewalk.cluster.store.node_store import DiskTier, NodeStore
from ropewalk.kernels.keys import HEAD_LENGTH, Domain, as_tokens, chain_key, content_key, head_key, root_key

from .test_node_store import TENANT, make_chunk

NUM_FLIPS = 1000
BUDGET = 1 << 26


def make_chain(seed: int) -> list[tuple[ChunkHeader, torch.Tensor]]:
    """A prompt's chunks: two exact ones and, behind a run that is not stored, one of the reuse domain."""
    generator = torch.Generator().manual_seed(seed)
    dtype = (torch.bfloat16, torch.float32)[seed % 2]
    chunks, parent, start = [], root_key(TENANT), 0
    for length, domain in ((70, Domain.EXACT), (33, Domain.EXACT), (90, Domain.REUSE), (40, Domain.REUSE)):
        tokens = as_tokens(torch.randint(0, 50_000, (length,), generator=generator).numpy())
        chain = chain_key(parent, tokens, domain)
        header = ChunkHeader(chain, parent, content_key(TENANT, tokens), TENANT, domain, start, tokens)
        chunks.append((header, torch.randn(2, length, 1, 8, generator=generator).to(dtype)))
        parent, start = chain, start + length
    del chunks[2]
    return chunks


def facts(header: ChunkHeader) -> tuple:
    """All that a header says."""
    names = (header.chain, header.parent, header.content, header.tenant)
    return (*names, header.domain, header.start, tuple(header.tokens.tolist()))


def object_file(root: Path, chain: str) -> Path:
    (path,) = root.glob(f"*/*/objects/{chain[:2]}/{chain}")
    return path


def flip(path: Path, rng: random.Random) -> tuple[bytes, int]:
    """Flip one bit in place: in the position a chunk was computed at, in what stands before the rows, or anywhere."""
    original = path.read_bytes()
    start = original.index(b'"start":"') + len(b'"start":"')
    front = 8 + int.from_bytes(original[:8], "little") + 400
    ranges = [(start, original.index(b'"', start)), (0, min(front, len(original))), (0, len(original))]
    position = rng.randrange(*rng.choice(ranges))
    data = bytearray(original)
    data[position] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return original, position


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_no_flipped_bit_changes_what_a_reader_or_a_planner_is_told(tmp_path, tier):
    rng = random.Random(1)
    disk = DiskTier(tmp_path / "disk", BUDGET)
    root = tmp_path / "memory"
    stored = {header.chain: (header, rows) for seed in range(4) for header, rows in make_chain(seed)}

    def view() -> NodeStore:
        return NodeStore(root, "model", TENANT, BUDGET, disk)

    first = view()
    for header, rows in stored.values():
        assert first.put(header, rows)
    if tier == "disk":
        first.flush(60)
        shutil.rmtree(root)
    place = root if tier == "memory" else disk.root
    pristine = {chain: object_file(place, chain).read_bytes() for chain in stored}
    num_noticed = 0
    remembering = view()  # a planner that lives through all of it
    for number in range(NUM_FLIPS):
        chain = rng.choice(list(stored))
        header, rows = stored[chain]
        path = object_file(place, chain)
        original, position = flip(path, rng)
        planner, worker = view(), view()
        seen = [planner.by_chain(chain), *planner.by_content(header.content)]
        if len(header) >= HEAD_LENGTH:
            seen += planner.by_head(head_key(TENANT, header.tokens))
        seen.append(remembering.by_chain(chain))
        for found in seen:
            assert found is None or facts(found) == facts(header), f"flip {number} at byte {position}"
        try:
            found, found_rows = worker.read(chain)
        except (ChunkCorrupt, FileNotFoundError):
            num_noticed += 1
            assert not worker.contains(chain), "a damaged chunk is taken out of service"
        else:
            assert facts(found) == facts(header), f"flip {number} at byte {position}"
            assert found_rows.dtype == rows.dtype
            assert torch.equal(found_rows, rows), f"flip {number} at byte {position}"
        for copy in (root, disk.root):  # whatever was promoted or put aside
            for left in copy.glob(f"*/*/*/**/{chain}"):
                left.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(original)
        assert original == pristine[chain]
        for kind, key in (("content", header.content), ("heads", head_key(TENANT, header.tokens))):
            marker = path.parents[2] / kind / key / chain
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
    assert num_noticed == NUM_FLIPS, "every byte of a file counts"
    assert view().check_integrity() == []


@pytest.mark.parametrize("field", ["start", "parent"])
def test_what_a_damaged_header_said_is_not_remembered_when_the_chunk_is_whole_again(tmp_path, field):
    """A planner would turn keys by a damaged `start`, and a worker find nothing wrong with the file that it reads."""
    header, rows = make_chain(0)[1]
    planner, worker = (NodeStore(tmp_path, "model", TENANT, BUDGET) for _ in range(2))
    worker.put(header, rows)
    path = object_file(tmp_path, header.chain)
    data = path.read_bytes()
    said = f'"{field}":"{getattr(header, field)}"'.encode()
    assert data.count(said) == 1
    path.write_bytes(data.replace(said, said[:-2] + bytes([said[-2] ^ 1]) + said[-1:]))
    assert planner.by_chain(header.chain) is None
    with pytest.raises(FileNotFoundError):
        worker.read(header.chain)
    worker.put(header, rows)
    for found in (planner.by_chain(header.chain), worker.read(header.chain)[0]):
        assert facts(found) == facts(header)


def test_a_file_cut_anywhere_is_not_a_chunk(tmp_path):
    header, rows = make_chunk(1)
    store = NodeStore(tmp_path, "model", TENANT, BUDGET)
    store.put(header, rows)
    path = object_file(tmp_path, header.chain)
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    for length in (0, 1, 7, 8, 9, begin // 2, begin - 1, begin, begin + 7, begin + 160, len(data) // 2, len(data) - 1):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[:length])
        for read in (read_header, read_chunk):
            with pytest.raises(ChunkCorrupt):
                read(path)
        fresh = NodeStore(tmp_path, "model", TENANT, BUDGET)
        with pytest.raises(ChunkCorrupt):
            fresh.read(header.chain)
        assert not fresh.contains(header.chain)
        assert fresh.counters["quarantined_truncated"] + fresh.counters["quarantined_unreadable"] == 1, length


def test_bytes_behind_a_chunk_are_noticed(tmp_path):
    header, rows = make_chunk(1)
    store = NodeStore(tmp_path, "model", TENANT, BUDGET)
    store.put(header, rows)
    path = object_file(tmp_path, header.chain)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ChunkCorrupt, match="should be"):
        store.read(header.chain)


def test_a_half_written_file_is_nobodys_chunk(tmp_path):
    header, rows = make_chunk(1)
    store = NodeStore(tmp_path, "model", TENANT, BUDGET)
    store.put(header, rows)
    path = object_file(tmp_path, header.chain)
    path.rename(path.with_name(f".{header.chain}.0123.tmp"))
    assert not store.contains(header.chain)
    assert store.by_chain(header.chain) is None
    assert store.check_integrity() != [], "its markers are left"
    assert store.by_content(header.content) == []
    assert store.by_head(head_key(TENANT, header.tokens)) == []
    assert store.check_integrity() == []
    assert store.counters["markers_without_chunk"] == 2


def test_a_valid_chunk_under_names_that_its_tokens_do_not_have_is_not_served(tmp_path):
    """Such as KV behind reused KV that says it was exact: the file is sound, but not what its name stands for."""
    header, rows = make_chunk(1)
    other = make_chunk(2, len(header))[0].tokens
    exact, reuse = (chain_key(header.parent, header.tokens, domain) for domain in (Domain.EXACT, Domain.REUSE))
    lies = [
        ChunkHeader(exact, header.parent, header.content, TENANT, Domain.REUSE, 0, header.tokens),
        ChunkHeader(reuse, header.parent, header.content, TENANT, Domain.EXACT, 0, header.tokens),
        ChunkHeader(exact, "f" * 32, header.content, TENANT, Domain.EXACT, 0, header.tokens),
        ChunkHeader(exact, header.parent, header.content, TENANT, Domain.EXACT, 0, other),
        ChunkHeader(exact, header.parent, content_key(TENANT, other), TENANT, Domain.EXACT, 0, header.tokens),
    ]
    for number, lie in enumerate(lies):
        store = NodeStore(tmp_path / str(number), "model", TENANT, BUDGET)
        path = store.base / "objects" / lie.chain[:2] / lie.chain
        write_chunk(path, lie, rows)
        assert store.by_chain(lie.chain) is None
        write_chunk(path, lie, rows)
        with pytest.raises(ChunkCorrupt):
            store.read(lie.chain)
        assert store.counters["quarantined_tokens"] == 2


WRITER = """
import sys
from pathlib import Path
import torch
from ropewalk.cluster.store.chunk import ChunkHeader
from ropewalk.cluster.store.node_store import DiskTier, NodeStore
from ropewalk.kernels.keys import Domain, as_tokens, chain_key, content_key, root_key

store = NodeStore(Path(sys.argv[1]), "model", "acme", 15_000, DiskTier(Path(sys.argv[2]), 15_000))
for seed in list(range(30)) * 2:
    generator = torch.Generator().manual_seed(seed)
    tokens = as_tokens(torch.randint(0, 50_000, (40,), generator=generator).numpy())
    rows = torch.randn(2, 40, 1, 8, generator=generator).to(torch.bfloat16)
    parent = root_key("acme")
    chain = chain_key(parent, tokens, Domain.EXACT)
    store.put(ChunkHeader(chain, parent, content_key("acme", tokens), "acme", Domain.EXACT, 0, tokens), rows)
"""


def test_processes_that_write_the_same_chunks_at_once_leave_whole_ones(tmp_path):
    """They evict, demote and promote at the same time: each budget holds less than half of what they write."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    chunks = [make_chunk(seed) for seed in range(30)]
    reader = NodeStore(memory, "model", TENANT, 15_000, DiskTier(disk, 15_000))
    command = [sys.executable, "-c", WRITER, str(memory), str(disk)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    num_read = 0
    try:
        while any(writer.poll() is None for writer in writers):
            for header, rows in chunks:
                found = reader.by_chain(header.chain)
                assert found is None or facts(found) == facts(header)
                try:
                    assert torch.equal(reader.read(header.chain)[1], rows)
                    num_read += 1
                except FileNotFoundError:
                    pass
    finally:
        errors = [writer.communicate()[1].decode() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0], errors
    assert num_read > 30
    assert reader.counters["quarantined"] == 0
    assert [line for line in reader.check_integrity() if "marker without" not in line] == []
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_reader_keeps_its_rows_when_the_file_is_replaced(tmp_path):
    header, rows = make_chunk(1)
    store = NodeStore(tmp_path, "model", TENANT, BUDGET)
    store.put(header, rows)
    _, mapped = store.read(header.chain)
    path = object_file(tmp_path, header.chain)
    path.unlink()
    store.put(header, rows + 1)
    assert torch.equal(mapped, rows)


def full_disk(root: Path) -> tuple[list[str], str]:
    """A command with a file system of 64 KiB of its own at `root`, and the program that it reads."""
    program = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        sys.argv = ["", {str(root / "store")!r}, {str(root / "disk")!r}]
        source = {WRITER!r}.replace("15_000", "100_000_000")
        exec(source)
        left = [path for path in Path({str(root)!r}).rglob("*.tmp")]
        print(store.counters["puts"], store.counters["put_failed"], store.counters["put_failed_no_space"], len(left))
        print(*store.check_integrity())
    """)
    mount = f"mount -t tmpfs -o size=64k ropewalk-test {root} && exec {sys.executable} -"
    return ["unshare", "--mount", "--map-root-user", "sh", "-c", mount], program


def test_a_full_file_system_refuses_chunks_and_keeps_what_it_has(tmp_path):
    command, program = full_disk(tmp_path)
    try:
        allowed = subprocess.run([*command[:3], "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this system lets nobody mount a file system of its own")
    done = subprocess.run(command, input=program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts, wrong = done.stdout.splitlines()
    num_puts, num_failed, num_no_space, num_temporary = map(int, counts.split())
    assert num_puts > 3
    assert num_failed == num_no_space > 0
    assert num_temporary == 0
    assert wrong == ""
