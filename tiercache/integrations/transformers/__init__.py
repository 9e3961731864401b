"""Reference worker, which runs Hugging Face models and saves and restores their caches.

Everything here belongs to one thread, the one that computes, unless a class says otherwise.
"""

from tiercache.integrations.transformers.device import PoolTensors, differences
from tiercache.integrations.transformers.layout import CacheLayout, inspect_cache
from tiercache.integrations.transformers.probe import load, probe
from tiercache.integrations.transformers.requests.request import Generation, Request, Sampling
from tiercache.integrations.transformers.runner import ModelRunner, TailMode
from tiercache.integrations.transformers.trial import ProbeReport
from tiercache.integrations.transformers.worker import Worker

__all__ = [
    "CacheLayout", "Generation", "ModelRunner", "PoolTensors", "ProbeReport", "Request", "Sampling",
    "TailMode", "Worker", "differences", "inspect_cache", "load", "probe",
]  # fmt: skip
