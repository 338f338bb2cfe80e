"""DeepEP's interface by `nccl_ep.deep_ep`, under the name that programs import."""

from deep_ep import utils
from nccl_ep.deep_ep import (Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap, HybridEPBuffer,
                             __version__, topk_idx_t)

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "HybridEPBuffer",
           "__version__", "topk_idx_t", "utils"]
