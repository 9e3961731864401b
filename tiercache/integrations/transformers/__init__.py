"""The Hugging Face reference worker: runs models of transformers, and saves and restores their caches."""

from tiercache.integrations.transformers.audit import Audit, Verdict
from tiercache.integrations.transformers.device import PoolTensors, differences
from tiercache.integrations.transformers.layout import CacheLayout, inspect_cache
from tiercache.integrations.transformers.probe import ProbeReport, load, probe
from tiercache.integrations.transformers.request import Generation
from tiercache.integrations.transformers.runner import ModelRunner, TailMode
from tiercache.integrations.transformers.worker import Worker

__all__ = [
    "Audit",
    "CacheLayout",
    "Generation",
    "ModelRunner",
    "PoolTensors",
    "ProbeReport",
    "TailMode",
    "Verdict",
    "Worker",
    "differences",
    "inspect_cache",
    "load",
    "probe",
]
