"""The official client, for tests that have a `cluster`."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from ropewalk.cluster.serve.local import LocalCluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=cluster.endpoint, api_key="none", max_retries=0, timeout=120) as made:
        yield made
