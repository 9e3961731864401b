"""The contract, over a real S3 service."""

from __future__ import annotations

import pytest

from tests.storage_backends.s3.hooks import S3Hooks
from tests.storage_backends.s3.server import needs_weed


@pytest.mark.slow
@needs_weed
class TestS3(S3Hooks):
    pass
