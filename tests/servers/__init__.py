"""Tests of the plug-ins in real servers of SGLang, vLLM and LMCache on a CPU: `make test-servers`."""

import pytest

pytest.register_assert_rewrite("tiercache.testing.hosts")
