"""The chunk file: whole or not there, and readable by anybody who knows safetensors."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ropewalk.cluster.store.chunk import ALIGNMENT, ChunkHeader, read_chunk, write_chunk
from ropewalk.kernels.keys import Domain, as_tokens, chain_key, content_key, root_key

TENANT = "acme"


def make(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[ChunkHeader, torch.Tensor]:
    tokens = as_tokens(range(7, 7 + shape[1]))
    chain = chain_key(root_key(TENANT), tokens, Domain.EXACT)
    header = ChunkHeader(chain, root_key(TENANT), content_key(TENANT, tokens), TENANT, Domain.EXACT, 3, tokens)
    return header, torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(0, 37), st.integers(1, 3), st.integers(1, 9)),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_safetensors_reads_what_was_written(shape, dtype):
    header, rows = make(shape, dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chunk"
        assert write_chunk(path, header, rows) == path.stat().st_size
        with safe_open(path, "pt") as file:
            assert torch.equal(file.get_tensor("rows"), rows)
            assert file.get_tensor("tokens").tolist() == header.tokens.tolist()
            assert file.metadata()["start"] == "3"
        found, found_rows = read_chunk(path)
        assert torch.equal(found_rows, rows)
        assert found.tokens.tolist() == header.tokens.tolist()
        assert found_rows.data_ptr() % ALIGNMENT == 0 or rows.numel() == 0


def test_rows_need_not_be_contiguous(tmp_path):
    header, rows = make((2, 40, 3, 8))
    write_chunk(tmp_path / "chunk", header, rows.transpose(2, 3).contiguous().transpose(2, 3))
    assert torch.equal(read_chunk(tmp_path / "chunk")[1], rows)


@pytest.mark.parametrize("limit", [0, 100, 5000])
def test_a_file_that_cannot_be_written_to_its_end_is_not_there(tmp_path, limit):
    header, rows = make((2, 40, 3, 16))
    with files_limited_to(limit), pytest.raises(OSError, match="too large"):
        write_chunk(tmp_path / "chunk", header, rows)
    assert not list(tmp_path.iterdir())
